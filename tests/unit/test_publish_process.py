"""The publishing process writes for the broker, and may be lost at any moment."""

from __future__ import annotations

import dataclasses
from unittest import mock

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from sparklog import errors
from sparklog.broker.log.publish_process import PublishProcess
from sparklog.broker.log.publish_worker import (
    Answer,
    PutAll,
    Worker,
    WorkerLost,
    WriteTogether,
    decode_answer,
    decode_request,
    encode,
)
from sparklog.broker.log.schema_keeper import SchemaKeeper
from sparklog.broker.schema_registry import SchemaRegistry
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AppendStaged
from sparklog.settings import RegistrySettings
from sparklog.storage.objects import (
    DelayedStore,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    Store,
    SyncFailed,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.schema_texts import SchemaTexts
from sparklog.storage.staging.manifest import Manifest, Section
from sparklog.storage.staging.manifest import write as write_manifest
from sparklog.storage.table.changes import describe_change
from tests.support.batches import Record, built
from tests.support.brokers import Rig, RigOptions, flip, paths, publishing, rows_of_table
from tests.support.registry import FakeRegistry, double, framed, record
from tests.support.tables import table_file

TOPICS = ("t", "u", "v")
_LENGTH_BYTES = 4

pytestmark = pytest.mark.rig(topics=dict.fromkeys(TOPICS, 2))


class FakeWorker:
    """A worker in this process, which sees what a real one would receive."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.worker = Worker(store, clock=clock)
        self.asked: list[type] = []
        self.lost_at: dict[type, str] = {}
        """When it is lost: "before" or "after" it serves a request of that kind."""
        self.has_ended = False

    def is_ready(self) -> bool:
        return True

    def ask(self, request: WriteTogether | PutAll) -> Answer:
        assert not self.has_ended
        self.asked.append(type(request))
        moment = self.lost_at.get(type(request))
        if moment == "before":
            raise WorkerLost("killed")
        received = decode_request(encode(request)[_LENGTH_BYTES:])
        answer = self.worker.serve(received)
        if moment == "after":
            raise WorkerLost("killed")
        used = msgspec.structs.replace(answer, cpu_seconds=1.5, resident_bytes=1_000)
        return decode_answer(encode(used)[_LENGTH_BYTES:])

    def end(self) -> None:
        self.has_ended = True


class Workers:
    """Starts workers for a rig, on a view of its store."""

    def __init__(self, rig: Rig, store: Store | None = None) -> None:
        assert isinstance(rig.clock, ManualClock)
        self.all: list[FakeWorker] = []
        self._store = store or rig.store
        self._clock = rig.clock
        self.process = PublishProcess(
            rig.hot, self._start, clock=rig.clock, objects=1, after_seconds=0.0
        )
        rig.publisher.process = self.process

    def _start(self) -> FakeWorker:
        self.all.append(FakeWorker(self._store, self._clock))
        return self.all[-1]


class Puts(NoFaults):
    """Records the puts in tables; `error` is raised for those of topic t."""

    def __init__(self, error: Exception | None = None) -> None:
        self.paths: list[str] = []
        self.error = error

    def before(self, operation: Operation, path: str) -> None:
        if operation == "put_new" and path.startswith("topics/"):
            self.paths.append(path)
            if self.error is not None and path.startswith("topics/t/"):
                raise self.error


def publish(rig: Rig) -> list[Exception | None]:
    """Publishes all topics together, and returns why one was not."""
    return rig.publisher.publish_together([rig.led_partitions.topic(name) for name in TOPICS])


def fill(rig: Rig) -> None:
    """Each topic gets records of both kinds of clients."""
    for name in TOPICS:
        rig.append([name], topic=name)
        batch = built([Record(1_700_000_000_000, None, b"k"), Record(1_700_000_000_001, b"", None)])
        for _ in range(2):
            rig.broker.wait(rig.broker.submit(rig.broker.prepare_kafka(name, 1, batch)))


def check(rig: Rig, rounds: int = 1) -> None:
    """Each table has each record once."""
    for name in TOPICS:
        values = [(number, name.encode()) for number in range(rounds)]
        assert rows_of_table(rig.store, rig.clock, name) == values
        values = [(2 * number, b"k") for number in range(2 * rounds)]
        rows = rows_of_table(rig.store, rig.clock, name, 1)
        assert rows == sorted([*values, *((offset + 1, None) for offset, _ in values)])
        assert not rig.led_partitions.topic(name).waiting


@pytest.mark.parametrize("hot_bytes", [0, 1 << 20], ids=["from the log", "from memory"])
def test_the_process_writes_files_and_commits(
    store: MemoryStore, clock: ManualClock, hot_bytes: int
) -> None:
    """The broker puts nothing below the tables itself, and knows their new versions."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=hot_bytes))
    for name in TOPICS:
        rig.create(name, 2)
    ours = Puts()
    rig.publish_to(store.view(ours))
    workers = Workers(rig)
    for round_number in range(2):
        fill(rig)
        assert publish(rig) == [None] * 3
        check(rig, round_number + 1)
    assert ours.paths == []
    assert workers.all[0].asked == [WriteTogether, PutAll] * 2


def test_the_process_fills_typed_columns(rig: Rig) -> None:
    """It learns with each request which ones the table has."""
    workers = Workers(rig)
    table = rig.led_partitions.topic("t").table
    config = {"value.format": "json", "value.schema": "amount DOUBLE"}
    for values in (["{}"], ['{"amount": 1}', "x"]):
        rig.append(values, topic="t")
        assert publish(rig) == [None] * 3
        table.commit(lambda before: describe_change(before, before.partitions, config))
    (first, second) = table.snapshot.files[0]
    assert (first.columns, first.misfits) == (None, None)
    columns = table.snapshot.columns
    assert columns is not None
    assert columns.is_full(second.columns)
    assert second.misfits == 1
    data = rig.store.get(f"topics/t/{second.path}")
    assert pq.read_table(pa.BufferReader(data))["amount"].to_pylist() == [1.0, None]
    assert workers.all[0].asked == [WriteTogether, PutAll] * 2


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", [WriteTogether, PutAll])
def test_a_lost_process_loses_and_doubles_nothing(rig: Rig, kind: type, moment: str) -> None:
    """Whenever it is lost, the broker completes the commits, ends it, and starts another later."""
    workers = Workers(rig)
    fill(rig)
    workers.process.look(1)
    workers.all[0].lost_at[kind] = moment
    assert publish(rig) == [None] * 3
    check(rig)
    assert workers.all[0].has_ended
    fill(rig)
    assert publish(rig) == [None] * 3
    assert len(workers.all) == 1, "too early"
    assert isinstance(rig.clock, ManualClock)
    rig.clock.advance(1.1)
    fill(rig)
    assert publish(rig) == [None] * 3
    check(rig, 3)
    assert workers.all[1].asked == [WriteTogether, PutAll]
    assert workers.process.starts == 2


def test_a_process_that_is_always_lost_is_started_ever_more_rarely(rig: Rig) -> None:
    """The broker does without it."""
    workers = Workers(rig)
    assert isinstance(rig.clock, ManualClock)
    for _ in range(30):
        fill(rig)
        workers.process.look(1)
        for each in workers.all:
            each.lost_at[WriteTogether] = "before"
        assert publish(rig) == [None] * 3
        rig.clock.advance(30.0)
    check(rig, 30)
    assert 5 <= workers.process.starts <= 10


def test_a_lost_process_is_soon_replaced_where_losses_are_rare(rig: Rig) -> None:
    """Each next process waits a second, if the one before it has served for a while."""
    workers = Workers(rig)
    assert isinstance(rig.clock, ManualClock)
    for number in range(1, 6):
        workers.process.look(1)
        assert workers.process.starts == number
        fill(rig)
        assert publish(rig) == [None] * 3
        assert (workers.process.cpu_seconds, workers.process.resident_bytes) == (
            1.5 * number,
            1_000,
        )
        rig.clock.advance(61.0)
        workers.all[-1].lost_at[WriteTogether] = "before"
        fill(rig)
        assert publish(rig) == [None] * 3
        assert (workers.process.cpu_seconds, workers.process.resident_bytes) == (1.5 * number, 0)
        rig.clock.advance(1.1)


def test_the_requests_of_processes_are_counted(rig: Rig, clock: ManualClock) -> None:
    """Those of a process that is lost later too."""
    workers = Workers(rig, DelayedStore(rig.store, 0.0, clock))
    for number in range(1, 4):
        workers.process.look(1)
        fill(rig)
        assert publish(rig) == [None] * 3
        files, commits = 2 * len(TOPICS), len(TOPICS)
        assert workers.process.requests["put_new"] == number * (files + commits)
        workers.process._lose("killed")
        clock.advance(61.0)


@pytest.mark.parametrize(
    ("name", "most", "requests"),
    [
        ("sparklog.broker.log.publish_process.REQUEST_RUNS", 1, 3),
        ("sparklog.broker.log.publish_process.REQUEST_RUNS", 4, 2),
        ("sparklog.broker.log.publish_process.REQUEST_RUNS", 6, 1),
        ("sparklog.limits.PUBLISH_ENCODED_BYTES", 1, 3),
    ],
)
def test_a_request_is_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, most: int, requests: int
) -> None:
    """Topics of many partitions would take longer than an answer may; commits are put together."""
    monkeypatch.setattr(name, most)
    workers = Workers(rig)
    fill(rig)
    assert publish(rig) == [None] * 3
    check(rig)
    assert workers.all[0].asked == [WriteTogether] * requests + [PutAll]


