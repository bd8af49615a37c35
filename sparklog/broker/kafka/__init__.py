"""The Kafka protocol door: any Kafka client, unmodified.

`door` owns sockets and order, `messages` turns frames into kio's messages and back, `registry` says
which requests are served in which versions, `apis` answers them, one module for each. A request is
translated to calls of `core`, which decides everything.
"""
