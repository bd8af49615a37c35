"""Deliberate mistakes in the real code: each must be noticed, or the checks are blind.

A mutation takes one line of defence away and leaves the rest. It comes with the world in which it
should hurt soon; which seed shows it first is not said, because that changes with every edit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from sparklog.broker import publisher as publishers
from sparklog.broker import writer as writers
from sparklog.broker.batches import Batches, Standing
from sparklog.broker.confirming import Confirmer
from sparklog.broker.partitions import Ledger, StateEncoder, StateSnapshot, Topic
from sparklog.broker.publisher import Publisher
from sparklog.broker.retrying import Backoff
from sparklog.storage import compaction, retention, wal
from sparklog.storage.objects import base
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import Change, Table, end_app_id, maintenance_app_id
from tests.simulation.faults import Rates
from tests.simulation.world import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A mistake, and the world that brings it to light."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...]
    """(where, attribute, what stands there instead)."""
    rates: Rates
    aim: str = ""
    profile: tuple[tuple[str, Any], ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target, attribute, value in self.patches:
                stack.enter_context(mock.patch.object(target, attribute, value))
            yield

    def change(self, profile: Profile) -> Profile:
        """The same profile, with this mutation's rates, and what else it asks for."""
        return dataclasses.replace(profile, rates=self.rates, aim=self.aim, **dict(self.profile))


def _fence_nothing(store: Any, follower: wal.Follower, *, clock: Any) -> list[wal.WalObject]:
    return follower.poll(relist=True)


def _put_nothing(_appender: wal.Appender, _path: str, _pieces: Any) -> None:
    """An ack that is not waited for: the object never comes."""


def _commit_blindly(
    publisher: Publisher, topic: Topic, runs: Sequence[Any], files: Sequence[TableFile]
) -> TableSnapshot:
    """Adds what was written to whatever version it meets."""
    return publisher.table(topic).commit(
        lambda before: (
            Change(
                adds=tuple(files),
                txns={
                    end_app_id(topic.topic_id, run.partition.number): max(
                        run.end, before.ends[run.partition.number]
                    )
                    for run in runs
                },
            )
            if before.topic_id == topic.topic_id
            else None
        )
    )


def _needs_nothing(_ledger: Ledger, _broker: int, _epoch: int) -> list[int]:
    return []


def _remembers_nothing(_encoder: StateEncoder, _snapshot: StateSnapshot) -> bytes:
    return b"\x90"  # msgpack's empty list


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _move_nothing(table: Table, _topic_id: str, offsets: Mapping[int, int]) -> TableSnapshot:
    """A log start that only the broker knows."""
    snapshot = table.refresh()
    starts = tuple(
        max(start, offsets.get(number, 0)) for number, start in enumerate(snapshot.starts)
    )
    return dataclasses.replace(snapshot, starts=starts)


def _remove_whole(_deleting: Any, _file: TableFile) -> bool:
    """The rows of a file that stay go with those that do not."""
    return True


def _keep_the_start(snapshot: TableSnapshot, topic_id: str, _starts: Any) -> dict[str, int]:
    """Files go, and the log seems to have holes."""
    return {maintenance_app_id(topic_id): snapshot.version + 1}


_RESTARTS = Rates(crash=0.01)
_RIVALS = Rates(stall=0.02, freeze=0.01)
_DOUBTS = Rates(unresolved=0.03, crash=0.004)

MUTATIONS = (
    Mutation(
        name="no fence",
        patches=((wal, "fence", _fence_nothing),),
        rates=_RIVALS,
        profile=(("brokers", 3),),
    ),
    Mutation(
        name="ack before the put",
        patches=((wal.Appender, "_claim", _put_nothing),),
        rates=_RESTARTS,
    ),
    Mutation(
        name="a checkpoint forgets what is needed",
        patches=((Ledger, "needed", _needs_nothing),),
        rates=_RESTARTS,
    ),
    Mutation(
        name="a checkpoint forgets who wrote what",
        patches=((StateEncoder, "encode", _remembers_nothing),),
        rates=_RESTARTS,
    ),
    Mutation(
        name="the publisher takes no look at the table's ends",
        patches=((publishers.Publisher, "_commit", _commit_blindly),),
        rates=_RIVALS,
        profile=(("brokers", 3),),
    ),
    Mutation(
        name="producers are not remembered",
        patches=((writers, "find_duplicate", _always(None)),),
        rates=_DOUBTS,
    ),
    Mutation(
        name="batches of queries are not remembered",
        patches=(
            (Batches, "find", _always(None)),
            (Standing, "has", _always(False)),
            (Standing, "newest", _always(-1)),
        ),
        rates=_DOUBTS,
        profile=(("queries", 1),),
    ),
    Mutation(
        name="staged files go while the log refers to them",
        patches=((Ledger, "is_staged", _always(False)),),
        rates=_DOUBTS,
        profile=(("queries", 2),),
    ),
    Mutation(
        name="compaction takes no look at what is active",
        patches=((compaction, "_are_active", _always(True)), (Table, "_check", _always(None))),
        rates=Rates(stall=0.02),
        profile=(("administrators", 1), ("engines", 1)),
    ),
    Mutation(
        name="files are added at any age",
        patches=((Table, "_check", _always(None)),),
        rates=Rates(stall=0.05, jump=0.01),
        aim="after put_new topics",
        profile=(("steps", 1_500),),
    ),
    Mutation(
        name="a deletion is not kept",
        patches=((retention, "delete_records", _move_nothing),),
        rates=_RESTARTS,
        profile=(("administrators", 1),),
    ),
    Mutation(
        name="a deletion takes what it should leave",
        patches=((retention._Deleting, "_rewrite", _remove_whole),),
        rates=Rates(),
        profile=(("administrators", 1), ("readers", 1)),
    ),
    Mutation(
        name="retention leaves the log start behind",
        patches=((retention, "_txns", _keep_the_start),),
        rates=Rates(),
        profile=(("administrators", 1), ("readers", 1)),
    ),
    Mutation(
        name="a broker does not look where its logs start",
        patches=((Ledger, "started", _always(None)),),
        rates=Rates(),
        profile=(("administrators", 1),),
    ),
    Mutation(
        name="whatever stands at a path is taken for ours",
        patches=((base, "_is_equal", _always(True)),),
        rates=_RIVALS,
        profile=(("brokers", 3),),
    ),
    Mutation(
        name="what a dead broker committed is not made durable",
        patches=((Table, "settle", _always(None)),),
        rates=Rates(crash=0.03, power_cut=0.005),
        aim="between put_new topics",
        profile=(("brokers", 2), ("is_local", True), ("steps", 1_500)),
    ),
    Mutation(
        name="what another engine wrote is not made durable",
        patches=((Table, "_harden", _always(None)),),
        rates=Rates(power_cut=0.005),
        profile=(("engines", 1), ("has_vacuum", False), ("is_local", True), ("steps", 1_500)),
    ),
    Mutation(
        name="nobody looks whether published files are there",
        patches=((Confirmer, "_missing", _always([])),),
        rates=_RESTARTS,
        profile=(("engines", 1), ("has_vacuum", True), ("administrators", 0), ("steps", 1_500)),
    ),
    Mutation(
        name="a topic that cannot be published holds up the others",
        patches=((Backoff, "is_waiting", lambda backoff, _name: bool(backoff._failures)),),
        rates=Rates(),
        profile=(("partitions", (2, 1)),),
    ),
)
