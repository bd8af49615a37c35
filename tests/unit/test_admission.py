"""Slots for connections that have not logged in, and the delays of failed logins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog.broker import login_failures, peers
from sparklog.broker.kafka.slots import SLOTS, Slots, Turn, make_room
from sparklog.broker.login_failures import FAILURE_SECONDS, FailureDelays
from sparklog.clock import ManualClock

CONNECTIONS = 4_000


def run(test: Callable[[Slots], object], connections: int = CONNECTIONS) -> None:
    """Runs a test in an event loop."""

    async def in_loop() -> None:
        slots = Slots(connections=connections)
        test(slots)
        check(slots)

    asyncio.run(in_loop())


def check(slots: Slots) -> None:
    """Checks the invariants of `slots`."""
    queues = (slots._waiting_known, slots._waiting_unknown)
    assert slots.taken == sum(slots._held.values()) <= slots.count
    assert all(0 < held <= slots.of_address for held in slots._held.values())
    assert slots.waiting == sum(len(each) for queue in queues for each in queue.values())
    assert all(each for queue in queues for each in queue.values())


def flood(slots: Slots) -> list[Turn]:
    """Takes all slots that unknown addresses can have, and as many places in the queue."""
    addresses = slots.for_unknown // slots.of_address
    turns = [slots.take(f"flood-{n % addresses}") for n in range(2 * slots.for_unknown)]
    assert sum(each.holds_slot for each in turns) == slots.taken == slots.for_unknown
    return turns


def test_an_address_has_a_bounded_part() -> None:
    """Promise: one address with any number of connections leaves slots for the others."""

    def test(slots: Slots) -> None:
        turns = [slots.take("flood") for _ in range(10 * SLOTS)]
        assert sum(each.holds_slot for each in turns) == slots.of_address
        assert slots.take("other").holds_slot

    run(test)


@pytest.mark.parametrize("connections", [1, 16, 125, 500, CONNECTIONS, 100_000])
def test_slots_are_a_part_of_the_connections(connections: int) -> None:
    """Promise: however few connections a broker accepts, those that are admitted have most."""

    def test(slots: Slots) -> None:
        assert 1 <= slots.of_address <= slots.for_unknown <= slots.count
        assert slots.count <= max(connections // 4, 1)

    run(test, connections)


def test_waiting_addresses_take_turns() -> None:
    """Promise: a client waits for one connection of each other address, not for all of them."""

    def test(slots: Slots) -> None:
        turns = flood(slots)
        late = slots.take("late")
        releases = 0
        while not late.holds_slot:
            turns[releases].end()
            releases += 1
        assert releases <= slots.for_unknown // slots.of_address + 1

    run(test)


def test_addresses_that_have_logged_in_are_not_kept_out() -> None:
    """Promise: slots remain for those that the broker knows."""

    def test(slots: Slots) -> None:
        slots.take("known").end(is_admitted=True)
        turns = flood(slots)
        returned = [slots.take("known") for _ in range(slots.of_address)]
        assert all(each.holds_slot for each in returned)
        for each in returned:
            each.end(is_admitted=True)
        assert slots.taken == slots.for_unknown == sum(each.holds_slot for each in turns)

    run(test)


def test_the_address_with_the_most_connections_makes_room() -> None:
    """Promise: once no more may wait, a flood gives way to others, at whichever listener it is."""

    def test(slots: Slots) -> None:
        elsewhere = Slots(connections=CONNECTIONS)
        turns = flood(slots)
        others = [slots.take("other") for _ in range(3)]
        for number in range(slots.for_unknown // 2):
            make_room([elsewhere, slots])
            assert sum(map(ended, turns)) == number + 1
        assert not any(map(ended, others))
        assert slots.waiting == slots.for_unknown // 2 + len(others)

    def ended(turn: Turn) -> bool:
        return turn.granted.done() and not turn.holds_slot

    run(test)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "leave", "cancel", "end", "admit", "room"]),
            st.integers(0, 4),
            st.integers(0, 30),
        ),
        max_size=120,
    )
)
def test_any_schedule(steps: list[tuple[str, int, int]]) -> None:
    """Promise: no slot is lost or granted twice, in whatever order clients come and leave.

    A connection whose task is cancelled has a future that is done before it gives its place back.
    """

    def test(slots: Slots) -> None:
        turns: list[Turn] = []
        for step, address, number in steps:
            turn = turns[number % len(turns)] if turns else None
            if step == "take":
                turns.append(slots.take(f"a{address}"))
            elif step == "room":
                make_room([slots])
            elif turn is None:
                continue
            elif step == "leave":
                turn.refuse("the client has left")
            elif step == "cancel":
                turn.granted.cancel()
            else:
                turn.end(is_admitted=step == "admit")
                turn.end()
            check(slots)
            assert slots.taken == sum(each.holds_slot for each in turns)
        for each in turns:
            each.end()
        assert (slots.taken, slots.waiting) == (0, 0)

    run(test, connections=16)


def test_failed_logins_become_slower(clock: ManualClock) -> None:
    """Promise: by address and by user, up to a bound, and forgotten after a minute without one."""
    delays = FailureDelays(clock)
    shortest, longest = FAILURE_SECONDS
    assert delays.next_seconds("a", "alice") == shortest
    assert delays.next_seconds("b", "alice") == 2 * shortest
    assert delays.next_seconds("b", "bob") == 2 * shortest
    for _ in range(100):
        most = delays.next_seconds("c", "alice")
    assert most == longest
    assert delays.next_seconds("d", "carol") == shortest
    clock.advance(60.0)
    assert delays.next_seconds("c", "alice") == shortest


def test_remembered_failures_are_bounded(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: invented names do not use up memory."""
    monkeypatch.setattr(login_failures, "FAILURES_REMEMBERED", 10)
    delays = FailureDelays(clock)
    for n in range(100):
        delays.next_seconds(f"a{n}", f"u{n}")
    assert len(delays._failures) == 10


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("", ""),
        ("a:b", "a:b"),
    ],
)
def test_what_counts_as_an_address(peer: str, counted: str) -> None:
    """Promise: a host with a whole IPv6 network has no more slots than one with an address."""
    assert peers.network_of(peer) == counted
