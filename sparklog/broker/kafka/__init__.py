"""The Kafka listener: serves any Kafka client, unmodified.

`listener` and `connection` own sockets and order, `messages` turns frames into kio's messages and
back, `registry` names the requests and versions that are served, `apis` answers them, one module
for each. A request is
translated to calls of `broker`, which decides everything.
"""

from __future__ import annotations

from sparklog.broker.kafka.kio_import import load_without_hypothesis

load_without_hypothesis()
