"""Quotas: which one applies to a client, and the changes of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import msgspec
import pytest

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.security import quotas
from sparklog.security.quota import Limit, QuotaEntity, QuotaKey, QuotaTable
from sparklog.security.quotas import ANY, changed, entity_of, matches
from sparklog.security.state import SecurityState, StateDelta, apply, delta_of
from sparklog.storage.objects import MemoryStore
from sparklog.storage.security_store import SECURITY_SNAPSHOT_EVERY, open_security
from tests.support.users import change_users

PRODUCED, CONNECTED = QuotaKey.PRODUCER_BYTE_RATE, QuotaKey.CONNECTION_CREATION_RATE
LEVELS: tuple[tuple[dict[str, str | None], str | None, str | None], ...] = (
    ({"user": "alice", "client-id": "etl"}, "alice", "etl"),
    ({"user": "alice", "client-id": None}, "alice", "etl"),
    ({"user": "alice"}, "alice", None),
    ({"user": None, "client-id": "etl"}, "alice", "etl"),
    ({"user": None, "client-id": None}, "alice", "etl"),
    ({"user": None}, "alice", None),
    ({"client-id": "etl"}, None, "etl"),
    ({"client-id": None}, None, "etl"),
)
"""Kafka's precedence, highest first (`ClientQuotaManager`): an entity that applies to the client id
etl of alice, and the user and client id whose clients are counted together."""


def state_of(*given: tuple[Mapping[str, str | None], Mapping[str, float]]) -> SecurityState:
    """Returns a state in which quotas of entities are set."""
    state = SecurityState()
    for parts, values in given:
        state = changed(entity_of(parts), values)(state) or state
    return state


def test_precedence() -> None:
    """The highest of the given levels applies, and counts the clients that Kafka counts."""
    values = {str(parts): float(number + 1) for number, (parts, *_) in enumerate(LEVELS)}
    for chosen in itertools.product((True, False), repeat=len(LEVELS)):
        levels = list(itertools.compress(LEVELS, chosen))
        given = [(parts, {"producer_byte_rate": values[str(parts)]}) for parts, *_ in levels]
        table = QuotaTable(state_of(*given).quotas)
        expected = None
        if levels:
            parts, *counted = levels[0]
            expected = Limit(values[str(parts)], *counted)
        assert table.of_client(PRODUCED, "alice", "etl") == expected, levels
        assert table.of_client(QuotaKey.CONSUMER_BYTE_RATE, "alice", "etl") is None


def test_others_have_the_defaults_only() -> None:
    """A quota by name applies to no other user or client id; a default does, counted by name."""
    table = QuotaTable(
        state_of(*((parts, {"producer_byte_rate": 1.0}) for parts, *_ in LEVELS[:3])).quotas
    )
    assert table.of_client(PRODUCED, "bob", "etl") is None
    table = QuotaTable(state_of(({"user": None}, {"producer_byte_rate": 7.0})).quotas)
    assert table.of_client(PRODUCED, "bob", "") == Limit(7.0, "bob", None)


def test_quotas_of_addresses() -> None:
    """An address has its own quota, in any spelling, or else the default."""
    table = QuotaTable(
        state_of(({"ip": "2001:db8:0:0::1"}, {"connection_creation_rate": 3.0})).quotas
    )
    assert table.of_address("2001:db8::1") == (3.0, True)
    assert table.of_address("2001:db8::2") is None
    both = state_of(
        ({"ip": "10.0.0.1"}, {"connection_creation_rate": 3.0}),
        ({"ip": None}, {"connection_creation_rate": 9.0}),
    )
    table = QuotaTable(both.quotas)
    assert table.of_address("::ffff:10.0.0.1") == (3.0, True)
    assert table.of_address("10.0.0.2") == (9.0, False)


# ------------------------------------------------------------------------------ changes


def test_changes() -> None:
    """Keys are set and removed one by one, and an entity without any is gone."""
    entity = entity_of({"user": "alice"})
    state = state_of(({"user": "alice"}, {"producer_byte_rate": 1e6, "consumer_byte_rate": 2e6}))
    assert state.quotas[entity] == {PRODUCED: 1e6, QuotaKey.CONSUMER_BYTE_RATE: 2e6}
    assert changed(entity, {"producer_byte_rate": 1e6})(state) is None
    assert changed(entity, {"controller_mutation_rate": None})(state) is None
    fewer = changed(entity, {"producer_byte_rate": None, "consumer_byte_rate": 3e6})(state)
    assert fewer is not None
    assert fewer.quotas == {entity: {QuotaKey.CONSUMER_BYTE_RATE: 3e6}}
    none = changed(entity, {"consumer_byte_rate": None})(fewer)
    assert none is not None
    assert none.quotas == {}


@pytest.mark.parametrize(
    ("parts", "values", "reason"),
    [
        ({}, {}, "Invalid empty client quota entity"),
        ({"group": "x"}, {}, "Unhandled client quota entity type: group"),
        ({"user": ""}, {}, "Empty user not supported"),
        ({"user": "x" * 256}, {}, "at most 255 bytes"),
        ({"client-id": "a\nb"}, {}, "printable"),
        ({"ip": "10.0.0.1", "user": "x"}, {}, "Invalid quota entity combination"),
        ({"ip": "localhost"}, {}, "not an IP address"),
        ({"ip": None}, {"producer_byte_rate": 1.0}, "Invalid configuration key producer_byte_rate"),
        ({"user": "x"}, {"connection_creation_rate": 1.0}, "Invalid configuration key"),
        ({"user": "x"}, {"bytes": 1.0}, "Invalid configuration key bytes"),
        ({"user": "x"}, {"request_percentage": 50.0}, "request_percentage is not supported"),
        ({"user": "x"}, {"producer_byte_rate": 0.0}, "must be greater than 0"),
        ({"user": "x"}, {"producer_byte_rate": -1.0}, "must be greater than 0"),
        ({"user": "x"}, {"producer_byte_rate": float("nan")}, "must be greater than 0"),
        ({"user": "x"}, {"controller_mutation_rate": float("inf")}, "must be greater than 0"),
        ({"user": "x"}, {"producer_byte_rate": 1.5}, "fractional"),
        ({"user": "x"}, {"producer_byte_rate": 2.0**64}, "too large for a LONG"),
        ({"ip": None}, {"connection_creation_rate": 2.0**31}, "too large for an INT"),
    ],
)
def test_what_is_refused(
    parts: dict[str, str | None], values: dict[str, float | None], reason: str
) -> None:
    """Promise: an entity or a quota that is not valid is refused, for the reason that is named."""
    with pytest.raises(errors.BadRequest, match=reason):
        changed(entity_of(parts), values)


def test_the_number_of_entities_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a root has at most `ENTITIES_MAX` entities; those that it has can be changed."""
    monkeypatch.setattr(quotas, "ENTITIES_MAX", 2)
    some = state_of(*(({"user": name}, {"producer_byte_rate": 1.0}) for name in "ab"))
    with pytest.raises(errors.BadRequest, match="at most 2 entities"):
        changed(entity_of({"user": "c"}), {"producer_byte_rate": 1.0})(some)
    assert changed(entity_of({"user": "b"}), {"producer_byte_rate": 2.0})(some) is not None