@pytest.mark.parametrize("has_process", [False, True])
def test_offsets_without_rows_are_published_together(rig: Rig, *, has_process: bool) -> None:
    """A topic of which no partition has rows gets a commit without files, alongside the others."""
    if has_process:
        workers = Workers(rig)
        workers.process.look(1)
    rig.create("m", 2, mirror_source="another cluster")
    sections = [Section(topic="m", partition=number, rows=0, offsets=(0, 9)) for number in (0, 1)]
    batch = Manifest(query="q", batch=1, sections=tuple(sections))
    path = write_manifest(rig.store, batch, rig.clock).path
    rig.broker.staged.append(AppendStaged(manifest=path))
    fill(rig)
    topics = [rig.led_partitions.topic(name) for name in (*TOPICS, "m")]
    assert rig.publisher.publish_together(topics) == [None] * len(topics)
    check(rig)
    assert rig.led_partitions.topic("m").table.refresh().ends == (9, 9)
    assert not rig.led_partitions.topic("m").waiting


def test_a_process_is_started_once_many_files_wait(rig: Rig, clock: ManualClock) -> None:
    """A broker with few busy topics has none, unless one has many partitions."""
    started: list[FakeWorker] = []

    def start() -> FakeWorker:
        started.append(FakeWorker(rig.store, clock))
        return started[-1]

    process = rig.publisher.process = PublishProcess(
        rig.hot, start, clock=clock, objects=5, after_seconds=0.0
    )
    rig.append(["a"])
    rig.append(["a"], topic="u")
    assert publish(rig) == [None] * 3
    assert not started
    rig.create("wide", 4)
    for number in range(4):
        rig.append(["a"], topic="wide", partition=number)
    assert rig.publisher.publish_together([rig.led_partitions.topic("wide")]) == [None]
    assert started[0].asked == [WriteTogether, PutAll]
    rig.append(["b"])
    assert publish(rig) == [None] * 3
    assert started[0].asked == [WriteTogether, PutAll] * 2
    process.close()
    assert started[0].has_ended


