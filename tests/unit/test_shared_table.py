"""One view of a table for a broker's threads: they do not wait for upkeep, and ask one version."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage import data_file, delta_log, maintenance
from sparklog.storage.objects import MemoryStore, NoFaults
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import NO_TABLE, TableChange, TopicTable, _Replay, end_app_id
from tests.support.brokers import Rig, RigOptions, rows_of_table
from tests.support.tables import TOPIC_ID, append, create, publish_rows, record_batch

LOG = "topics/t/_delta_log"
PATIENCE_SECONDS = 5.0
COLD = RigOptions(hot_bytes=0)


class At(NoFaults):
    """Calls `call` once, when an operation reaches a path that contains `part`."""

    def __init__(self, operation: str, part: str, call: Callable[[], None]) -> None:
        self._operation = operation
        self._part = part
        self._call: Callable[[], None] | None = call

    def before(self, operation: str, path: str) -> None:
        if operation == self._operation and self._part in path and self._call is not None:
            call, self._call = self._call, None
            call()


def put_foreign(store: MemoryStore, version: int, actions: delta_log.Actions) -> None:
    """Puts a commit as another engine would."""
    info = delta_log.CommitInfo(
        timestamp=0,
        operation="FOREIGN",
        operation_parameters={},
        is_blind_append=False,
        engine_info="x",
        txn_id="x",
    )
    path = f"{LOG}/{delta_log.commit_name(version)}"
    store.put_new(path, delta_log.encode_commit(info, actions))


@pytest.fixture
def table(store: MemoryStore, clock: ManualClock) -> TopicTable:
    """A topic of one partition with one file."""
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    publish_rows(table, 0, 10)
    return table


# ------------------------------------------------------------------------------ waiting


@pytest.mark.parametrize(
    ("upkeep", "operation", "part"),
    [
        (TopicTable.checkpoint, "put_new", ".checkpoint."),
        (TopicTable.checkpoint, "get", ".checkpoint."),
        (TopicTable.checkpoint, "put", "_last_checkpoint"),
        (TopicTable.confirm, "get", LOG),
        (maintenance.sweep_replaced, "stat", "partition=0"),
        (maintenance.sweep_orphans, "walk", "topics/t"),
    ],
    ids=["checkpoint", "its check", "its hint", "commits", "files", "orphans"],
)
def test_nobody_waits_for_upkeep(
    store: MemoryStore,
    clock: ManualClock,
    upkeep: Callable[[TopicTable], object],
    operation: str,
    part: str,
) -> None:
    """While a request of the janitor is under way, records are acked, published and read."""
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    table = rig.partition_table.topic("t").table
    read: list[object] = []

    def others() -> None:
        rig.append(["b"])
        rig.publish()
        read.extend(rig.read())

    def meanwhile() -> None:
        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()

    table.store = store.view(At(operation, part, meanwhile))
    upkeep(table)
    assert read == [(0, b"a"), (1, b"b")]
    assert rows_of_table(store, clock) == read
    table.store = store
    table.checkpoint()
    store.delete(f"{LOG}/{delta_log.commit_name(version)}" for version in range(2))
    assert rows_of_table(store, clock) == read


def test_a_checkpoint_is_of_the_version_that_was_taken(
    table: TopicTable, store: MemoryStore, clock: ManualClock
) -> None:
    """Commits during a checkpoint are not in it, and follow it."""

    def others() -> None:
        append(table, 3)

    table.store = store.view(At("put_new", ".checkpoint.", others))
    table.checkpoint()
    assert (table.checkpoint_version, table.snapshot.version) == (1, 4)
    found = table.read_checkpoint([delta_log.checkpoint_name(1)])
    assert len(found.adds) == 1
    assert TopicTable(store, "t", clock=clock).refresh() == table.snapshot


# ------------------------------------------------------------------------------ one version


def test_a_file_is_needed_at_every_moment_of_its_commit(
    table: TopicTable, clock: ManualClock
) -> None:
    """A commit of a prepared file cannot come between "is it named" and "will it be"."""
    commits: list[threading.Thread] = []

    class Raced(TopicTable):
        def is_named(self, path: str) -> bool:
            named = super().is_named(path)
            if not commits:
                commits.append(threading.Thread(target=publish, daemon=True))
                commits[0].start()
                commits[0].join(0.05)
            return named

    raced = Raced(table.store, "t", clock=clock)
    number = raced.prepare(TOPIC_ID)
    file = data_file.write_file(
        table.store,
        topic="t",
        topic_id=TOPIC_ID,
        partition=0,
        batches=[record_batch(0, 10, 10)],
        clock=clock,
        preparation=number,
    )

    def publish() -> None:
        txns = {end_app_id(TOPIC_ID, 0): 20}
        raced.commit(lambda _: TableChange(adds=(file,), txns=txns, preparation=number))

    assert raced.is_needed(file.path)
    commits[0].join(PATIENCE_SECONDS)
    assert raced.preparation is None
    assert raced.is_needed(file.path)


def test_a_state_that_is_loaded_is_seen_whole(
    table: TopicTable, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is replayed, questions are answered by the version before it."""
    late = TopicTable(store, "t", clock=clock)
    (file,) = late.refresh().files[0]
    append(table, 3)
    table.checkpoint()
    store.delete(f"{LOG}/{delta_log.commit_name(version)}" for version in range(4))
    seen: list[bool] = []
    apply = _Replay.apply

    def look(replay: _Replay, version: int, actions: delta_log.Actions) -> None:
        seen.append(late.is_named(file.path) and late.txn(end_app_id(TOPIC_ID, 0)) is not None)
        apply(replay, version, actions)

    monkeypatch.setattr(_Replay, "apply", look)
    assert late.refresh() == table.snapshot
    assert seen
    assert all(seen)


