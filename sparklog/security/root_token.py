"""Tokens by which a program proves to a broker that it can read the security state of the root.

Such a program could change the users and ACLs itself, so a broker serves it without evaluating
ACLs. A token names the broker, the epoch and the address that it is meant for: a program that
listens at the address of a dead broker, or at such an address on another machine, can do nothing
with what it receives. It is valid for minutes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sparklog.security.signed_token import BadToken, TokenScheme

VALID_SECONDS: Final = 300
"""The lifetime of a token; its sender makes a new one long before that."""


class RootClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a token."""

    chain_id: str
    """`ClusterMetadata.security` of the root."""
    broker: int
    epoch: int
    """The broker that the token is for, as the metadata names it."""
    address: str
    """The Flight address that the sender has connected to: another listener refuses it."""
    who: str
    """The sender as it names itself, for the broker's log."""
    expires_at: int
    """In seconds since 1970."""


ROOT_TOKENS: Final = TokenScheme("sparklog-root ", b"sparklog Flight token", RootClaims)


def verify(
    root_key: bytes,
    header: str,
    *,
    chain_id: str,
    broker: int,
    epoch: int,
    address: str,
    now_seconds: float,
) -> RootClaims:
    """Returns the claims of a token for this broker. Raises `BadToken`.

    Args:
        root_key: of the root; if it is empty, no token is valid.
        header: the value of the header `authorization`.
        chain_id: `ClusterMetadata.security` of the root.
        broker: the id of the broker that has received the token.
        epoch: its epoch.
        address: that of the listener that has received it, as clients write it.
        now_seconds: the time since 1970.
    """
    claims = ROOT_TOKENS.verify(root_key, header)
    if (claims.chain_id, claims.broker, claims.epoch) != (chain_id, broker, epoch):
        raise BadToken(f"its token is for epoch {claims.epoch} of broker {claims.broker}")
    if claims.address != address:
        raise BadToken(f"its token is for the listener at {claims.address}")
    if claims.expires_at <= now_seconds:
        raise BadToken("its token has expired: compare the clocks of the two hosts")
    return claims
