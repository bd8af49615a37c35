"""Checks whether a Kafka broker listens on a port, without a Kafka client.

Any program may accept a connection, and a broker's port does so before the broker serves. So the
request is one that every Kafka broker answers: ApiVersions in version 0.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

_CORRELATION: Final = 0x5350_4C47
_ASK_VERSIONS: Final = struct.pack(">ihhih", 10, 18, 0, _CORRELATION, -1)
_VERSIONS_START: Final = struct.pack(">iih", 0, _CORRELATION, 0)
"""Start of the answer: its length, which varies, the correlation id, and no error."""


def answers(address: str, *, timeout_seconds: float) -> bool:
    """Returns whether a Kafka broker answers at `host:port`.

    Raises OSError if no connection is accepted, and TimeoutError if it is silent.
    """
    host, _, port = address.rpartition(":")
    place = host.strip("[]"), int(port)
    with socket.create_connection(place, timeout_seconds) as peer:
        peer.sendall(_ASK_VERSIONS)
        return peer.recv(len(_VERSIONS_START), socket.MSG_WAITALL)[4:] == _VERSIONS_START[4:]
