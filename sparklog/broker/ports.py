"""Ports of the listeners: bound before the broker takes over its root, listening after recovery.

A socket that is bound but not listening refuses connections, as if there were no broker yet.

- An explicit port is bound with SO_REUSEADDR. Linux lets several such sockets share a port while
  none of them listens, so the root's metadata decides between two brokers that start concurrently.
  `bind` fails if a program is already listening, and only one of several bound sockets gets to
  listen; for a moment, two may block each other.
- A port that the system chooses (port 0) is bound without the option: no other program can bind it.
  The option is set later, because without it the port could not be bound again for a minute after
  its last connections have ended.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Final

from sparklog import errors, limits

_RETRY_SECONDS: Final = 0.05
_UNSPECIFIED: Final = ("0.0.0.0", "::")
"""The unspecified addresses of IPv4 and IPv6, which mean all addresses."""
_OPTIONS: Final = {
    "flight.listen": "--flight HOST:PORT, or SPARKLOG_FLIGHT_LISTEN",
    "metrics.listen": "SPARKLOG_METRICS_LISTEN",
    "kafka.listen": "--kafka HOST:PORT, '' for no Kafka listener; in a program, kafka= of connect",
}


class BoundPort:
    """The socket of one listener, from `bind` through `listen` to `close`.

    Args:
        option: the setting that contains the address, for error messages.
        listen: `host:port`, an IPv6 host in brackets; port 0 chooses a free one.
    """

    def __init__(self, option: str, listen: str) -> None:
        self.option = option
        self._listen = listen
        self._host, _, port = listen.rpartition(":")
        self.port = int(port)
        """0 until a port is bound, if any port was requested."""
        self._socket: socket.socket | None = None

    @property
    def listen_address(self) -> str:
        """The address as configured."""
        return self._listen

    @property
    def is_bound(self) -> bool:
        return self._socket is not None

    @property
    def address(self) -> str:
        """`host:port`, with the port actually bound."""
        return f"{self._host}:{self.port}"

    def try_bind(self) -> bool:
        """Binds the socket if it is not bound; returns false if another program listens there.

        Raises `BadOption` for an address that this machine does not have.
        """
        return self._taken_error(self._bind) is None

    def bind(self, *, patience_seconds: float) -> None:
        """Binds the socket if it is not bound.

        Raises `BadOption` if another program still listens there after `patience_seconds`, and for
        an address that this machine does not have.
        """
        self._retry(self._bind, patience_seconds)

    def overlaps(self, other: BoundPort) -> bool:
        """Returns true if both are bound and only one of them can listen."""
        if self._socket is None or other._socket is None or self.port != other.port:
            return False
        if self._socket.family != other._socket.family:
            return False
        hosts = {each.getsockname()[0] for each in (self._socket, other._socket)}
        return len(hosts) == 1 or not hosts.isdisjoint(_UNSPECIFIED)

    def listen(self, *, patience_seconds: float) -> socket.socket:
        """Returns the listening socket; its user, or `close`, or both close it.

        Raises `BadOption` as `bind` does: another program bound to the port may have been the first
        to listen.
        """
        self._retry(self._bind_and_listen, patience_seconds)
        assert self._socket is not None
        return self._socket

    def close(self) -> None:
        """Closes the socket, if there is one."""
        if self._socket is not None:
            self._socket.close()

    # ---------------------------------------------------------------------- the socket

    def _bind(self) -> None:
        if self._socket is None:
            self._socket = _bound(self._host, self.port)
            self.port = self._socket.getsockname()[1]

    def _bind_and_listen(self) -> None:
        self._bind()
        assert self._socket is not None
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.listen(limits.LISTEN_BACKLOG)

    def _retry(self, attempt: Callable[[], None], patience_seconds: float) -> None:
        deadline = time.monotonic() + patience_seconds
        while (error := self._taken_error(attempt)) is not None:
            if time.monotonic() >= deadline:
                raise self._refusal(error) from error
            time.sleep(_RETRY_SECONDS)

    def _taken_error(self, attempt: Callable[[], None]) -> OSError | None:
        """Returns the error if another program uses the port, or None if the attempt succeeds."""
        try:
            attempt()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return error
            raise self._refusal(error) from error
        return None

    def _refusal(self, error: OSError) -> errors.BadOption:
        other = f"listen at another address ({_OPTIONS.get(self.option, 'the option')})"
        if error.errno == errno.EADDRINUSE:
            reason = f"another program listens there; stop it, or {other}"
        elif isinstance(error, socket.gaierror):
            reason = f"the host {self._host!r} is unknown on this machine; {other}"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = f"{self._host} is not an address of this machine; {other}"
        else:
            reason = f"{error.strerror or error}; {other}"
        return errors.BadOption(option=self.option, value=self._listen, reason=reason)


def port_of(address: str) -> int:
    """Returns the port of a `host:port`."""
    return int(address.rpartition(":")[2])


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound but not listening. Raises `OSError`.

    For a host name with addresses of both versions the IPv4 address is used, and an IPv6 socket
    accepts no IPv4 connections.
    """
    try:
        infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # from the codec for host names
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    family, kind, _, _, address = min(infos, key=lambda info: info[0] != socket.AF_INET)
    found = socket.socket(family, kind)
    try:
        if port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found
