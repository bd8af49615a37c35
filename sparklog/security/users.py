"""Users of a root, and the changes of them; pure.

A user with a password has a credential for each SCRAM mechanism, and can log in with SASL PLAIN
too, which is checked against one of them. A user without a password lists other methods.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from sparklog import errors
from sparklog.security import scram
from sparklog.security.login_method import LoginMethod
from sparklog.security.scram import Mechanism, Verifier
from sparklog.security.state import SecurityState, User

USERS_MAX: Final = 10_000
NAME_BYTES_MAX: Final = 255
PASSWORD_BYTES_MAX: Final = 1_024
_ID_BYTES: Final = 12

Change = Callable[[SecurityState], SecurityState | None]
"""Derives the next version of the state; None if nothing changes. Raises `BadOption` to refuse."""


def credentials_of(password: str) -> dict[Mechanism, Verifier]:
    """Returns the credentials for a password. Takes about 10 ms of processor time.

    Raises `BadOption` for a password that cannot be used; the error does not repeat it.
    """
    reason = ""
    if not password:
        reason = "it is empty"
    elif not password.isprintable():
        reason = "it has characters that are not printable, such as a line break"
    elif len(password.encode()) > PASSWORD_BYTES_MAX:
        reason = f"it has more than {PASSWORD_BYTES_MAX} bytes"
    if reason:
        raise errors.BadOption(option="password", value="…", reason=reason)
    return {mechanism: scram.verifier_of(mechanism, password) for mechanism in Mechanism}


def added(
    name: str,
    credentials: dict[Mechanism, Verifier],
    *,
    methods: Collection[LoginMethod] = (),
    may_exist: bool = False,
) -> Change:
    """Adds a user. With `may_exist`, a user of this name stays as it is.

    Args:
        name: its name.
        credentials: those of its password; empty if it has none.
        methods: by which it can log in, too.
        may_exist: see above.
    """
    check_name(name)

    def change(state: SecurityState) -> SecurityState | None:
        if name in state.users:
            if may_exist:
                return None
            reason = (
                "there is a user of this name; `sparklog users set-password` changes a password"
            )
            raise errors.BadOption(option="user", value=name, reason=reason)
        if len(state.users) >= USERS_MAX:
            reason = f"a root has at most {USERS_MAX:,} users: remove some first"
            raise errors.BadOption(option="user", value=name, reason=reason)
        user = User(
            id=secrets.token_hex(_ID_BYTES),
            credentials=credentials,
            methods=tuple(sorted({*methods})),
        )
        return _with_user(state, name, user)

    return change


def with_credentials(
    name: str, credentials: dict[Mechanism, Verifier], *, cut: bool = False
) -> Change:
    """Replaces the credentials of a user. Its connections stay open, as in Kafka, unless `cut`."""

    def change(user: User) -> User:
        return msgspec.structs.replace(user, credentials=credentials, epoch=user.epoch + cut)

    return _changed(name, change)


def with_credential(name: str, mechanism: Mechanism, verifier: Verifier) -> Change:
    """Sets one credential of a user, and adds the user if there is none (KIP-554).

    A credential for the other mechanism stays, with its own password.
    """
    check_name(name)

    def change(state: SecurityState) -> SecurityState | None:
        user = state.users.get(name)
        known = user.credentials if user is not None else {}
        credentials = {**known, mechanism: verifier}
        make = added if user is None else with_credentials
        return make(name, credentials)(state)

    return change


def without_credential(name: str, mechanism: Mechanism) -> Change:
    """Removes one credential of a user, and the user with its last way to log in (KIP-554).

    The change raises `UnknownCredential` if the user has none for this mechanism.
    """

    def change(state: SecurityState) -> SecurityState | None:
        user = state.users.get(name)
        if user is None or mechanism not in user.credentials:
            raise errors.UnknownCredential(user=name, mechanism=mechanism)
        left = {known: each for known, each in user.credentials.items() if known != mechanism}
        is_left = left or user.methods
        return (with_credentials(name, left) if is_left else removed(name))(state)

    return change


def with_methods(name: str, methods: Collection[LoginMethod]) -> Change:
    """Replaces the methods of a user. Connections by a method that it had before end."""
    return _changed(
        name, lambda user: msgspec.structs.replace(user, methods=tuple(sorted({*methods})))
    )


def disabled(name: str, is_disabled: bool) -> Change:
    """Disables a user, which ends its connections, or enables it again."""

    def change(user: User) -> User:
        ends = is_disabled and not user.disabled
        return msgspec.structs.replace(user, disabled=is_disabled, epoch=user.epoch + ends)

    return _changed(name, change)


def removed(name: str) -> Change:
    """Removes a user."""
    return _changed(name, lambda _: None)


def _changed(name: str, change: Callable[[User], User | None]) -> Change:
    def decide(state: SecurityState) -> SecurityState | None:
        known = state.users.get(name)
        if known is None:
            raise errors.BadOption(
                option="user",
                value=name,
                reason="there is no such user; `sparklog users list` shows them",
            )
        after = change(known)
        return _with_user(state, name, after) if after != known else None

    return decide


def _with_user(state: SecurityState, name: str, user: User | None) -> SecurityState:
    users = {known: each for known, each in state.users.items() if known != name}
    if user is not None:
        users[name] = user
    return msgspec.structs.replace(state, users=users)


def check_name(name: str) -> None:
    """Raises `BadOption` if no user can have this name."""
    if reason := unusable(name):
        raise errors.BadOption(option="user", value=name, reason=reason)


def unusable(name: str) -> str:
    """Returns why no user can have this name; empty if one can."""
    if not name:
        return "it is empty"
    if not name.isprintable():
        return "it has characters that are not printable"
    if name != name.strip():
        return "it begins or ends with a space"
    if len(name.encode()) > NAME_BYTES_MAX:
        return f"it has more than {NAME_BYTES_MAX} bytes"
    if name == "*" or name.startswith("__") or name.upper() == "ANONYMOUS":
        return "it is reserved"
    return ""