def test_what_others_read_during_a_sweep_waits_for_the_next(
    table: TopicTable, store: MemoryStore, clock: ManualClock
) -> None:
    """A sweep removes files that were replaced in the version that it has checked, and none since.

    A commit of another engine may have old dates, and be neither durable nor read back.
    """
    (file,) = table.snapshot.files[0]
    path = f"topics/t/{file.path}"
    copy = f"partition=0/{TOPIC_ID}-0-9-{'0' * 16}.parquet"
    store.put_new(f"topics/t/{copy}", store.get(path))
    replaced = delta_log.Actions(
        removes=[delta_log.Remove(path=file.path, deletion_timestamp=1, data_change=False)],
        adds=[
            delta_log.add_of(
                TableFile(
                    path=copy,
                    partition=0,
                    size_bytes=file.size_bytes,
                    rows=10,
                    first=0,
                    last=9,
                    min_timestamp_us=file.min_timestamp_us,
                    max_timestamp_us=file.max_timestamp_us,
                    modified_us=file.modified_us,
                ),
                data_change=False,
            )
        ],
    )

    def others() -> None:
        put_foreign(store, 2, replaced)
        table.refresh()

    table.store = store.view(At("stat", path, others))
    assert maintenance.sweep_replaced(table) == 0
    assert table.snapshot.version == 2
    store.stat(path)
    assert maintenance.sweep_replaced(table) == 1


def test_a_file_that_leaves_the_table_during_its_check_is_not_lost(
    table: TopicTable, store: MemoryStore
) -> None:
    """Another engine may replace a file, and remove it at once, while the janitor looks for it."""
    (file,) = table.snapshot.files[0]

    def others() -> None:
        table.commit(lambda _: TableChange(removes=(file,)))
        store.delete([f"topics/t/{file.path}"])

    table.store = store.view(At("stat", file.path, others))
    assert maintenance.sweep_replaced(table) == 0
    assert table.refresh().files == ((),)


# ------------------------------------------------------------------------------ failures


def test_readers_go_on_where_the_publisher_cannot(store: MemoryStore, clock: ManualClock) -> None:
    """A table that another engine has made unreadable is read as it was, also for the first time.

    The publisher has met it first, and its records are read from the log.
    """
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    topic = rig.partition_table.topic("t")
    protocol = delta_log.Protocol(min_reader_version=99, min_writer_version=99)
    put_foreign(store, topic.table.snapshot.version + 1, delta_log.Actions(protocol=protocol))
    rig.append(["b"])
    for _ in range(2):
        with pytest.raises(errors.ForeignTable):
            rig.publisher.publish(topic)
        clock.advance(limits.UPKEEP_ROUND_SECONDS)
        rig.janitor.tick()
    assert rig.read() == [(0, b"a"), (1, b"b")]


@pytest.mark.parametrize("was_read", [True, False])
def test_readers_go_on_where_the_table_was_replaced(
    store: MemoryStore, clock: ManualClock, *, was_read: bool
) -> None:
    """Another engine may make the table one that is not the topic's: its old files are read on.

    Also those that were never read before.
    """
    rig = Rig(store, clock, options=COLD)
    rig.create("t")
    rig.append(["a"])
    rig.publish()
    if was_read:
        assert rig.read() == [(0, b"a")]
    topic = rig.partition_table.topic("t")
    metadata = delta_log.new_metadata(table_id="another", created_ms=0)
    put_foreign(store, topic.table.snapshot.version + 1, delta_log.Actions(metadata=metadata))
    rig.append(["b"])
    with pytest.raises(errors.ForeignTable):
        rig.publisher.publish(topic)
    rig.janitor.tick()
    assert topic.table.snapshot.topic_id is None
    assert rig.read() == [(0, b"a"), (1, b"b")]
    topic.last_read = NO_TABLE
    with pytest.raises(errors.ForeignTable, match="lost offsets of partition 0 below 1"):
        rig.read()


def test_a_topic_created_again_has_a_table_of_its_own(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The view of a deleted topic is not that of a new topic of the same name."""
    rig = Rig(store, clock, options=COLD)
    before = rig.create("t")
    rig.append(["a"])
    rig.publish()
    rig.broker.topics.delete("t")
    after = rig.create("t")
    rig.append(["b"])
    rig.publish()
    assert rig.read() == [(0, b"b")]
    assert before.table is not after.table
    assert before.table.refresh().topic_id == after.table.snapshot.topic_id == after.topic_id