@pytest.mark.parametrize("kind", [WriteTogether, PutAll])
def test_a_broker_that_fails_starts_no_process_after_it_has_closed_it(rig: Rig, kind: type) -> None:
    """Another thread may publish meanwhile; it completes what it does by itself."""
    workers = Workers(rig)
    fill(rig)
    workers.process.look(1)
    (worker,) = workers.all
    ask = worker.ask

    def closed_meanwhile(request: WriteTogether | PutAll) -> Answer:
        if isinstance(request, kind):
            workers.process.close()
            raise WorkerLost("Bad file descriptor")
        return ask(request)

    worker.ask = closed_meanwhile  # type: ignore[method-assign]
    with capture_logs() as logged:
        assert publish(rig) == [None] * 3
    check(rig)
    assert worker.has_ended
    assert logged == []
    fill(rig)
    assert publish(rig) == [None] * 3
    assert workers.all == [worker]


@pytest.mark.parametrize("has_process", [False, True])
def test_the_interval_stretches_less_with_a_process(
    rig: Rig, clock: ManualClock, has_process: bool
) -> None:
    """Publishing then takes less from the producers."""
    loop = publishing(rig)
    if has_process:
        Workers(rig).process.look(1)
    for _ in range(50):
        loop._pace.note(900, 900 * 0.2 / 3)
    fill(rig)
    assert rig.led_partitions.backlog.waiting_objects == 9
    clock.advance(2.0)
    loop.tick()
    assert bool(rig.led_partitions.backlog.waiting()) is not has_process
    clock.advance(1.5)
    loop.tick()
    check(rig)


