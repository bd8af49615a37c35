"""Requests for quotas in order, and how a Kafka 4.1 replies to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

DESCRIBE, ALTER = 48, 49
_NONE, _BAD = ErrorCode.none, ErrorCode.invalid_request
EXACT, DEFAULT, SPECIFIED = 0, 1, 2
Parts = Mapping[str, str | None]


def entity(parts: Parts) -> list[dict[str, Any]]:
    """Fields of an entity."""
    return [{"entity_type": kind, "entity_name": name} for kind, name in parts.items()]


def entry(parts: Parts, **values: float | None) -> dict[str, Any]:
    """Fields of the change of an entity; None removes a quota."""
    ops = [
        {"key": key, "value": value or 0.0, "remove": value is None}
        for key, value in values.items()
    ]
    return {"entity": entity(parts), "ops": ops}


def altered(parts: Parts, **values: float | None) -> dict[str, Any]:
    """Fields of AlterClientQuotas for one entity."""
    return {"entries": [entry(parts, **values)], "validate_only": False}


def described(*components: tuple[str, int, str | None], strict: bool = False) -> dict[str, Any]:
    """Fields of DescribeClientQuotas."""
    return {
        "components": [
            {"entity_type": kind, "match_type": match_type, "match": name}
            for kind, match_type, name in components
        ],
        "strict": strict,
    }


class Case(NamedTuple):
    """A request, the codes in its reply, and the quotas in it."""

    what: str
    key: int
    fields: Any
    codes: list[ErrorCode]
    quotas: Mapping[tuple[tuple[str, str | None], ...], Mapping[str, float]] | None = None
    """By the parts of the entity, sorted; None for an alteration, and for an error."""

    def outcome_of(self, reply: Any) -> tuple[Any, Any]:
        """Returns `codes` and `quotas` as a reply has them."""
        if self.key == ALTER:
            return sorted(each.error_code for each in reply.entries), None
        if reply.entries is None:
            return [reply.error_code], None
        found = {
            tuple(sorted((part.entity_type, part.entity_name) for part in each.entity)): {
                value.key: value.value for value in each.values
            }
            for each in reply.entries
        }
        assert len(found) == len(reply.entries), "an entity is named twice"
        return [reply.error_code], found


ALICE: Final = (("user", "alice"),)
ETL: Final = (("client-id", "etl"), ("user", "alice"))
ANYBODY: Final = (("user", None),)
HOST: Final = (("ip", "10.0.0.1"),)
_RATES: Final = {"producer_byte_rate": 1e6, "controller_mutation_rate": 0.5}
_SET: Final = {
    ALICE: _RATES,
    ETL: {"consumer_byte_rate": 2e6},
    ANYBODY: {"producer_byte_rate": 3e6},
    HOST: {"connection_creation_rate": 4.0},
}


def _refused(what: str, parts: Parts, **values: float | None) -> Case:
    return Case(what, ALTER, altered(parts, **values), [_BAD])


def _unfit(what: str, *components: tuple[str, int, str | None]) -> Case:
    return Case(what, DESCRIBE, described(*components), [_BAD])


def _found(
    what: str,
    *components: tuple[str, int, str | None],
    strict: bool = False,
    entities: tuple[tuple[tuple[str, str | None], ...], ...] = (),
) -> Case:
    quotas = {each: _SET[each] for each in entities}
    return Case(what, DESCRIBE, described(*components, strict=strict), [_NONE], quotas)


CASES: Final = (
    _found("nothing yet"),
    *(
        Case(f"set {parts}", ALTER, altered(dict(parts), **values), [_NONE])
        for parts, values in _SET.items()
    ),
    _found("all", entities=(*_SET,)),
    _found("none is strictly nothing", strict=True),
    _found("a user", ("user", EXACT, "alice"), entities=(ALICE, ETL)),
    _found("a user alone", ("user", EXACT, "alice"), strict=True, entities=(ALICE,)),
    _found("the default", ("user", DEFAULT, None), entities=(ANYBODY,)),
    _found("every user", ("user", SPECIFIED, None), entities=(ALICE, ETL, ANYBODY)),
    _found(
        "both",
        ("user", SPECIFIED, None),
        ("client-id", EXACT, "etl"),
        strict=True,
        entities=(ETL,),
    ),
    _found("an address", ("ip", EXACT, "10.0.0.1"), entities=(HOST,)),
    _found("an absent user", ("user", EXACT, "bob")),
    _unfit("an empty type", ("", EXACT, "x")),
    _unfit("twice", ("user", EXACT, "x"), ("user", DEFAULT, None)),
    _unfit("exactly nobody", ("user", EXACT, None)),
    _unfit("a named default", ("user", DEFAULT, "x")),
    _unfit("any of a name", ("user", SPECIFIED, "x")),
    _unfit("no such match", ("user", 3, None)),
    _unfit("an address and a user", ("ip", SPECIFIED, None), ("user", SPECIFIED, None)),
    Case(
        "no such type", DESCRIBE, described(("group", EXACT, "x")), [ErrorCode.unsupported_version]
    ),
    _refused("no entity", {}, producer_byte_rate=1.0),
    _refused("no such type to alter", {"group": "x"}, producer_byte_rate=1.0),
    _refused("an empty name", {"user": ""}, producer_byte_rate=1.0),
    _refused("an address of a user", {"ip": "10.0.0.1", "user": "x"}, producer_byte_rate=1.0),
    _refused("no address", {"ip": "not an address"}, connection_creation_rate=1.0),
    _refused("no such key", {"user": "x"}, bytes=1.0),
    _refused("bytes of an address", {"ip": None}, producer_byte_rate=1.0),
    _refused("connections of a user", {"user": "x"}, connection_creation_rate=1.0),
    _refused("nothing allowed", {"user": "x"}, producer_byte_rate=-0.1),
    _refused("a fraction of a byte", {"user": "x"}, producer_byte_rate=1.5),
    _refused("too many bytes", {"user": "x"}, producer_byte_rate=2.0**64),
    _refused("too many connections", {"ip": None}, connection_creation_rate=2.0**31),
    Case(
        "an entity twice, which is refused as a whole here",
        ALTER,
        {
            "entries": [entry({"user": "x"}, bytes=1.0), entry({"user": "x"}, bytes=2.0)],
            "validate_only": False,
        },
        [_BAD],
    ),
    Case(
        "one of two is valid",
        ALTER,
        {
            "entries": [
                entry({"user": "bob"}, producer_byte_rate=5e6),
                entry({"user": "carol"}, bytes=1.0),
            ],
            "validate_only": False,
        },
        [_NONE, _BAD],
    ),
    Case(
        "and is set",
        DESCRIBE,
        described(("user", EXACT, "bob")),
        [_NONE],
        {(("user", "bob"),): {"producer_byte_rate": 5e6}},
    ),
    Case(
        "only checked",
        ALTER,
        altered({"user": "bob"}, producer_byte_rate=None) | {"validate_only": True},
        [_NONE],
    ),
    Case("removed", ALTER, altered({"user": "bob"}, producer_byte_rate=None), [_NONE]),
    Case("absent", ALTER, altered({"user": "bob"}, producer_byte_rate=None), [_NONE]),
    Case(
        "one key of two",
        ALTER,
        altered({"user": "alice"}, producer_byte_rate=None),
        [_NONE],
    ),
    Case(
        "the other is left",
        DESCRIBE,
        described(("user", EXACT, "alice"), strict=True),
        [_NONE],
        {ALICE: {"controller_mutation_rate": 0.5}},
    ),
)
