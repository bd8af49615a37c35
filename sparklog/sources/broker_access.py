"""The means of a task to read through brokers."""

from __future__ import annotations

import msgspec


class BrokerAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by the driver with each task, so that executors need neither files nor passwords.

    Its token is valid for a day.
    """

    ca: bytes | None
    """PEM: the CAs of the brokers; None: those that the executor's machine trusts."""
    authorization: str
    """The token, which only reads records; empty if the brokers ask for no login."""

    def __repr__(self) -> str:
        return "BrokerAccess(…)"
