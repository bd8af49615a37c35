"""A gRPC server over its own sockets, which bounds messages before they are received.

gRPC's own servers accept a message of any allowed size in every stream at the same time, and
inflate compressed ones. This server decides by the five bytes before each message:

- A message that is compressed, or larger than its method's `message_bytes`, ends its call at once.
- A stream may send `FREE_BYTES` without permission. A larger message is admitted in steps, by
  HTTP/2's flow control, from `arriving_bytes` for all clients together. Where that is used up, one
  message at a time may overdraw it, up to its end, so that there is no deadlock.
- A stream has at most one large message that its call has not read.

Unread responses are bounded by the calls: each waits until its message has been sent. Frames
without data (pings, settings, resets) are bounded per second.

Modules:

- `server`: the listening socket and the thread that reads from all connections.
- `connection`: the frames of one connection to messages of its calls, and responses to frames.
- `call`: the messages of one call, and how much more of them may be sent.
- `message_memory`: the memory for large messages of all calls.
- `threads`: the threads that serve calls; each writes its responses itself.
- `status`: gRPC's status codes. `http2`: frames and headers as bytes.
"""
