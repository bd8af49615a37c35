"""The threads of a serving broker: what each of them repeats, and how often.

They are the publisher, the WAL cleaner, the janitor and the group coordinator; a member of a
cluster has one more, which follows the metadata and watches the other members. `loops.py` has the
rules for errors. The heartbeat is not here: it begins before the broker serves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from sparklog import limits
from sparklog.broker.assembly import ClusterParts, Parts, Surroundings
from sparklog.broker.backoff import ENDS_THE_BROKER, run_each
from sparklog.broker.failover.reconciler import Reconciler
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.log.publish_loop import publish_pause_seconds
from sparklog.broker.loops import Loops
from sparklog.broker.metrics.bill import BILL_SAMPLE_SECONDS, RecentBill
from sparklog.settings import LivenessSettings
from sparklog.storage.metadata.observer import PAUSE

_FOLLOW_SECONDS = 0.02  # between a member's checks of the metadata, unless it is alone
FOLLOW_REMOTE_SECONDS = 1.0

_log = structlog.get_logger("sparklog.broker")
_WAL_TICK_SECONDS = 0.5
_TAKE_SECONDS = 0.5
_GROUPS_TICK_SECONDS = 0.2


def start_loops(given: Surroundings, parts: Parts, groups: Coordinator, loops: Loops) -> None:
    """Starts the threads that every serving broker has."""

    def clean_wal() -> None:
        run_each((parts.wal_cleaner.tick, carry))

    def carry() -> None:
        pending = parts.wal_cleaner.carry()
        if pending is not None:
            parts.writer.wait(pending)

    def maintain() -> None:
        parts.janitor.tick(should_stop=given.stopping.is_set)

    loops.start("publisher", lambda: _publish(given, parts))
    loops.start(
        "wal-cleaner",
        lambda: loops.repeat("the write-ahead log's cleaning", _WAL_TICK_SECONDS, clean_wal),
    )
    loops.start("groups", lambda: _coordinate(groups, given.stopping))
    janitor = given.settings.janitor
    if janitor.enabled:
        loops.start(
            "janitor",
            lambda: loops.repeat("the tables' maintenance", janitor.interval_seconds, maintain),
        )


def _publish(given: Surroundings, parts: Parts) -> None:
    local = given.store.is_local
    interval_seconds = given.settings.publish_interval_seconds_on(local=local)
    while not given.stopping.is_set():
        waiting = parts.led_partitions.backlog.waiting_objects
        given.publish_now.wait(publish_pause_seconds(waiting, interval_seconds))
        given.publish_now.clear()
        parts.publishing.tick()


def _coordinate(groups: Coordinator, stopping: threading.Event) -> None:
    try:
        while not stopping.is_set():
            try:
                groups.tick(_GROUPS_TICK_SECONDS)
            except ENDS_THE_BROKER:
                raise
            except Exception as error:
                _log.error("an event of a group failed", reason=str(error) or repr(error))
                stopping.wait(_GROUPS_TICK_SECONDS)
    finally:
        groups.close()


def start_flushing(parts: Parts, loops: Loops) -> None:
    """Starts the threads that lead flushes; on a local disk the appending threads do."""
    for number in range(parts.writer.leaders):
        loops.start(f"flush-{number}", parts.writer.lead_flushes)


def start_taking(reconciler: Reconciler, loops: Loops, *, wake: threading.Event) -> None:
    """Starts to serve topics of the metadata that could not be served when they were found.

    For a sole broker, whose table may not be readable at first. `wake`: set when there is one.
    """
    loops.start(
        "takeover",
        lambda: loops.repeat(
            "serving the topics in the metadata", _TAKE_SECONDS, reconciler.take, wake=wake
        ),
    )


def start_sampling(bill: RecentBill, loops: Loops) -> None:
    """Starts to note the number of requests to the store."""
    loops.start("bill", lambda: loops.repeat("the bill", BILL_SAMPLE_SECONDS, bill.sample))


def start_following(
    given: Surroundings,
    parts: Parts,
    cluster: ClusterParts,
    reconciler: Reconciler,
    loops: Loops,
    *,
    liveness: LivenessSettings,
    is_draining: Callable[[], bool],
    wake: threading.Event,
) -> None:
    """Starts to follow the metadata and to watch the other members.

    Args:
        given: the settings and the store.
        parts: the parts of the broker.
        cluster: its parts as a member.
        reconciler: follows the metadata.
        loops: runs the thread.
        liveness: as for this store.
        is_draining: returns whether the broker hands over its partitions, and receives none.
        wake: set when the metadata has to be followed soon.
    """

    def follow() -> None:
        reconciler.tick()
        cluster.controller.tick()
        cluster.handovers.tick()
        # On an object store each check costs requests.
        if given.store.is_local and not is_draining():
            reconciler.prepare()

    def every_seconds() -> float:
        is_alone = len(parts.broker.members.up()) <= 1
        often_seconds = limits.WATCH_SECONDS if is_alone else _FOLLOW_SECONDS
        wanted = often_seconds if given.store.is_local else FOLLOW_REMOTE_SECONDS
        longest = liveness.dead_after_seconds * PAUSE / 2
        return min(wanted, longest, cluster.controller.seconds_to_death())

    loops.start("cluster", lambda: loops.repeat("the cluster", every_seconds, follow, wake=wake))
