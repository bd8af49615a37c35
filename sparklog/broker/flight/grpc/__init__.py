"""A gRPC server on its own sockets, which limits messages before they are received.

gRPC's own servers accept messages of any allowed size in all streams concurrently, and inflate
compressed ones. This server decides by the five-byte prefix of each message:

- A message that is compressed, or larger than its method's `message_bytes`, ends its call
  immediately.
- A stream may send `FREE_BYTES` without permission. A larger message is admitted in steps, through
  HTTP/2's flow control, from `arriving_bytes` shared by all clients. Once those are used up, one
  message at a time may exceed them, up to its end, so that there is no deadlock.
- A stream holds at most one large message that its call has not read.

Unread responses are bounded by the number of calls: each waits until its message has been sent.
Frames without data (pings, settings, resets) are rate-limited.

Modules:

- `server`: the listening sockets, and the thread that reads from all connections.
- `connection`: the calls of one connection, and its lock.
- `frame_reader`: received bytes as frames. `header_blocks`, `idle_frames`: their headers, and the
  limit on frames without data.
- `response_writer`: responses as frames, as far as the client's windows allow.
- `transport`: the bytes on the socket, and TLS.
- `admission`: what a client may send until it is admitted.
- `call`: the messages of one call, and how much more its client may send.
- `foreign_requests`: the responses to clients that do not speak gRPC.
- `message_memory`: the memory for large messages of all calls.
- `threads`: the threads that serve calls; each writes its responses itself.
- `status`: gRPC's status codes. `http2`: frames and headers as bytes.
"""
