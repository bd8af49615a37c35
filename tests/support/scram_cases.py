"""Requests for SCRAM credentials in order, and the codes with which a Kafka 4.1 replies to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog.security.scram import ITERATIONS_MAX, ITERATIONS_MIN

DESCRIBE, ALTER = 50, 51
_SHA_256, _SHA_512 = 1, 2
_NONE: Final = ErrorCode.none


class Case(NamedTuple):
    """A request, the code of each user in the reply, and the credentials of those described."""

    what: str
    key: int
    fields: Any
    codes: dict[str, ErrorCode]
    credentials: Mapping[str, list[tuple[int, int]]] = MappingProxyType({})
    """(mechanism, iterations) by user."""

    def outcome_of(self, reply: Any) -> tuple[Any, Any]:
        """Returns `codes` and `credentials` as a reply has them."""
        codes = {each.user: each.error_code for each in reply.results}
        assert len(codes) == len(reply.results), "a user has several results"
        described = {
            each.user: sorted((info.mechanism, info.iterations) for info in each.credential_infos)
            for each in reply.results
            if self.key == DESCRIBE and each.credential_infos
        }
        return codes, described


def deletion(name: str, mechanism: int = _SHA_256) -> dict[str, Any]:
    """Fields of the removal of a credential."""
    return {"name": name, "mechanism": mechanism}


def upsertion(
    name: str, mechanism: int = _SHA_256, iterations: int = ITERATIONS_MIN
) -> dict[str, Any]:
    """Fields of a credential to set, with an arbitrary salted password."""
    return {
        "name": name,
        "mechanism": mechanism,
        "iterations": iterations,
        "salt": b"salt" * 5,
        "salted_password": b"x" * (64 if mechanism == _SHA_512 else 32),
    }


def altered(*upsertions: Any, deletions: Sequence[Any] = ()) -> dict[str, Any]:
    """Fields of AlterUserScramCredentials."""
    return {"deletions": tuple(deletions), "upsertions": upsertions}


def described(*names: str) -> dict[str, Any]:
    """Fields of DescribeUserScramCredentials."""
    return {"users": [{"name": name} for name in names]}


_TWICE, _MISSING = ErrorCode.duplicate_resource, ErrorCode.resource_not_found
_BAD, _UNKNOWN = ErrorCode.unacceptable_credential, ErrorCode.unsupported_sasl_mechanism
CASES: Final = (
    Case("a new user", ALTER, altered(upsertion("bob")), {"bob": _NONE}),
    Case("it", DESCRIBE, described("bob"), {"bob": _NONE}, {"bob": [(1, ITERATIONS_MIN)]}),
    Case(
        "both mechanisms at once",
        ALTER,
        altered(upsertion("bob"), upsertion("bob", _SHA_512)),
        {"bob": _TWICE},
    ),
    Case(
        "removed and set at once",
        ALTER,
        altered(upsertion("bob"), deletions=[deletion("bob")]),
        {"bob": _TWICE},
    ),
    Case("no such mechanism", ALTER, altered(upsertion("bob", 9)), {"bob": _UNKNOWN}),
    Case("nor to remove", ALTER, altered(deletions=[deletion("bob", 9)]), {"bob": _UNKNOWN}),
    Case(
        "too few iterations",
        ALTER,
        altered(upsertion("bob", iterations=ITERATIONS_MIN - 1)),
        {"bob": _BAD},
    ),
    Case(
        "too many iterations",
        ALTER,
        altered(upsertion("bob", iterations=ITERATIONS_MAX + 1)),
        {"bob": _BAD},
    ),
    Case("no name", ALTER, altered(upsertion("")), {"": _BAD}),
    Case("not set", ALTER, altered(deletions=[deletion("bob", _SHA_512)]), {"bob": _MISSING}),
    Case(
        "users are independent of each other",
        ALTER,
        altered(upsertion("carol"), deletions=[deletion("absent")]),
        {"carol": _NONE, "absent": _MISSING},
    ),
    Case("the other mechanism", ALTER, altered(upsertion("bob", _SHA_512, 8_192)), {"bob": _NONE}),
    Case(
        "several users",
        DESCRIBE,
        described("bob", "absent", "carol", "carol"),
        {"bob": _NONE, "absent": _MISSING, "carol": _TWICE},
        {"bob": [(1, ITERATIONS_MIN), (2, 8_192)]},
    ),
    Case("one is removed", ALTER, altered(deletions=[deletion("bob")]), {"bob": _NONE}),
    Case("one is left", DESCRIBE, described("bob"), {"bob": _NONE}, {"bob": [(2, 8_192)]}),
    Case("so is the last", ALTER, altered(deletions=[deletion("bob", 2)]), {"bob": _NONE}),
    Case("with the user", DESCRIBE, described("bob"), {"bob": _MISSING}),
)