def test_a_disk_that_fails_in_the_process_ends_the_broker(rig: Rig, store: MemoryStore) -> None:
    """The system reports a failed flush once, to the process that asked for it."""
    Workers(rig, store.view(Puts(SyncFailed("topics/t", "EIO"))))
    fill(rig)
    with pytest.raises(SyncFailed):
        publish(rig)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            errors.StorageFull(root="/r", free_bytes=0, reserve_bytes=0),
            errors.StorageFull,
        ),
        (PutUnresolved("?", "no answer"), PutUnresolved),
        (MemoryError("malloc"), PutUnresolved),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_in_the_process_is_one_topics(
    rig: Rig, store: MemoryStore, error: Exception, found: type[Exception]
) -> None:
    """The other topics are published; the broker finds out by itself where the cause is unclear."""
    Workers(rig, store.view(Puts(error)))
    fill(rig)
    outcomes = publish(rig)
    assert [type(each) for each in outcomes] == [found, type(None), type(None)]
    assert rows_of_table(store, rig.clock, "u") == [(0, b"u")]
    assert rows_of_table(store, rig.clock) == []
    assert [each for each in paths(store, "topics/t") if each.endswith(".parquet")] == []


@pytest.mark.parametrize("has_process", [False, True])
def test_files_that_cannot_be_removed_concern_one_topic(
    rig: Rig, store: MemoryStore, has_process: bool
) -> None:
    """If the files of a refused put stay, for whatever reason, the other topics are published."""

    class Stuck(Puts):
        def before(self, operation: Operation, path: str) -> None:
            super().before(operation, path)
            if operation == "delete":
                raise MemoryError("malloc")

    stuck = store.view(Stuck(errors.StorageFull(root="/r", free_bytes=0, reserve_bytes=0)))
    if has_process:
        Workers(rig, stuck)
    else:
        rig.publish_to(stuck)
    fill(rig)
    outcomes = publish(rig)
    assert [type(each) for each in outcomes] == [errors.StorageFull, type(None), type(None)]
    assert rows_of_table(store, rig.clock, "u") == [(0, b"u")]


