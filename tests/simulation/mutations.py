"""Deliberate mistakes in the real code: each must be noticed, or the checks are blind.

A mutation takes one line of defence away and leaves the rest. It comes with the world in which it
should hurt soon; which seed shows it first is not said, because that changes with every edit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from sparklog import errors, limits
from sparklog.broker.backoff import RetrySchedule
from sparklog.broker.decode_memory import DecodeMemory
from sparklog.broker.log import flush as flushes
from sparklog.broker.log import publish_process, readers, recovery, run_choice
from sparklog.broker.log import writer as writers
from sparklog.broker.log.appends import Append
from sparklog.broker.log.checkpoint_state import StateEncoder, StateSnapshot
from sparklog.broker.log.confirmer import Confirmer
from sparklog.broker.log.flush import Flush
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.needed_objects import NeededObjects
from sparklog.broker.log.spark_batches import PartitionSparkBatches, TopicSparkBatches
from sparklog.broker.log.table_commit import TableCommit
from sparklog.formats import record_batch
from sparklog.sinks import commit as commits
from sparklog.sinks import options
from sparklog.storage.maintenance import file_compaction, restoring, retention
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.metadata import identity, liveness
from sparklog.storage.metadata.liveness import Leader, LeaderState, LeaderWatch, Sighting
from sparklog.storage.metadata.model import ClusterMetadata
from sparklog.storage.objects import Payload, SyncFailed, base
from sparklog.storage.reading import read as reads
from sparklog.storage.snapshot import Entry, TableFile, TableSnapshot
from sparklog.storage.table import preparations, together, topic_table
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.names import end_app_id, maintenance_app_id
from sparklog.storage.table.topic_table import TopicTable
from sparklog.storage.wal.base import Checkpoint, WalObject
from sparklog.storage.wal.objects import ObjectAppender, ObjectFollower
from tests.simulation import column_mutations, put_mutations, segment_mutations
from tests.simulation.faults import ProcessStore, Rates
from tests.simulation.mutation import Mutation


def _fence_nothing(follower: ObjectFollower) -> list[WalObject]:
    return follower.poll(relist=True)


def _put_nothing(
    _appender: ObjectAppender, _path: str, _pieces: Any, _gives_up: Callable[[], bool]
) -> None:
    """An ack that is not waited for: the object never comes."""


def _trim_all(appender: ObjectAppender, checkpoint: Checkpoint) -> None:
    """Trims what the checkpoint needs, too."""
    _trim(appender, dataclasses.replace(checkpoint, needed=()))


def _find_alone(flush: Flush, look: Callable[[Flush], Any]) -> Any:
    """Judges a flush by the tables, without the flushes under way before it."""
    return look(flush)


def _commit_blindly(commit: TableCommit, before: TableSnapshot) -> TableChange | None:
    """Adds the written files to any version it meets."""
    topic_id = commit.topic.topic_id
    commit.has_landed = before.topic_id == topic_id
    if not commit.has_landed:
        return None
    ends = {
        end_app_id(topic_id, run.partition): max(run.end, before.ends[run.partition])
        for run in commit.runs
    }
    return TableChange(adds=tuple(commit.files), txns=ends)


def _cut_by_rows(
    payload: pa.RecordBatch, first: int, end: int, *, base_offset: int
) -> pa.RecordBatch:
    """Cuts a payload as if it had a row for each offset."""
    return payload.slice(first - base_offset, end - first)


def _refuse(path: str, reason: str) -> errors.StorageUnavailable:
    """States that a put without an answer had no effect."""
    return errors.StorageUnavailable(operation="put", path=path, reason=reason)


def _put_without_syncing(
    store: ProcessStore, objects: Sequence[tuple[str, Payload]]
) -> list[Exception | None]:
    """Puts objects together, and returns before a flush."""
    found: list[Exception | None] = []
    for path, data in objects:
        try:
            store.put(path, data, durable=False)
        except SyncFailed:
            raise
        except Exception as error:
            found.append(error)
        else:
            found.append(None)
    return found


def _needs_nothing(_objects: NeededObjects, _broker: int, _epoch: int) -> list[int]:
    return []


def _remembers_nothing(_encoder: StateEncoder, _snapshot: StateSnapshot) -> bytes:
    return b"\x90"  # msgpack's empty list


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _move_nothing(table: TopicTable, _topic_id: str, offsets: Mapping[int, int]) -> TableSnapshot:
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


def _poll_by_wall_clock(
    watch: LeaderWatch, metadata: ClusterMetadata | None = None
) -> Sighting | None:
    """Compares the clocks of two hosts."""
    leader = Leader.of(metadata or watch._meta.reload(), watch._store)
    if leader is None:
        return None
    beat_us = leader.heartbeat.at_us if leader.heartbeat is not None else leader.known.started_us
    is_silent = watch._clock.now_us() - beat_us > watch.patience_seconds(leader) * 1e6
    state = LeaderState.DEAD if leader.stopped or is_silent else LeaderState.ALIVE
    return Sighting(leader=leader, state=state)


def _ask_in_vain(*arguments: Any, **options: Any) -> identity.Asked:
    """Asks, and ignores the answer."""
    asked = _ask_broker(*arguments, **options)
    return dataclasses.replace(asked, answer=identity.Answer.NONE)


def _state_of_late(leader: Leader, *, now: float, **known: Any) -> LeaderState:
    """Takes the time that an answer needs for silence."""
    return _state_of(leader, **{**known, "now": now, "asked_at": now})


def _tell_nothing(append: Append, **place: int) -> Entry:
    return msgspec.structs.replace(_entry(append, **place), decoded_bytes=1)


_state_of = liveness.state_of
_ask_broker = identity.ask_broker
_entry = Append.entry
_trim = ObjectAppender.trim
_check = record_batch.check
_HEAVY = (("is_heavy", True), ("consumers", 1), ("steps", 1_500))
_FLUSHES = (("is_local", False), ("simple", 3), ("idempotent", 3))
_ENGINE = (("engines", 1), ("has_vacuum", False), ("is_local", True))
_COPIES = (("clone", "other"), ("queries", 1), ("partitions", (2, 2)), ("steps", 1_500))
_LARGE = (
    ("has_large_batches", True),
    ("queries", 1),
    ("readers", 1),
    ("skew_seconds", 0.05),
    ("steps", 700),
)
_RESTARTS = Rates(crash=0.01)
_NO_TABLES_SYNCED = ((recovery, "sync_all", _always(None)), (together, "sync_all", _always(None)))
_RIVALS = Rates(stall=0.02, freeze=0.01)
_DOUBTS = Rates(unresolved=0.03, crash=0.004)

_VACUUM = (("engines", 1), ("has_vacuum", True), ("cut_rate", 0.0), ("steps", 1_500))

MUTATIONS = (
    Mutation(
        name="no fence",
        patches=((ObjectFollower, "fence", _fence_nothing),),
        rates=_RIVALS,
        profile=(("brokers", 3),),
    ),
    Mutation(
        name="ack before the put",
        patches=((ObjectAppender, "_claim", _put_nothing),),
        rates=_RESTARTS,
    ),
    Mutation(
        name="a checkpoint omits references",
        patches=((NeededObjects, "references", _needs_nothing),),
        rates=_RESTARTS,
    ),
    Mutation(
        name="objects that a checkpoint needs are trimmed",
        patches=((ObjectAppender, "trim", _trim_all),),
        rates=_RESTARTS,
        profile=(("is_local", False),),
    ),
    Mutation(
        name="a checkpoint forgets who wrote what",
        patches=((StateEncoder, "encode", _remembers_nothing),),
        rates=_RESTARTS,
    ),
    Mutation(
        name="the publisher takes no look at the table's ends",
        patches=((TableCommit, "decide", _commit_blindly),),
        rates=_RIVALS,
        profile=(("brokers", 3),),
    ),
    Mutation(
        name="a lost publishing process has put no commit",
        patches=((publish_process, "PutUnresolved", _refuse),),
        rates=Rates(lost_answer=0.2),
        profile=(("has_worker", True), ("steps", 1_500)),
    ),
    Mutation(
        name="producers are not remembered",
        patches=((flushes, "find_duplicate", _always(None)),),
        rates=_DOUBTS,
    ),
    Mutation(
        name="batches of queries are not remembered",
        patches=(
            (PartitionSparkBatches, "find", _always(None)),
            (TopicSparkBatches, "has", _always(False)),
            (TopicSparkBatches, "newest", _always(-1)),
        ),
        rates=_DOUBTS,
        profile=(("queries", 1),),
    ),
    Mutation(
        name="the log does not say what batches decode to",
        patches=((Append, "entry", _tell_nothing),),
        rates=Rates(),
        profile=_HEAVY,
    ),
    Mutation(
        name="heavy batches take no turns",
        patches=((DecodeMemory, "_has_room", _always(True)),),
        rates=Rates(stall=0.01),
        profile=(("is_heavy", True), ("consumers", 3), ("steps", 2_000)),
    ),
    Mutation(
        name="heavy batches are read like others",
        patches=((readers, "_is_packed", _always(False)),),
        rates=Rates(),
        profile=_HEAVY,
    ),
    Mutation(
        name="a batch of any size is taken that is small compressed",
        patches=((record_batch, "check", lambda data, **_: _check(data)),),
        rates=Rates(),
        profile=_HEAVY,
    ),
    Mutation(
        name="a large batch is published in parts",
        patches=((run_choice, "keep_batches_whole", _always(None)),),
        rates=Rates(),
        profile=_LARGE,
    ),
    Mutation(
        name="files that are prepared are swept",
        patches=((TopicTable, "is_needed", TopicTable.is_named),),
        rates=Rates(),
        profile=_LARGE,
    ),
    Mutation(
        name="a preparation is not renewed",
        patches=((preparations, "renew", _always(None)),),
        rates=Rates(),
        profile=(*_LARGE, ("readers", 0), ("steps", 1_000)),
    ),
    Mutation(
        name="files that are prepared become too old",
        patches=((TopicTable, "is_prepared", _always(False)),),
        rates=Rates(),
        profile=_LARGE,
    ),
    Mutation(
        name="a query is known without its topic",
        patches=(
            (options, "to_topic", lambda query, _topic: query),
            (commits, "_check_topics", _always(None)),
        ),
        rates=Rates(),
        profile=_COPIES,
    ),
    Mutation(
        name="a batch is known by its manifest only",
        patches=(
            (PartitionSparkBatches, "find", _always(None)),
            (TopicSparkBatches, "has", _always(False)),
            (TopicSparkBatches, "newest", _always(-1)),
        ),
        rates=Rates(),
        profile=(("clone", "same"), *_COPIES[1:]),
    ),
    Mutation(
        name="staged files go while the log refers to them",
        patches=((NeededObjects, "is_staged", _always(False)),),
        rates=_DOUBTS,
        profile=(("queries", 2),),
    ),
    Mutation(
        name="a write with offsets begins anywhere",
        patches=((flushes, "_check_offsets", _always(None)),),
        rates=_DOUBTS,
        profile=(("has_mirror", True),),
    ),
    Mutation(
        name="readers take gaps for rows",
        patches=((reads, "between", _cut_by_rows),),
        rates=Rates(),
        profile=(("has_mirror", True), ("readers", 2)),
    ),
    Mutation(
        name="compaction ignores which files are active",
        patches=(
            (file_compaction, "_are_active", _always(True)),
            (topic_table, "check", _always(None)),
        ),
        rates=Rates(stall=0.02),
        profile=(("administrators", 1), ("engines", 2), ("steps", 3_000)),
    ),
    Mutation(
        name="files of any age are added without a check that they exist",
        patches=((topic_table, "check", _always(None)), (Confirmer, "_missing", _always([]))),
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
        patches=((LedPartitions, "advance_start", _always(None)),),
        rates=Rates(),
        profile=(("administrators", 1),),
    ),
    Mutation(
        name="any object at a path is taken for ours",
        patches=((base, "_is_equal", _always(True)),),
        rates=_RIVALS,
        profile=(("brokers", 3),),
    ),
    Mutation(
        name="what a dead broker committed is not made durable",
        patches=((TopicTable, "sync", _always(None)), *_NO_TABLES_SYNCED),
        rates=Rates(crash=0.05, power_cut=0.001),
        aim="between put_new topics",
        profile=(("brokers", 2), ("is_local", True), ("steps", 4_000)),
    ),
    Mutation(
        name="files and commits that are put together are not made durable",
        patches=((ProcessStore, "put_all_new", _put_without_syncing),),
        rates=Rates(power_cut=0.01),
        profile=(("is_local", True), ("steps", 1_500)),
    ),
    Mutation(
        name="what another engine wrote is not made durable",
        patches=((TopicTable, "_sync_files", _always(None)), *_NO_TABLES_SYNCED),
        rates=Rates(power_cut=0.006),
        profile=(*_ENGINE, ("engines", 2), ("steps", 2_500)),
    ),
    Mutation(
        name="replaced files are removed while the file in their place is torn",
        patches=((maintenance, "_check_files", _always(None)),),
        rates=Rates(),
        profile=(*_ENGINE, ("administrators", 0), ("cut_rate", 0.3), ("steps", 2_500)),
    ),
    Mutation(
        name="published files are not checked",
        patches=((Confirmer, "_missing", _always([])),),
        rates=_RESTARTS,
        profile=_VACUUM,
    ),
    Mutation(
        name="what a merge has replaced is not kept from VACUUM",
        patches=((limits, "REPLACED_KEPT_SECONDS", 0.0),),
        rates=Rates(),
        profile=_VACUUM,
    ),
    Mutation(
        name="merged files are not checked",
        patches=((restoring, "verify", _always(None)), (restoring, "restore", _always(set()))),
        rates=Rates(),
        profile=_VACUUM,
    ),
    Mutation(
        name="the clocks of two hosts are compared",
        patches=((LeaderWatch, "poll", _poll_by_wall_clock),),
        rates=Rates(),
        profile=(("brokers", 3), ("is_one_machine", False), ("skew_seconds", 1_800.0)),
    ),
    Mutation(
        name="a slow answer is taken for a silent leader",
        patches=((liveness, "state_of", _state_of_late),),
        rates=Rates(stall=0.3, freeze=0.02),
        profile=(("brokers", 3), ("is_one_machine", True), ("steps", 3_000), ("asks", False)),
    ),
    Mutation(
        name="a silent leader is not asked",
        patches=((LeaderWatch, "_is_answered", _always(False)),),
        rates=Rates(mute=0.004),
        profile=(("brokers", 3), ("steps", 3_000), ("asks", True)),
    ),
    Mutation(
        name="an answer is not a sign of life",
        patches=((identity, "ask_broker", _ask_in_vain),),
        rates=Rates(mute=0.004),
        profile=(("brokers", 3), ("steps", 3_000), ("asks", True)),
    ),
    Mutation(
        name="an ack before the flushes before it are durable",
        patches=((writers.Writer, "_wait_for_previous", _always(None)),),
        rates=Rates(crash=0.01, freeze=0.005),
        aim="put_new wal",
        profile=_FLUSHES,
    ),
    Mutation(
        name="a flush is refused although a later one needs it",
        patches=((writers.Writer, "_gives_up", _always(True)),),
        rates=Rates(unavailable=0.02, crash=0.002),
        profile=_FLUSHES,
    ),
    Mutation(
        name="a flush is judged without those under way",
        patches=((Flush, "_find", _find_alone),),
        rates=Rates(),
        profile=_FLUSHES,
    ),
    Mutation(
        name="a topic that cannot be published holds up the others",
        patches=((RetrySchedule, "is_waiting", lambda backoff, _name: bool(backoff._failures)),),
        rates=Rates(),
        profile=(("partitions", (2, 1)),),
    ),
    *segment_mutations.MUTATIONS,
    *put_mutations.MUTATIONS,
    *column_mutations.MUTATIONS,
)
