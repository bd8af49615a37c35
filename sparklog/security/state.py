"""The security state of a root: its users, and the changes between two versions of it.

The state is versioned as the metadata is (`storage/security_store.py`). Each version names its
author. All values are immutable.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import msgspec

from sparklog.security.scram import Mechanism, Verifier

_KEY_BYTES: Final = 32


class User(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user that logs in by password."""

    id: str
    """Drawn when the user is created, so that a later user of the same name is another one."""
    credentials: dict[Mechanism, Verifier]
    epoch: int = 0
    """Rises when the connections that the user has must end."""
    disabled: bool = False
    """True if the user cannot log in."""


class Author(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that made a version."""

    principal: str
    """As it names itself: `Root:`, the operating system's user and the host, for a program that
    reads and writes the state itself."""
    at_us: int = 0


class SecurityState(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the security state; version 0 has nothing."""

    version: int = 0
    change_id: str = ""
    users: dict[str, User] = {}
    salt_key: bytes = b""
    """Draws salts for users that do not exist. It never changes, so that the salts do not."""
    author: Author = Author(principal="")

    def __repr__(self) -> str:
        return f"SecurityState(version={self.version}, users={len(self.users)})"


NO_USERS: Final = SecurityState()


def first_state() -> SecurityState:
    """Returns a state without users, with a new key."""
    return SecurityState(salt_key=secrets.token_bytes(_KEY_BYTES))


# ------------------------------------------------------------------------------ changes


class StateDelta(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The changes of one version. Fields that stay as they were are missing.

    A reader that ignored a field of a newer release could admit a user whom that one excludes: it
    refuses the version instead.
    """

    version: int
    change_id: str
    previous: str
    """The change id of the version before; empty for the first."""
    author: Author
    users: dict[str, User | None] = {}
    """Users that were added or have changed; None: removed."""
    salt_key: bytes | msgspec.UnsetType = msgspec.UNSET
    snapshot_crc: int | None = None
    """CRC-32 of the content of the version's snapshot; None if it has no snapshot."""

    def __repr__(self) -> str:
        return f"StateDelta(version={self.version}, users={[*self.users]})"


def delta_of(before: SecurityState, after: SecurityState) -> StateDelta:
    """Returns the delta from `before` to `after`, without a snapshot's checksum."""
    assert after.version == before.version + 1, (before.version, after.version)
    users: dict[str, User | None] = {
        name: user for name, user in after.users.items() if before.users.get(name) != user
    }
    users |= dict.fromkeys(before.users.keys() - after.users.keys())
    return StateDelta(
        version=after.version,
        change_id=after.change_id,
        previous=before.change_id,
        author=after.author,
        users=users,
        salt_key=after.salt_key if after.salt_key != before.salt_key else msgspec.UNSET,
    )


def apply(before: SecurityState, delta: StateDelta) -> SecurityState:
    """Returns the version after `before`. Raises ValueError if the delta does not fit it."""
    if (delta.version, delta.previous) != (before.version + 1, before.change_id):
        raise ValueError(f"it does not follow version {before.version}, {before.change_id}")
    changes: dict[str, Any] = {}
    if delta.salt_key is not msgspec.UNSET:
        changes["salt_key"] = delta.salt_key
    if delta.users:
        if not {n for n, user in delta.users.items() if user is None} <= before.users.keys():
            raise ValueError("it removes users that do not exist")
        users = {**before.users, **delta.users}
        changes["users"] = {name: user for name, user in users.items() if user is not None}
    return msgspec.structs.replace(
        before, version=delta.version, change_id=delta.change_id, author=delta.author, **changes
    )
