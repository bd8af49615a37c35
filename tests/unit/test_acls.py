"""Changes of the ACLs and of the policy of a root."""

from __future__ import annotations

import msgspec
import pytest

from sparklog import errors
from sparklog.security import acls
from sparklog.security.acl import (
    CLUSTER_NAME,
    OPERATIONS,
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from sparklog.security.policies import SUPER_USERS_MAX, with_policy
from sparklog.security.state import Mode, Policy, SecurityState

ALICE = "User:alice"
READ_ORDERS = Acl(
    ResourceType.TOPIC,
    "orders",
    PatternType.LITERAL,
    ALICE,
    "*",
    Operation.READ,
    Permission.ALLOW,
)
NOTHING = SecurityState()


def like(**fields: object) -> Acl:
    """`READ_ORDERS` with other fields."""
    return msgspec.structs.replace(READ_ORDERS, **fields)


def of(*known: Acl) -> SecurityState:
    """A state with these ACLs."""
    return SecurityState(acls=frozenset(known))


# ------------------------------------------------------------------------------ ACLs


@pytest.mark.parametrize(
    "acl",
    [
        READ_ORDERS,
        like(principal="User:*", name="*", operation=Operation.ALL),
        like(principal="User:CN=a b,O=ü:x", pattern=PatternType.PREFIXED, name="o"),
        like(host="10.0.0.7", permission=Permission.DENY),
        like(host="fe80::1"),
        like(resource=ResourceType.CLUSTER, name=CLUSTER_NAME, operation=Operation.ALTER),
        like(name="o" * 255, principal="User:" + "a" * 255),
    ],
)
def test_acls_that_can_be_created(acl: Acl) -> None:
    """Promise: every ACL that may match a client is accepted."""
    acls.check_acl(acl)


@pytest.mark.parametrize(
    ("acl", "option"),
    [
        (like(resource=ResourceType.ANY), "resource type"),
        (like(pattern=PatternType.MATCH), "pattern type"),
        (like(permission=Permission.ANY), "permission"),
        (like(operation=Operation.ANY), "operation"),
        (like(operation=Operation.CLUSTER_ACTION), "operation"),
        (like(resource=ResourceType.GROUP, operation=Operation.WRITE), "operation"),
        (like(name=""), "resource name"),
        (like(name="a\n"), "resource name"),
        (like(name="ü" * 128), "resource name"),
        (
            like(resource=ResourceType.CLUSTER, operation=Operation.ALTER, name="mine"),
            "resource name",
        ),
        (like(principal="alice"), "principal"),
        (like(principal="User:"), "principal"),
        (like(principal="Group:all"), "principal"),
        (like(principal="Root:admin@host"), "principal"),
        (like(host=""), "host"),
        (like(host="localhost"), "host"),
        (like(host="10.0.0.0/8"), "host"),
    ],
)
def test_acls_that_cannot_be_created(acl: Acl, option: str) -> None:
    """Promise: refused by the field that is wrong, also as a part of many."""
    with pytest.raises(errors.BadOption) as refused:
        acls.added([READ_ORDERS, acl])
    assert refused.value.option == option


def test_the_convenient_operations_exist() -> None:
    """Promise: a producer's and a consumer's operations are supported by their resources."""
    for operations in (acls.PRODUCER, acls.CONSUMER):
        assert all(OPERATIONS[resource].issuperset(each) for resource, each in operations.items())


def test_adding_and_removing_again_changes_nothing() -> None:
    """Promise: a change that was made already leads to no version, and spares other ACLs."""
    other = like(permission=Permission.DENY)
    after = acls.added([READ_ORDERS, other])(of(READ_ORDERS))
    assert after is not None
    assert after.acls == {READ_ORDERS, other}
    assert acls.added([READ_ORDERS, other])(after) is None
    assert acls.removed([other])(after) == of(READ_ORDERS)
    assert acls.removed([other])(of(READ_ORDERS)) is None


def test_filters_select_what_is_removed() -> None:
    """Promise: an ACL that any of several filters selects is found, once."""
    by_prefix = like(pattern=PatternType.PREFIXED, name="ord")
    state = of(READ_ORDERS, by_prefix, like(name="other"))
    exact = AclFilter(name="orders")
    both = AclFilter(name="orders", pattern=PatternType.MATCH)
    assert acls.matching(state, exact) == {READ_ORDERS}
    assert acls.matching(state, exact, both) == {READ_ORDERS, by_prefix}
    assert acls.matching(state, AclFilter()) == state.acls
    assert acls.matching(state) == frozenset()


@pytest.mark.parametrize("bound", ["ACLS_MAX", "ACLS_OF_PRINCIPAL_MAX"])
def test_bounds(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: neither the root nor a principal on one resource exceeds its number of ACLs."""
    monkeypatch.setattr(acls, bound, 2)
    full = of(READ_ORDERS, like(operation=Operation.WRITE))
    more = acls.added([like(operation=Operation.ALTER)])
    with pytest.raises(errors.BadOption, match="at most 2"):
        more(full)
    assert more(of(READ_ORDERS)) is not None
    elsewhere = acls.added([like(name="other")])
    if bound == "ACLS_OF_PRINCIPAL_MAX":
        assert elsewhere(full) is not None


def test_descriptions_differ() -> None:
    """Promise: the confirmation of a removal shows each field."""
    given = [
        READ_ORDERS,
        like(resource=ResourceType.GROUP),
        like(name="other"),
        like(pattern=PatternType.PREFIXED),
        like(principal="User:bob"),
        like(host="10.0.0.7"),
        like(operation=Operation.WRITE),
        like(permission=Permission.DENY),
    ]
    assert acls.described(READ_ORDERS) == "ALLOW User:alice READ on topic orders"
    assert len(set(map(acls.described, given))) == len(given)


# ------------------------------------------------------------------------------ policy


def test_parts_of_a_policy_that_are_not_named_stay() -> None:
    """Promise: super users are added and removed, sorted and without duplicates."""
    known = SecurityState(root_key=b"key")
    for change, policy in (
        (with_policy(mode=Mode.OBSERVE), Policy(mode=Mode.OBSERVE)),
        (
            with_policy(add_super_users=["User:b", "User:a", "User:b"]),
            Policy(mode=Mode.OBSERVE, super_users=("User:a", "User:b")),
        ),
        (
            with_policy(mode=Mode.ENFORCE, remove_super_users=["User:b"]),
            Policy(mode=Mode.ENFORCE, super_users=("User:a",)),
        ),
        (
            with_policy(allow_everyone=True),
            Policy(mode=Mode.ENFORCE, super_users=("User:a",), allow_everyone_if_no_acl_found=True),
        ),
    ):
        after = change(known)
        assert after == msgspec.structs.replace(known, policy=policy)
        known = after
    assert with_policy(mode=Mode.ENFORCE, add_super_users=["User:a"])(known) is None


@pytest.mark.parametrize("name", ["admin", "User:", "User:*", "Root:root@host", "Group:admins"])
def test_principals_that_cannot_be_super_users(name: str) -> None:
    """Promise: a super user is one principal that a client can have."""
    with pytest.raises(errors.BadOption):
        with_policy(add_super_users=[name])


def test_policies_that_are_refused() -> None:
    """Promise: a misspelt name is an error, and so are rules that allow no client anything."""
    with pytest.raises(errors.BadOption, match="not a super user"):
        with_policy(remove_super_users=["User:admni"])(NOTHING)
    many = [f"User:{number}" for number in range(SUPER_USERS_MAX + 1)]
    with pytest.raises(errors.BadOption, match="at most"):
        with_policy(add_super_users=many)(NOTHING)
    enforced = with_policy(mode=Mode.ENFORCE)
    with pytest.raises(errors.BadOption, match="add ACLs, or a super user"):
        enforced(NOTHING)
    assert enforced(of(READ_ORDERS)) is not None
    for allowing in (
        with_policy(mode=Mode.ENFORCE, add_super_users=[ALICE]),
        with_policy(mode=Mode.ENFORCE, allow_everyone=True),
    ):
        assert allowing(NOTHING) is not None
