"""Changes of the policy of a root; pure."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from typing import Final

import msgspec

from sparklog import errors
from sparklog.security.acl import ANYONE
from sparklog.security.acls import check_principal
from sparklog.security.state import Mode, Policy, SecurityState, new_key
from sparklog.security.users import Change

SUPER_USERS_MAX: Final = 100
CA_BYTES_MAX: Final = 256 * 1024


def with_policy(
    *,
    mode: Mode | None = None,
    add_super_users: Collection[str] = (),
    remove_super_users: Collection[str] = (),
    allow_everyone: bool | None = None,
) -> Change:
    """Changes the parts of the policy that are given.

    Raises `BadOption`; the change does so too, if ACLs would be enforced that allow nothing.

    Args:
        mode: the treatment of requests that no ACL allows.
        add_super_users: principals, such as "User:admin"; may be super users already.
        remove_super_users: super users.
        allow_everyone: whether everybody may do what no ACL mentions.
    """
    for each in add_super_users:
        _check_super_user(each)

    def change(state: SecurityState) -> SecurityState | None:
        known = state.policy
        if unknown := sorted({*remove_super_users} - {*known.super_users}):
            raise _bad("super user", unknown[0], "it is not a super user")
        super_users = {*known.super_users, *add_super_users} - {*remove_super_users}
        if len(super_users) > SUPER_USERS_MAX:
            reason = f"a root has at most {SUPER_USERS_MAX} super users: remove some first"
            raise _bad("super user", max(add_super_users), reason)
        policy = Policy(
            mode=known.mode if mode is None else mode,
            super_users=tuple(sorted(super_users)),
            allow_everyone_if_no_acl_found=(
                known.allow_everyone_if_no_acl_found if allow_everyone is None else allow_everyone
            ),
        )
        if policy == known:
            return None
        allows_something = super_users or state.acls or policy.allow_everyone_if_no_acl_found
        if policy.mode is Mode.ENFORCE and not allows_something:
            reason = "every request of every client would be refused: add ACLs, or a super user"
            raise _bad("mode", policy.mode.value, reason)
        return msgspec.structs.replace(state, policy=policy)

    return change


def with_ca(pem: str) -> Change:
    """Replaces the CAs by which programs with access to the root check certificates of brokers.

    `pem`: empty: those that the programs' machines trust. Raises `BadOption`.
    """
    reason = ""
    if len(pem) > CA_BYTES_MAX:
        reason = f"it has more than {CA_BYTES_MAX:,} bytes"
    elif pem:
        try:
            context = ssl.create_default_context(cadata=pem)
        except (ssl.SSLError, ValueError) as error:
            reason = f"it contains no valid certificate: {getattr(error, 'reason', '') or error}"
        else:
            reason = "" if context.get_ca_certs() else "none of its certificates is that of a CA"
    if reason:
        raise _bad("ca", "…", reason)
    return lambda state: msgspec.structs.replace(state, ca=pem) if state.ca != pem else None


def rekeyed(state: SecurityState) -> SecurityState | None:
    """Gives a root that was copied, or restored, keys of its own. Passwords stay.

    The change also notes its place and draws its key for tokens (`change_security`). Tokens that
    the original has signed are not accepted here, nor the other way round.
    """
    return msgspec.structs.replace(state, home="", salt_key=new_key(), root_key=b"")


def _check_super_user(principal: str) -> None:
    check_principal(principal)
    if principal == ANYONE:
        raise _bad(
            "super user",
            principal,
            "a super user is one principal; the mode off allows everything to everybody",
        )


def _bad(option: str, value: str, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
