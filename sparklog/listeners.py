"""Listeners for Kafka and Flight clients, as settings and messages name them.

A listener is `host:port`, `PROTOCOL://host:port` or `NAME=PROTOCOL://host:port`; several are
separated by commas. The protocol is PLAINTEXT if none is given, and the name is that of the
protocol. A client gets the addresses of all brokers' listeners with the name of the one that it has
connected to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final, NamedTuple

PLAINTEXT: Final = "PLAINTEXT"
SSL: Final = "SSL"
"""TLS, by Kafka's name for it."""
SASL_PLAINTEXT: Final = "SASL_PLAINTEXT"
SASL_SSL: Final = "SASL_SSL"
"""TLS, over which clients log in."""
PROTOCOLS: Final = (PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL)
"""By the names of Kafka's `security.protocol`."""


TLS_SCHEME: Final = "tls://"
"""Precedes the address of a Flight listener with TLS, as clients write it."""


class Listener(NamedTuple):
    """The name, the protocol and the address of a listener."""

    name: str
    protocol: str
    """One of `PROTOCOLS`, once it is checked."""
    address: str
    """`host:port`."""

    @property
    def host(self) -> str:
        """The host; an IPv6 address without its brackets."""
        return host_of(self.address)

    @property
    def is_loopback(self) -> bool:
        """True if only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def has_tls(self) -> bool:
        return self.protocol in (SSL, SASL_SSL)

    @property
    def has_sasl(self) -> bool:
        """True if clients have to log in."""
        return self.protocol in (SASL_PLAINTEXT, SASL_SSL)

    @property
    def client_address(self) -> str:
        """The address as Flight clients write it: `host:port`, or `tls://host:port`."""
        return f"{TLS_SCHEME}{self.address}" if self.has_tls else self.address

    @property
    def url(self) -> str:
        """The address of an HTTP listener."""
        return f"http{'s' if self.has_tls else ''}://{self.address}/"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def is_served_by(self, other: Listener) -> bool:
        """Returns whether `other` is what this one asks for; port 0 asks for any address."""
        is_alike = self[:2] == other[:2]
        return is_alike and (self.address == other.address or self.address.endswith(":0"))

    def __str__(self) -> str:
        if self.name != self.protocol:
            return f"{self.name}={self.protocol}://{self.address}"
        return self.address if self.protocol == PLAINTEXT else f"{self.protocol}://{self.address}"


def host_of(address: str) -> str:
    """Returns the host of `host:port` or `tls://host:port`; an IPv6 address without brackets."""
    return address.removeprefix(TLS_SCHEME).rpartition(":")[0].strip("[]")


def parse(text: str) -> tuple[Listener, ...]:
    """Returns the listeners in the text, unchecked; none if it is empty."""
    return tuple(map(_parse_one, text.split(","))) if text else ()


def _parse_one(text: str) -> Listener:
    name, has_name, rest = text.strip().rpartition("=")
    protocol, has_protocol, address = rest.rpartition("://")
    protocol = protocol if has_protocol else PLAINTEXT
    return Listener(name if has_name else protocol, protocol, address)


def text_of(listeners: Iterable[Listener]) -> str:
    """Returns the text that `parse` reads."""
    return ",".join(map(str, listeners))


def parse_addresses(text: str) -> list[tuple[str, str]]:
    """Returns (name, address) of each `NAME=host:port`; the name is "" if there is none."""
    found = []
    for each in text.split(",") if text else ():
        name, _, address = each.strip().rpartition("=")
        found.append((name, address))
    return found


def text_of_addresses(addresses: Iterable[tuple[str, str]]) -> str:
    """Returns the text that `parse_addresses` reads."""
    return ",".join(f"{name}={each}" if name else each for name, each in addresses)
