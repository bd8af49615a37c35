"""Tokens that Flight clients get for a login, and send with each call.

A broker signs them with the key of the root, so that every broker of the root accepts them. A token
names the user by its id and epoch: it ends when the user is removed, disabled or cut, and a later
user of the same name cannot use it.

A token for the tasks of a Spark job only reads records. It can be passed to executors,
which should not have the user's password.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sparklog.security.login_method import LoginMethod
from sparklog.security.signed_token import BadToken, TokenScheme

VALID_SECONDS: Final = 3_600
"""The lifetime of the token for a login."""


class UserClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a token."""

    chain_id: str
    """`ClusterMetadata.security` of the root."""
    user: str
    user_id: str
    epoch: int
    """The user, as `User.id` and `User.epoch` of the security state have it."""
    expires_at: int
    """In seconds since 1970."""
    method: LoginMethod | None = None
    """The method by which the user has logged in; None: by a password."""
    ends_at: int | None = None
    """When the certificate or token of that login expires, in seconds since 1970."""
    is_for_tasks: bool = False
    """True if the token only reads records."""
    topics: tuple[str, ...] | None = None
    """The only topics of a token for tasks; None: all that the user may use."""


USER_TOKENS: Final = TokenScheme("Bearer sl1.", b"sparklog user token", UserClaims)


def verify(root_key: bytes, header: str, *, chain_id: str, now_seconds: float) -> UserClaims:
    """Returns the claims of a token for the brokers of this root. Raises `BadToken`.

    The caller checks whether the user still exists.

    Args:
        root_key: of the root; if it is empty, no token is valid.
        header: the value of the header `authorization`.
        chain_id: `ClusterMetadata.security` of the root.
        now_seconds: the time since 1970.
    """
    claims = USER_TOKENS.verify(root_key, header)
    if claims.chain_id != chain_id:
        raise BadToken("its token is for another root")
    if claims.expires_at <= now_seconds:
        raise BadToken("its token has expired: log in again")
    return claims
