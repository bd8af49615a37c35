"""The security state of a root: users, ACLs, quotas and policy, and its changes.

The state is versioned as the metadata is (`storage/security_store.py`). Each version names its
author. All values are immutable.
"""

from __future__ import annotations

import enum
import secrets
from typing import Any, Final

import msgspec

from sparklog.security.acl import Acl
from sparklog.security.login_method import LoginMethod
from sparklog.security.quota import Quota, QuotaEntity, QuotaKey
from sparklog.security.scram import Mechanism, Verifier

_KEY_BYTES: Final = 32


class User(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user that logs in by password, or by the methods that it lists."""

    id: str
    """Drawn when the user is created, so that a later user of the same name is another one."""
    credentials: dict[Mechanism, Verifier]
    epoch: int = 0
    """Rises when the connections that the user has must end."""
    disabled: bool = False
    """True if the user cannot log in."""
    methods: tuple[LoginMethod, ...] = ()
    """The methods by which a principal of this name is this user. With another method it is
    refused, so that an issuer cannot name any user it likes; sorted."""


class Mode(enum.StrEnum):
    """Treatment of requests that no ACL allows."""

    OFF = "off"
    """ACLs are not evaluated."""
    OBSERVE = "observe"
    """The request is served, and the refusal that `ENFORCE` would have led to is logged."""
    ENFORCE = "enforce"
    """The request is refused."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for the whole root."""

    mode: Mode = Mode.OFF
    super_users: tuple[str, ...] = ()
    """Principals that may do everything, such as "User:admin"; sorted."""
    allow_everyone_if_no_acl_found: bool = False
    """Allows everybody what no ACL mentions, as Kafka's setting of this name."""


class Author(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The program that made a version."""

    principal: str
    """As it names itself: `Root:`, the operating system's user and the host, for a program that
    reads and writes the state itself."""
    host: str = ""
    """The address of a client that has changed the state through a broker."""
    at_us: int = 0


class SecurityState(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the security state; version 0 has nothing."""

    version: int = 0
    change_id: str = ""
    policy: Policy = Policy()
    users: dict[str, User] = {}
    acls: frozenset[Acl] = frozenset()
    quotas: dict[QuotaEntity, dict[QuotaKey, float]] = {}
    salt_key: bytes = b""
    """Draws salts for users that do not exist. It never changes, so that the salts do not."""
    home: str = ""
    """The place of the state. Elsewhere it is a copy, whose users and keys are those of another
    root: brokers refuse it until it gets keys of its own."""
    root_key: bytes = b""
    """Signs the tokens of users (`user_token`) and of programs that can read the state
    (`root_token`). It is drawn when `home` is noted, so that no copy has it."""
    ca: str = ""
    """PEM: the CAs by which programs that can read the state check the certificates of brokers."""
    author: Author = Author(principal="")

    def __repr__(self) -> str:
        return (
            f"SecurityState(version={self.version}, users={len(self.users)},"
            f" acls={len(self.acls)}, quotas={len(self.quotas)}, policy={self.policy})"
        )


NO_USERS: Final = SecurityState()


def first_state() -> SecurityState:
    """Returns a state without users, with a new key."""
    return SecurityState(salt_key=new_key())


def new_key() -> bytes:
    """Returns a random key of 256 bits."""
    return secrets.token_bytes(_KEY_BYTES)


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
    policy: Policy | msgspec.UnsetType = msgspec.UNSET
    users: dict[str, User | None] = {}
    """Users that were added or have changed; None: removed."""
    acls_added: tuple[Acl, ...] = ()
    acls_removed: tuple[Acl, ...] = ()
    quotas: tuple[Quota, ...] = ()
    """Those of entities whose quotas have changed; without values: removed."""
    salt_key: bytes | msgspec.UnsetType = msgspec.UNSET
    home: str | msgspec.UnsetType = msgspec.UNSET
    root_key: bytes | msgspec.UnsetType = msgspec.UNSET
    ca: str | msgspec.UnsetType = msgspec.UNSET
    snapshot_crc: int | None = None
    """CRC-32 of the content of the version's snapshot; None if it has no snapshot."""

    def __repr__(self) -> str:
        return f"StateDelta(version={self.version}, users={[*self.users]})"


_WHOLE: Final = ("policy", "salt_key", "home", "root_key", "ca")
"""Fields that a delta replaces as a whole."""


def delta_of(before: SecurityState, after: SecurityState) -> StateDelta:
    """Returns the delta from `before` to `after`, without a snapshot's checksum."""
    assert after.version == before.version + 1, (before.version, after.version)
    whole: dict[str, Any] = {
        name: value for name in _WHOLE if (value := getattr(after, name)) != getattr(before, name)
    }
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
        acls_added=tuple(sorted(after.acls - before.acls)),
        acls_removed=tuple(sorted(before.acls - after.acls)),
        quotas=tuple(
            Quota(entity=entity, values=after.quotas.get(entity, {}))
            for entity in before.quotas | after.quotas
            if before.quotas.get(entity) != after.quotas.get(entity)
        ),
        **whole,
    )


def apply(before: SecurityState, delta: StateDelta) -> SecurityState:
    """Returns the version after `before`. Raises ValueError if the delta does not fit it."""
    if (delta.version, delta.previous) != (before.version + 1, before.change_id):
        raise ValueError(f"it does not follow version {before.version}, {before.change_id}")
    changes: dict[str, Any] = {
        name: value for name in _WHOLE if (value := getattr(delta, name)) is not msgspec.UNSET
    }
    if delta.users:
        if not {n for n, user in delta.users.items() if user is None} <= before.users.keys():
            raise ValueError("it removes users that do not exist")
        users = {**before.users, **delta.users}
        changes["users"] = {name: user for name, user in users.items() if user is not None}
    if delta.acls_added or delta.acls_removed:
        if not before.acls.issuperset(delta.acls_removed):
            raise ValueError("it removes ACLs that do not exist")
        changes["acls"] = before.acls.difference(delta.acls_removed).union(delta.acls_added)
    if delta.quotas:
        if not {each.entity for each in delta.quotas if not each.values} <= before.quotas.keys():
            raise ValueError("it removes quotas that do not exist")
        quotas = before.quotas | {each.entity: each.values for each in delta.quotas}
        changes["quotas"] = {entity: values for entity, values in quotas.items() if values}
    return msgspec.structs.replace(
        before, version=delta.version, change_id=delta.change_id, author=delta.author, **changes
    )
