"""The Kafka listener: serves any unmodified Kafka client.

`listener` and `connection` own the sockets and the order of replies, `messages` turns frames into
kio's messages and back, `registry` lists the supported requests and versions, and `apis` answers
them, one module per request. A request is translated into calls to `broker`, which makes all
decisions.
"""

from __future__ import annotations

from sparklog.broker.kafka.kio_import import load_without_hypothesis

load_without_hypothesis()
