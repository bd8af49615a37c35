"""The life of a partition at one broker: its states, and the events that cause transitions.

Each broker has its own view. Together they maintain one invariant: at any time at most one broker
is in a state in which it can append to the partition. The metadata decides which one may, and the
fence in the write-ahead log ends a leader that does not yet know that it was replaced.

An event that a state does not expect is a defect: `after` raises an `AssertionError` that names
both, because otherwise the broker might serve a partition that another one leads.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class PartitionState(enum.Enum):
    """The state of a partition, as one broker knows it."""

    ELSEWHERE = "another broker leads it"
    AWAITED = "the metadata names this broker, which has not yet restored it"
    SERVING = "this broker appends to it, publishes it, and answers its readers"
    BLOCKED = "its table and log do not connect: it can be read, but accepts no records"
    RESIGNING = "it accepts no more requests, and its last appends become durable"
    RESIGNED = "it is not served, and it is not yet known if the metadata names its successor"


class PartitionEvent(enum.Enum):
    """An event in the life of a partition."""

    ASSIGNED = "the metadata names this broker as the leader"
    RESTORED = "its records, producers and batches are found in the table and the logs"
    DISCONNECTED = "its log is found not to continue its table"
    RECONNECTED = "its log continues its table again"
    MOVE_BEGAN = "another member is about to lead it"
    MOVE_ABANDONED = "its last appends did not become durable"
    DRAINED = "none of its appends is under way"
    REINSTATED = "a later version of the metadata does not name a successor"
    SUCCEEDED = "the metadata names another broker"


_S = PartitionState
_E = PartitionEvent

TRANSITIONS: Final[Mapping[tuple[PartitionState, PartitionEvent], PartitionState]] = {
    (_S.ELSEWHERE, _E.ASSIGNED): _S.AWAITED,
    (_S.AWAITED, _E.SUCCEEDED): _S.ELSEWHERE,
    (_S.AWAITED, _E.RESTORED): _S.SERVING,
    (_S.SERVING, _E.DISCONNECTED): _S.BLOCKED,
    (_S.BLOCKED, _E.RECONNECTED): _S.SERVING,
    (_S.SERVING, _E.MOVE_BEGAN): _S.RESIGNING,
    (_S.RESIGNING, _E.MOVE_ABANDONED): _S.SERVING,
    (_S.RESIGNING, _E.DISCONNECTED): _S.BLOCKED,
    (_S.RESIGNING, _E.DRAINED): _S.RESIGNED,
    (_S.RESIGNED, _E.REINSTATED): _S.SERVING,
    (_S.RESIGNED, _E.SUCCEEDED): _S.ELSEWHERE,
}
"""The state that follows an event. A deleted topic ends the life of its partitions in any state."""

LED: Final = frozenset({_S.SERVING, _S.BLOCKED, _S.RESIGNING})
"""States in which this broker has the partition's records, and is the one to publish them."""

MOVING: Final = frozenset({_S.AWAITED, _S.RESIGNING, _S.RESIGNED})
"""States in which the metadata names this broker, as far as it knows, but it serves no request."""


def after(state: PartitionState, event: PartitionEvent) -> PartitionState:
    """Returns the state that follows. Raises `AssertionError` if none does."""
    found = TRANSITIONS.get((state, event))
    assert found is not None, f"{event.name} in state {state.name}"
    return found
