"""The life of a partition: its states, and what leads from one to another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sparklog.broker.log.partition_state import (
    LED,
    TRANSITIONS,
    PartitionEvent,
    PartitionState,
    after,
)

_ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
_EXPECTED = set(TRANSITIONS)
_UNEXPECTED = [
    each for each in itertools.product(PartitionState, PartitionEvent) if each not in _EXPECTED
]


@pytest.mark.parametrize(("state", "event"), _UNEXPECTED)
def test_an_unexpected_event_is_a_defect(state: PartitionState, event: PartitionEvent) -> None:
    """It raises an error, because another broker may lead the partition."""
    with pytest.raises(AssertionError, match=f"{event.name} in state {state.name}"):
        after(state, event)


def test_a_partition_is_led_only_after_it_was_restored() -> None:
    """Nothing leads to a state with records but their restoring, or the end of a move in vain."""
    entries = {
        (before, event)
        for (before, event), state in TRANSITIONS.items()
        if state in LED and before not in LED
    }
    assert entries == {
        (PartitionState.AWAITED, PartitionEvent.RESTORED),
        (PartitionState.RESIGNED, PartitionEvent.REINSTATED),
    }


def test_the_architecture_shows_the_transitions() -> None:
    """The table of the page is drawn from the one of the code."""
    rows = []
    for state in PartitionState:
        names = itertools.chain([f"{state.name}: {state.value}"], itertools.repeat(""))
        for (before, event), following in TRANSITIONS.items():
            if before is state:
                rows.append(f"| {next(names)} | {event.value} | {following.name} |")
    drawn = "\n".join(["| state | event | next state |", "|---|---|---|", *rows])
    assert drawn in _ARCHITECTURE.read_text(encoding="utf-8"), drawn
