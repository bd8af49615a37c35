"""The CA and the token that the driver sends with each task that reads through brokers."""

from __future__ import annotations

import msgspec


class TaskCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """With it, executors need neither files nor passwords. The token is valid for a day."""

    ca: bytes | None
    """PEM: the CAs of the brokers; None: those that the executor's machine trusts."""
    authorization: str
    """The token, which only reads records; empty if the brokers ask for no login."""

    def __repr__(self) -> str:
        return "TaskCredentials(…)"