def test_an_entry_that_cannot_be_read_is_named_by_the_broker(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The process leaves such a topic, and no files of it."""
    rig = Rig(store, clock, options=RigOptions(hot_bytes=0))
    for name in TOPICS:
        rig.create(name, 2)
    Workers(rig)
    fill(rig)
    topic = rig.led_partitions.topic("u")
    located = topic.partitions[0].unpublished[0]
    flip(store, f"wal/1/{located.at.epoch:010d}/{located.at.sequence:020d}", located.origin)
    outcomes = publish(rig)
    assert [type(each) for each in outcomes] == [type(None), PutUnresolved, type(None)]
    assert [each for each in paths(store, "topics/u") if each.endswith(".parquet")] == []
    with pytest.raises(errors.CorruptObject):
        rig.publisher.publish(topic)


def test_a_process_is_started_for_lasting_work_only(rig: Rig, clock: ManualClock) -> None:
    """A broker that has got many partitions has more to write for a moment, and no time to lose."""
    started: list[FakeWorker] = []

    def start() -> FakeWorker:
        started.append(FakeWorker(rig.store, clock))
        return started[-1]

    process = PublishProcess(
        rig.hot, start, clock=clock, objects=5, after_seconds=4.0, interval_seconds=0.5
    )
    for seconds, waiting in ((0.0, 5), (3.0, 5), (3.0, 4), (3.0, 5), (2.0, 9), (1.5, 4)):
        clock.advance(seconds)
        process.look(waiting)
    assert not started
    clock.advance(1.0)
    process.look(5)
    assert len(started) == 1


def test_a_process_is_started_sooner_if_much_waits(rig: Rig, clock: ManualClock) -> None:
    """Its start is worth its price sooner; meanwhile the publish interval stretches no further."""
    start = mock.Mock(return_value=FakeWorker(rig.store, clock))
    process = PublishProcess(rig.hot, start, clock=clock, objects=5, after_seconds=4.0)
    rig.publisher.process = process
    process.look(20)
    clock.advance(0.9)
    process.look(20)
    assert not start.called
    assert not rig.publisher.has_process
    clock.advance(0.1)
    process.look(20)
    assert start.called
    assert rig.publisher.has_process


def test_a_broker_of_very_many_partitions_has_a_process_before_they_are_busy(
    rig: Rig, clock: ManualClock
) -> None:
    """Three brokers that started theirs under load published by themselves for some seconds."""
    start = mock.Mock(return_value=FakeWorker(rig.store, clock))
    process = PublishProcess(rig.hot, start, clock=clock, partitions=20, after_seconds=4.0)
    rig.publisher.process = process
    loop = publishing(rig)
    rig.create("wide", 13)
    assert rig.led_partitions.partition_count == 6 + 13
    for _ in range(9):
        loop.tick()
        clock.advance(1.0)
    assert not start.called
    rig.create("another", 1)
    for _ in range(4):
        loop.tick()
        clock.advance(0.999)
    assert not start.called
    clock.advance(0.1)
    loop.tick()
    loop.tick()
    assert start.call_count == 1


def test_a_process_is_started_however_rarely_topics_are_published(
    rig: Rig, clock: ManualClock
) -> None:
    """Between two publications there is no look; with a long interval, the pause is long."""
    start = mock.Mock(return_value=FakeWorker(rig.store, clock))
    process = PublishProcess(rig.hot, start, clock=clock, objects=5, interval_seconds=10.0)
    process.look(5)
    clock.advance(0.3)
    process.look(5)
    assert not start.called
    clock.advance(4 * 10.0)
    process.look(5)
    assert start.called


def test_answers_have_the_statistics_of_files() -> None:
    """Only the process knows them, and the broker writes them to the log."""
    file = dataclasses.replace(table_file(ManualClock(), 0, 0, 1), statistics="{}")
    answer = decode_answer(encode(Answer(files=[[[file]]]))[_LENGTH_BYTES:])
    assert answer.files[0][0][0].statistics == "{}"


def test_the_process_waits_for_schemas(rig: Rig) -> None:
    """It writes no file for records that wait for one, and reads it in the root afterwards."""
    workers = Workers(rig)
    known = FakeRegistry()
    keeper = SchemaKeeper(
        SchemaRegistry(RegistrySettings(url="http://registry"), get=known.get),
        SchemaTexts(rig.store),
        rig.led_partitions,
        clock=rig.clock,
    )
    rig.publisher.schemas = keeper
    topic = rig.led_partitions.topic("t")
    config = {"value.format": "avro"}
    topic.table.commit(lambda before: describe_change(before, before.partitions, config))
    rig.led_partitions.set_config(topic, config)
    known.register("t-value", record("T", "amount:double"))
    rig.append([framed(1, double(1.5))], topic="t")
    assert publish(rig) == [None] * 3
    assert not any(topic.table.snapshot.files)
    keeper.work()
    assert publish(rig) == [None] * 3
    files = topic.table.snapshot.files[0]
    data = rig.store.get(f"topics/t/{files[0].path}")
    assert pq.read_table(pa.BufferReader(data))["amount"].to_pylist() == [1.5]
    assert workers.all[0].asked.count(WriteTogether) == 2
