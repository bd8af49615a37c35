"""Decisions by access control lists."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.security.acl import (
    ANYONE,
    Acl,
    AclFilter,
    AclIndex,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)

ALICE = "User:alice"
HOST = "10.0.0.7"
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALLOW, DENY = Permission.ALLOW, Permission.DENY

CONCRETE = [each for each in Operation if each > Operation.ALL]
IMPLYING = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}


def acl(
    name: str,
    operation: Operation,
    permission: Permission = ALLOW,
    *,
    pattern: PatternType = LITERAL,
    principal: str = ALICE,
    host: str = "*",
    resource: ResourceType = TOPIC,
) -> Acl:
    """Returns an ACL; by default, one of alice on a topic."""
    return Acl(resource, name, pattern, principal, host, operation, permission)


NAMES = st.text("ab*", min_size=1, max_size=3)
ACLS = st.builds(
    Acl,
    st.sampled_from([TOPIC, GROUP]),
    NAMES,
    st.sampled_from([LITERAL, PREFIXED]),
    st.sampled_from([ALICE, "User:bob", ANYONE]),
    st.sampled_from([HOST, "10.0.0.8", "*"]),
    st.sampled_from([Operation.ALL, *CONCRETE]),
    st.sampled_from([ALLOW, DENY]),
)


def judge(acls: list[Acl], operation: Operation, name: str, *, unlisted: bool) -> bool:
    """The rule as Kafka's documentation states it, ACL by ACL."""
    matching = [
        each
        for each in acls
        if each.resource is TOPIC
        and (name.startswith(each.name) if each.pattern is PREFIXED else each.name in (name, "*"))
    ]
    if not matching:
        return unlisted
    mine = [
        each for each in matching if each.principal in (ALICE, ANYONE) and each.host in (HOST, "*")
    ]
    direct = {operation, Operation.ALL}
    if any(each.permission is DENY and each.operation in direct for each in mine):
        return False
    implied = direct | IMPLYING.get(operation, set())
    return any(each.permission is ALLOW and each.operation in implied for each in mine)


@settings(max_examples=300)
@given(st.lists(ACLS, max_size=8), st.sampled_from(CONCRETE), NAMES, st.booleans())
def test_the_index_decides_as_the_rule_does(
    acls: list[Acl], operation: Operation, name: str, unlisted: bool
) -> None:
    """Literal, wildcard and prefixed patterns, hosts, anyone, ALL, implied operations, denials."""
    index = AclIndex(acls, allow_everyone_if_no_acl_found=unlisted)
    expected = judge(acls, operation, name, unlisted=unlisted)
    assert index.allows(ALICE, HOST, operation, TOPIC, name) is expected


def test_a_super_user_is_never_denied() -> None:
    """Not even by an ACL that denies everything to anyone."""
    index = AclIndex([acl("*", Operation.ALL, DENY, principal=ANYONE)], super_users=["User:root"])
    assert index.allows("User:root", HOST, Operation.WRITE, TOPIC, "t")
    assert index.allows_on_any("User:root", HOST, Operation.WRITE, TOPIC)
    assert not index.allows(ALICE, HOST, Operation.DESCRIBE, TOPIC, "t")


@pytest.mark.parametrize(
    ("acls", "expected"),
    [
        ([], False),
        ([acl("t", Operation.WRITE)], True),
        ([acl("t", Operation.READ)], False),
        ([acl("t", Operation.ALL, principal=ANYONE)], True),
        ([acl("t", Operation.WRITE, resource=GROUP)], False),
        ([acl("t", Operation.WRITE, host="10.0.0.8")], False),
        ([acl("t", Operation.WRITE), acl("t", Operation.WRITE, DENY)], False),
        ([acl("t", Operation.WRITE), acl("t", Operation.READ, DENY)], True),
        ([acl("t", Operation.WRITE), acl("u", Operation.ALL, DENY)], True),
        ([acl("*", Operation.WRITE), acl("u", Operation.ALL, DENY)], True),
        ([acl("t", Operation.WRITE), acl("*", Operation.ALL, DENY)], False),
        ([acl("ab", Operation.WRITE, pattern=PREFIXED)], True),
        (
            [
                acl("ab", Operation.WRITE, pattern=PREFIXED),
                acl("a", Operation.WRITE, DENY, pattern=PREFIXED),
            ],
            False,
        ),
        (
            [
                acl("a", Operation.WRITE, pattern=PREFIXED),
                acl("ab", Operation.WRITE, DENY, pattern=PREFIXED),
            ],
            True,
        ),
        (
            [acl("abc", Operation.WRITE), acl("ab", Operation.WRITE, DENY, pattern=PREFIXED)],
            False,
        ),
    ],
)
def test_write_on_any_topic(acls: list[Acl], expected: bool) -> None:
    """As Kafka's `authorizeByResourceType`: an allowed name counts unless a denial dominates it."""
    assert AclIndex(acls).allows_on_any(ALICE, HOST, Operation.WRITE, TOPIC) is expected


ALL_OF_T = [
    acl("t", Operation.READ),
    acl("*", Operation.READ),
    acl("t", Operation.READ, pattern=PREFIXED),
    acl("te", Operation.READ, DENY, principal=ANYONE, host=HOST),
]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (AclFilter(), [0, 1, 2, 3]),
        (AclFilter(name="t"), [0, 2]),
        (AclFilter(name="t", pattern=LITERAL), [0]),
        (AclFilter(name="test", pattern=PatternType.MATCH), [1, 2]),
        (AclFilter(name="t", pattern=PatternType.MATCH), [0, 1, 2]),
        (AclFilter(pattern=PREFIXED), [2]),
        (AclFilter(permission=DENY), [3]),
        (AclFilter(principal=ALICE, host="*"), [0, 1, 2]),
        (AclFilter(resource=GROUP), []),
        (AclFilter(operation=Operation.ALL), []),
    ],
)
def test_filters(wanted: AclFilter, expected: list[int]) -> None:
    """As Kafka's `AclBindingFilter`; MATCH selects every pattern that covers the resource."""
    assert [n for n, each in enumerate(ALL_OF_T) if wanted.matches(each)] == expected


def test_a_decision_does_not_depend_on_the_order_of_acls() -> None:
    """A denial that is added first or last takes precedence."""
    acls = [acl("t", Operation.READ), acl("*", Operation.READ, DENY), acl("t", Operation.ALL)]
    for order in itertools.permutations(acls):
        assert not AclIndex(order).allows(ALICE, HOST, Operation.READ, TOPIC, "t")
        assert AclIndex(order).allows(ALICE, HOST, Operation.DESCRIBE, TOPIC, "t")
