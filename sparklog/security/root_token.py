"""Tokens by which a program proves to a broker that it can read the security state of the root.

Such a program could change the users and ACLs itself, so a broker serves it without evaluating
ACLs. A token names the broker and the epoch that it is meant for: a program that listens at the
address of a dead broker can do nothing with what it receives. It is valid for minutes.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final

import msgspec

VALID_SECONDS: Final = 300
"""The lifetime of a token; its sender makes a new one long before that."""
_SCHEME: Final = "sparklog-root "
_SIZE_MAX: Final = 1_024
_USE: Final = b"sparklog Flight token"
"""Derives the key for tokens, so that the root's key can have other uses."""


class RootClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a token."""

    chain_id: str
    """`ClusterMetadata.security` of the root."""
    broker: int
    epoch: int
    """The broker that the token is for, as the metadata names it."""
    who: str
    """The sender as it names itself, for the broker's log."""
    expires_at: int
    """In seconds since 1970."""


_decoder = msgspec.json.Decoder(RootClaims)


class BadToken(ValueError):
    """A token is not accepted; the message is the reason."""


def sign(root_key: bytes, claims: RootClaims) -> str:
    """Returns the value of the header `authorization`."""
    content = msgspec.json.encode(claims)
    return f"{_SCHEME}{_text(content)}.{_text(_signature(root_key, content))}"


def verify(
    root_key: bytes, header: str, *, chain_id: str, broker: int, epoch: int, now_seconds: float
) -> RootClaims:
    """Returns the claims of a token for this broker. Raises `BadToken`.

    Args:
        root_key: of the root; if it is empty, no token is valid.
        header: the value of the header `authorization`.
        chain_id: `ClusterMetadata.security` of the root.
        broker: the id of the broker that has received the token.
        epoch: its epoch.
        now_seconds: the time since 1970.
    """
    if not header.startswith(_SCHEME) or len(header) > _SIZE_MAX:
        raise BadToken("the call has no token of the root")
    content_text, _, signature_text = header.removeprefix(_SCHEME).partition(".")
    try:
        content, signature = _bytes(content_text), _bytes(signature_text)
    except ValueError:
        raise BadToken("its token is malformed") from None
    if not root_key or not hmac.compare_digest(signature, _signature(root_key, content)):
        raise BadToken("its token was signed with another key")
    try:
        claims = _decoder.decode(content)
    except msgspec.MsgspecError:
        raise BadToken("its token is of another release") from None
    if (claims.chain_id, claims.broker, claims.epoch) != (chain_id, broker, epoch):
        raise BadToken(f"its token is for epoch {claims.epoch} of broker {claims.broker}")
    if claims.expires_at <= now_seconds:
        raise BadToken("its token has expired: compare the clocks of the two hosts")
    return claims


def _signature(root_key: bytes, content: bytes) -> bytes:
    return hmac.digest(hmac.digest(root_key, _USE, "sha256"), content, "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode(), altchars=b"-_", validate=True)
