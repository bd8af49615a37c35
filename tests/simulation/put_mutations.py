"""Deliberate mistakes in the budget of puts, for worlds with a small one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sparklog.broker.log.backlog import Backlog
from sparklog.broker.log.publish_loop import PublishLoop
from sparklog.broker.log.publish_queue import PublishQueue, _Place
from sparklog.broker.log.put_budget import UPKEEP_SHARE, PutBudget
from sparklog.broker.log.topic import Topic
from tests.simulation.faults import Rates
from tests.simulation.mutation import Mutation

_begin_turn: Final = Backlog.begin_turn
_publish_all: Final = PublishLoop._publish_all


def _publish_all_but_one(loop: PublishLoop, topics: Sequence[Topic]) -> None:
    """The topic of the last name has no turn while others wait."""
    waiting = {each.name for each in loop._led_partitions.backlog.waiting()}
    last = max(waiting) if len(waiting) > 1 else ""
    _publish_all(loop, [each for each in topics if each.name != last])


def _keep_place(backlog: Backlog, topic: Topic, *, restarts_wait: bool) -> None:
    """A topic that has had its turn has the next one, too."""
    _begin_turn(backlog, topic, restarts_wait=False)


def _place_of_all(_queue: PublishQueue, _topic: Topic) -> _Place:
    """No topic has an interval of its own."""
    return _Place.USUAL


def _wake_nothing(_queue: PublishQueue, _now: float) -> None:
    """Topics sleep until something else wakes them."""


def _note_nothing(_budget: PutBudget, _noted: float) -> None:
    """Counts no puts."""


def _forget_debt(budget: PutBudget, puts: int) -> None:
    budget._left_for_tables = max(budget._left_for_tables - puts, 0.0)


def _save_all(budget: PutBudget, now: float) -> float:
    """Saves all puts that are not made."""
    if budget._counted_at > -math.inf:
        budget._left_for_tables += budget._tables_per_second(now) * (now - budget._counted_at)
    budget._counted_at = now
    return budget._left_for_tables


def _ignore_flushes(budget: PutBudget, _now: float) -> float:
    return budget._puts_per_second * (1 - UPKEEP_SHARE)


def _wait_from_now(budget: PutBudget, _now: float) -> float:
    """A wait that begins again whenever it is asked for."""
    return budget._longest_wait_seconds if budget._flushed[1] else 0.0


_SMALL: Final = (
    ("is_local", False),
    ("is_heavy", False),
    ("has_large_batches", False),
    ("has_worker", False),
    ("clone", ""),
    ("cut_rate", 0.0),
    ("puts_per_second", 1.0),
    ("partitions", (2, 2, 1)),
    ("idempotent", 2),
    ("has_burst", True),
)


def _mutation(
    name: str, attribute: str, mistake: Any, owner: type = PutBudget, *, own_interval_ms: str = ""
) -> Mutation:
    return Mutation(
        name=name,
        patches=((owner, attribute, mistake),),
        rates=Rates(),
        profile=(*_SMALL, ("own_interval_ms", own_interval_ms)),
    )


MUTATIONS: Final = (
    _mutation("puts: a topic has no turn", "_publish_all", _publish_all_but_one, PublishLoop),
    _mutation("puts: the first topics have all turns", "begin_turn", _keep_place, Backlog),
    _mutation(
        "puts: a topic with a shorter interval has turns",
        "_place_of",
        _place_of_all,
        PublishQueue,
        own_interval_ms="0",
    ),
    _mutation(
        "puts: a topic with a longer interval sleeps on",
        "_wake_all",
        _wake_nothing,
        PublishQueue,
        own_interval_ms="2000",
    ),
    _mutation("puts: flushes are not counted", "note_flush", _note_nothing),
    _mutation("puts: files and commits are not counted", "note_published", _note_nothing),
    _mutation("puts: a debt is forgotten", "note_published", _forget_debt),
    _mutation("puts: unused puts are saved for a burst", "puts_for_tables", _save_all),
    _mutation("puts: tables use the puts of the log", "_tables_per_second", _ignore_flushes),
    _mutation("puts: a flush waits without an end", "flush_wait_seconds", _wait_from_now),
)

CLUSTER_MUTATIONS: Final = (
    _mutation("cluster: a topic has no turn", "_publish_all", _publish_all_but_one, PublishLoop),
    _mutation("cluster: files and commits are not counted", "note_published", _note_nothing),
)
