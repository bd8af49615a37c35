"""A listening socket, and how the connections through it are served."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparklog.listeners import Listener

if TYPE_CHECKING:
    from sparklog.broker.tls.contexts import ServerTls


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptor:
    """One of the sockets of a Kafka or Flight listener."""

    listener: Listener
    """With the address that its clients connect to."""
    listening: socket.socket
    tls: ServerTls | None = None
    """Encrypts the connections; None: they are plaintext."""
    mechanisms: tuple[str, ...] = ()
    """The SASL mechanisms that Kafka clients can log in with, if the listener has SASL."""
