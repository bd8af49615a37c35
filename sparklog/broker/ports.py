"""Addresses to listen at: given a port, and tried before a listener relies on them.

gRPC silently shares a port that another process listens on, so an address is bound here first.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

from sparklog import errors

_LOOK_SECONDS: Final = 0.05
_ELSEWHERE: Final = {
    "flight.listen": "--flight HOST:PORT",
    "kafka.listen": "--kafka HOST:PORT, or --kafka '' for no Kafka listener",
}


def with_port(listen: str) -> str:
    """`listen`, with a port that is free now where it asks for any (port 0)."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen
    with _bound(listen) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def port_of(address: str) -> int:
    """Of a `host:port`."""
    return int(address.rpartition(":")[2])


def check_free(option: str, listen: str, *, patience_seconds: float) -> None:
    """Raises `BadOption`, which calls it `option`, where nobody can listen at `listen`.

    A port that is taken is tried again for `patience_seconds`.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            _bound(listen).close()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                reason = _reason(option, listen, error)
                raise errors.BadOption(option=option, value=listen, reason=reason) from error
        time.sleep(_LOOK_SECONDS)


def _reason(option: str, listen: str, error: OSError) -> str:
    elsewhere = _ELSEWHERE.get(option, "another address")
    if error.errno == errno.EADDRINUSE:
        return f"another program listens there; stop it, or listen elsewhere ({elsewhere})"
    host = listen.rpartition(":")[0]
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} is not known here; listen elsewhere ({elsewhere})"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; listen elsewhere ({elsewhere})"
    return f"{error.strerror or error}; listen elsewhere ({elsewhere})"


def _bound(listen: str) -> socket.socket:
    """A socket that has the address for the moment. Raises OSError."""
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    infos = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
    # As the listeners do for a name that stands for addresses of both versions.
    family, kind, _, _, place = min(infos, key=lambda info: info[0] != socket.AF_INET)
    found = socket.socket(family, kind)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(place)
    except OSError:
        found.close()
        raise
    return found