def test_a_change_costs_little_more_than_a_copy() -> None:
    """Promise: a thousand changes of a full table, in one request, take no seconds."""
    one = {QuotaKey.PRODUCER_BYTE_RATE: 1.0}
    table = {entity_of({"user": f"user-{number}"}): one for number in range(10_000)}
    state = SecurityState(quotas=table)
    change = changed(entity_of({"user": "user-7"}), {"producer_byte_rate": 2.0})

    def seconds(work: Callable[[], object]) -> float:
        begun = time.process_time()
        for _ in range(20):
            work()
        return time.process_time() - begun

    pairs = [(seconds(lambda: change(state)), seconds(table.copy)) for _ in range(5)]
    assert min(changes / copies for changes, copies in pairs) < 6


def test_filters() -> None:
    """A filter selects by name, default or type; a strict one excludes entities with more types."""
    entities = [entity_of(parts) for parts, *_ in LEVELS]
    for wanted, count, strict_count in (
        ({}, 8, 0),
        ({"user": "alice"}, 3, 1),
        ({"user": None}, 3, 1),
        ({"user": ANY}, 6, 2),
        ({"user": ANY, "client-id": None}, 2, 2),
        ({"client-id": "etl"}, 3, 1),
        ({"ip": ANY}, 0, 0),
    ):
        found = [each for each in entities if matches(each, wanted, is_strict=False)]
        strict = [each for each in entities if matches(each, wanted, is_strict=True)]
        assert (len(found), len(strict)) == (count, strict_count), wanted


# ------------------------------------------------------------------------------ the state


def test_a_delta_leads_from_each_state_to_each_other() -> None:
    """Sets, changes and removals of quotas survive the encoding of a delta."""
    states = [
        SecurityState(),
        state_of(({"user": None}, {"producer_byte_rate": 1.0})),
        state_of(
            ({"user": None}, {"producer_byte_rate": 2.0}),
            ({"client-id": "a"}, {"consumer_byte_rate": 3.0}),
        ),
    ]
    for before, after in itertools.product(states, states):
        after = msgspec.structs.replace(after, version=1, change_id="1")
        encoded = msgspec.json.encode(delta_of(before, after))
        assert apply(before, msgspec.json.decode(encoded, type=StateDelta)) == after


def test_quotas_survive_a_snapshot() -> None:
    """A reader that begins with a snapshot finds the quotas that were set one after another."""
    store = MemoryStore(SystemClock())
    entity = QuotaEntity(user=None, client_id="etl")
    for number in range(SECURITY_SNAPSHOT_EVERY + 2):
        change_users(store, changed(entity, {"producer_byte_rate": number + 1.0}))
    chain = open_security(store, clock=SystemClock())
    assert chain is not None
    assert chain.look().quotas == {entity: {PRODUCED: SECURITY_SNAPSHOT_EVERY + 2.0}}
