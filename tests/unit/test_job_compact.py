"""`sparklog.jobs.compact`: what its tasks write is what a janitor writes, and one of them wins."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.formats import flight_messages
from sparklog.jobs import compact as jobs
from sparklog.jobs import rewriting
from sparklog.jobs.rewriting import DriverClock
from sparklog.storage.maintenance import file_compaction, key_compaction
from sparklog.storage.objects import MemoryStore, Store, open_store
from sparklog.storage.table.changes import create_change, delete_change
from sparklog.storage.table.names import data_path
from sparklog.storage.table.topic_table import TopicTable
from tests.support import tables
from tests.support.brokers import Rig, rows_of_table
from tests.support.tables import TOPIC_ID
from tests.unit.test_key_compaction import Crash, CrashAt

COMPACT = {"cleanup.policy": "compact"}
_names = itertools.count()


class Spark:
    """A session whose tasks run in this thread, one after the other."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.defaultParallelism = 2
        self.rounds: list[int] = []
        """The number of tasks of each round."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Is called after the tasks of each round."""

    def range(self, start: int, end: int, step: int, tasks: int) -> Spark:
        """One number for each task."""
        assert (start, end, step) == (0, tasks, 1)
        self.rounds.append(tasks)
        return self

    def mapInArrow(self, work: Any, schema: str) -> Spark:  # noqa: N802 - Spark's name
        """Takes the function of the tasks."""
        assert schema == "written BINARY"
        self._work = work
        return self

    def collect(self) -> list[dict[str, bytes]]:
        """Runs the tasks."""
        rows: list[dict[str, bytes]] = []
        for number in range(self.rounds[-1]):
            batch = pa.record_batch({"id": pa.array([number], pa.int64())})
            rows += [row for each in self._work([batch]) for row in each.to_pylist()]
        self.meanwhile()
        return rows


@pytest.fixture(name="spark")
def _spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    spark = Spark()
    monkeypatch.setattr(jobs, "spark_session", lambda *_, **__: spark)
    return spark


def make(partitions: int = 2, /, **config: str) -> TopicTable:
    """A topic in a root of its own; underscores in keys of `config` stand for dots."""
    named = {key.replace("_", "."): value for key, value in config.items()}
    store = open_store(f"memory://compact-{next(_names)}")
    table = TopicTable(store, "t", clock=SystemClock())
    table.commit(lambda _: create_change(TOPIC_ID, partitions, named))
    return table


def fill(table: TopicTable, files: int, rows: int = 10) -> None:
    """Adds this many files to each partition, in which seven keys repeat."""
    for number, partition in itertools.product(range(files), range(table.snapshot.partitions)):
        tables.publish_rows(table, partition, rows, seed=number)


def run(table: TopicTable, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the job on a view of its own, and returns its last line."""
    jobs._Compaction(view(table), {}).run()
    return capsys.readouterr().out.splitlines()[-1]


def view(table: TopicTable) -> TopicTable:
    """Returns the table as another process sees it."""
    found = TopicTable(table.store, table.topic, clock=table.clock)
    found.refresh()
    return found


def by_janitor(table: TopicTable) -> None:
    """Compacts the table as a broker does."""
    for each in key_compaction.choose(table, everything=True):
        key_compaction.compact(table, each)
    snapshot = table.refresh()
    groups = file_compaction.choose(
        snapshot, everything=True, borders=key_compaction.borders(table, snapshot)
    )
    file_compaction.compact(table, [each for each in groups if len(each.files) > 1])


def contents(table: TopicTable) -> list[tuple[Any, ...]]:
    """Each file of the table: its entry in the log, but for its name and time, and its rows."""
    return [
        (
            file.partition,
            *(file.size_bytes, file.rows, file.first, file.last),
            *(file.min_timestamp_us, file.max_timestamp_us),
            pq.read_table(table.store.get(data_path("t", file))).to_pylist(),
        )
        for files in table.refresh().files
        for file in files
    ]


def offsets(table: TopicTable, partition: int = 0) -> list[int]:
    """The offsets of a partition, in the order of its files."""
    return [row["offset"] for each in contents(table) if each[0] == partition for row in each[-1]]


def data_files(table: TopicTable) -> set[str]:
    """Data files in the store, in the table or not."""
    return {stat.name for stat in table.store.walk("topics/t") if stat.name.endswith(".parquet")}


def progress(table: TopicTable) -> list[int]:
    """The end of the last pass of each partition."""
    return list(key_compaction.borders(table, table.refresh()))


# ------------------------------------------------------------------------------ the result


@pytest.mark.parametrize("config", [{}, {"cleanup_policy": "compact", "delete_retention_ms": "0"}])
def test_the_result_is_the_janitors(
    config: dict[str, str], spark: Spark, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, files, statistics and progress, tombstones included; a further run does nothing."""
    job, janitor = make(**config), make(**config)
    for table in (job, janitor):
        fill(table, 5)
        tables.publish_rows(table, 1, 5, nulls=("value",))
    for _ in range(2):  # the second pass removes tombstones
        run(job, capsys)
        by_janitor(janitor)
        assert contents(job) == contents(janitor)
        assert progress(job) == progress(janitor)
        assert job.snapshot.ends == janitor.snapshot.ends
    assert [len(files) for files in job.snapshot.files] == [1, 1]
    assert len(offsets(job, 1)) == (
        3 if config else 55
    )  # five of seven keys are deleted, the last one visibly
    version, rounds = job.snapshot.version, len(spark.rounds)
    assert run(job, capsys) == "t: nothing to compact"
    assert (job.refresh().version, len(spark.rounds)) == (version, rounds)


def test_what_was_done_is_said(spark: Spark, capsys: pytest.CaptureFixture[str]) -> None:
    """Records that were written again, files, and records that were superseded."""
    table = make(1, cleanup_policy="compact")
    fill(table, 3)
    said = run(table, capsys)
    assert said.startswith("t: 30 records in ")
    assert said.endswith(", 1 file in place of 3, 23 superseded records removed")


def test_a_dry_run_changes_nothing(spark: Spark, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs no Spark, and shows the files of each kind of work."""
    table = make(cleanup_policy="compact,delete", retention_ms="1")
    fill(table, 3)
    version = table.snapshot.version
    jobs._Compaction(view(table), {}).show()
    shown = capsys.readouterr()
    assert shown.out == "t: nothing was written\n"
    assert [line.split()[:2] for line in shown.err.splitlines()] == [
        ["retention:", "6"],
        ["keys:", "6"],
        ["merges:", "6"],
    ]
    assert "60 records" in shown.err
    assert (table.refresh().version, spark.rounds) == (version, [])


def test_old_records_go_first(spark: Spark, capsys: pytest.CaptureFixture[str]) -> None:
    """By the topic's retention, as whole files, and the log start moves; nothing else is needed."""
    table = make(1, retention_ms="1")
    fill(table, 3)
    assert run(table, capsys).endswith(", 3 files removed by retention")
    assert (table.refresh().starts, table.snapshot.files) == ((30,), ((),))
    assert not spark.rounds


@pytest.mark.parametrize(
    ("bound", "value", "rounds"), [("_ROUND_TASKS", 1, [2, 1]), ("_ROUND_FILES", 3, [1, 1, 1])]
)
def test_work_is_done_in_rounds(
    spark: Spark,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bound: str,
    value: int,
    rounds: list[int],
) -> None:
    """Each is one commit, so that a run that is stopped has lost one round."""
    monkeypatch.setattr("sparklog.storage.maintenance.file_compaction.COMPACT_GROUPS_TOGETHER", 1)
    monkeypatch.setattr(jobs, bound, value)
    table = make(3)
    fill(table, 2)
    version = table.snapshot.version
    run(table, capsys)
    assert spark.rounds == rounds
    assert table.refresh().version == version + len(rounds)


# ------------------------------------------------------------------------------ alongside a broker


def test_a_broker_that_was_faster_wins(spark: Spark, capsys: pytest.CaptureFixture[str]) -> None:
    """The job gives up what it has written of these files, and commits the others."""
    table = make()
    fill(table, 4)
    before = [offsets(table, number) for number in range(2)]

    def merge_and_publish() -> None:
        group = file_compaction.choose(table.refresh(), everything=True)[0]
        file_compaction.compact(table, [group])
        fill(table, 1)

    spark.meanwhile = merge_and_publish
    said = run(table, capsys)
    assert said.startswith("t: 40 records in ")
    assert said.endswith("; left for another run: 1 group of files")
    assert [len(files) for files in table.refresh().files] == [2, 2]
    assert [offsets(table, number)[:40] for number in range(2)] == before
    named = {file.path for files in table.snapshot.files for file in files}
    assert len(data_files(table)) == len(named) + 4 + 4  # the replaced ones wait for the sweeper


def test_a_job_that_was_faster_wins(spark: Spark, capsys: pytest.CaptureFixture[str]) -> None:
    """A broker that has not seen the job's commit gives up, and publishes after it."""
    table = make()
    fill(table, 4)
    before = [offsets(table, number) for number in range(2)]
    groups = file_compaction.choose(table.snapshot, everything=True)
    merges = file_compaction.merge(table.store, "t", groups, clock=table.clock)
    run(table, capsys)
    files = data_files(table)
    assert file_compaction.commit(table, merges) == []
    assert data_files(table) == files - {f"{each.files[0].path}" for each in merges}
    fill(table, 1)
    assert [offsets(table, number)[:40] for number in range(2)] == before
    assert [len(each) for each in table.snapshot.files] == [2, 2]


def test_a_pass_is_tried_again_without_young_files(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker merges new files again and again, and then each pass over them would be lost."""
    monkeypatch.setattr(jobs, "_YOUNG", 0)  # younger than the first attempt
    table = make(1, cleanup_policy="compact")
    fill(table, 4)

    def publish_and_merge() -> None:
        fill(table, 1)
        if len(spark.rounds) <= 2:
            file_compaction.compact(table, [newest(table)])

    spark.meanwhile = publish_and_merge
    said = run(table, capsys)
    assert "left" not in said
    assert progress(table) == [30]
    assert offsets(table) == list(range(23, table.snapshot.ends[0]))


def newest(table: TopicTable) -> file_compaction.FileGroup:
    """The last two files of the only partition, as a broker would merge them."""
    (group,) = file_compaction.choose(table.snapshot, everything=True, borders=[30])[-1:]
    return file_compaction.FileGroup(
        topic_id=TOPIC_ID, partition=0, files=group.files[-2:], end=group.end, is_last=False
    )


def test_a_pass_that_others_prevent_is_named(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After some attempts; nothing is lost, and nothing of them is left behind."""
    monkeypatch.setattr(jobs, "_YOUNG", -1_000_000)  # no file is too young
    table = make(1, cleanup_policy="compact")
    fill(table, 4)

    def replace() -> None:
        """Replaces the first file by one with the same rows."""
        group = file_compaction.FileGroup(
            topic_id=TOPIC_ID,
            partition=0,
            files=table.refresh().files[0][:1],
            end=40,
            is_last=False,
        )
        assert file_compaction.compact(table, [group])

    spark.meanwhile = replace
    said = run(table, capsys)
    assert said.endswith("; left for another run: partition 0, 1 group of files")
    assert spark.rounds == [1, 1, 1, 1]
    assert offsets(table) == list(range(40))
    assert progress(table) == [0]
    assert len(data_files(table)) == 4 + 4  # those of the table, and those that were replaced


def test_a_pass_that_is_not_tried_again_is_named(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has only young files when the job looks at it again, and the other partition has not."""
    table = make(cleanup_policy="compact")
    fill(table, 2)
    real = key_compaction.choose

    def choose(*arguments: Any, before_us: int | None = None, **options: Any) -> Any:
        passes = real(*arguments, **options)
        return passes if before_us is None else [each for each in passes if not each.partition]

    def replace() -> None:
        """Replaces the first file of each partition, before the first pass is committed."""
        spark.meanwhile = lambda: None
        for number, files in enumerate(table.refresh().files):
            group = file_compaction.FileGroup(
                topic_id=TOPIC_ID, partition=number, files=files[:1], end=20, is_last=False
            )
            assert file_compaction.compact(table, [group])

    monkeypatch.setattr(key_compaction, "choose", choose)
    spark.meanwhile = replace
    assert run(table, capsys).endswith("; left for another run: partition 1")
    assert progress(table) == [20, 0]


def test_a_pass_that_is_given_up_leaves_no_files(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks have written all steps of a pass before the driver commits the first."""
    monkeypatch.setattr("sparklog.storage.maintenance.key_compaction.COMPACT_STEP_BYTES", 1)
    choose = functools.partial(key_compaction.choose, target_bytes=1)
    monkeypatch.setattr(key_compaction, "choose", choose)
    table = make(1, cleanup_policy="compact")
    for rows in (7, 3, 1):  # a key for each row
        tables.publish_rows(table, 0, rows)
    steps: list[int] = []

    def make_again() -> None:
        steps.append(len(data_files(table)) - 3)
        table.commit(delete_change)
        table.commit(lambda _: create_change("another", 1, COMPACT))

    spark.meanwhile = make_again
    run(table, capsys)
    assert steps == [2]
    assert len(data_files(table)) == 3


def test_a_pass_that_waited_too_long_for_another_is_made_again(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results of a round come together, and a sweeper may take old files for orphans."""
    monkeypatch.setattr(jobs, "_YOUNG", -1_000_000)  # no file is too young
    late_us = round(limits.ORPHAN_GRACE_SECONDS / 2 * 1e6) + 1
    write = rewriting._steps

    def write_early(store: Store, topic: str, each: Any, clock: DriverClock) -> Any:
        is_early = each.partition == 0 and len(spark.rounds) == 1
        return write(store, topic, each, DriverClock(clock.now_us() - late_us * is_early))

    monkeypatch.setattr(rewriting, "_steps", write_early)
    table = make(cleanup_policy="compact")
    fill(table, 2)
    said = run(table, capsys)
    assert "left" not in said
    assert spark.rounds == [2, 1]
    assert progress(table) == [20, 20]
    assert len(data_files(table)) == 4 + 2  # those of the table, and those that were replaced


def test_a_topic_that_is_deleted_meanwhile(
    spark: Spark, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is added to its table, nor to that of a new topic of its name."""
    table = make()
    fill(table, 3)

    def create_again() -> None:
        table.commit(delete_change)
        table.commit(lambda _: create_change("another", 2, {}))

    spark.meanwhile = create_again
    before = data_files(table)
    run(table, capsys)
    assert table.refresh().files == ((), ())
    assert data_files(table) == before


def test_a_broker_goes_on(
    spark: Spark, rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It publishes on top of the job's commits, has the log start with that, and reads all."""
    monkeypatch.setattr(rewriting, "open_store", lambda *_: rig.store)
    topic = rig.create("r", retention_bytes="1")
    values = [b"%d" % number for number in range(5)]
    for value in values[:4]:
        rig.append([value], topic="r")
        rig.publish()
    table = TopicTable(rig.store, "r", clock=rig.clock)
    table.refresh()
    assert run(table, capsys).endswith(", 3 files removed by retention")
    assert rig.read("r") == list(enumerate(values[:4]))  # as it was when it last looked
    rig.append(values[4:], topic="r")
    rig.publish()
    assert topic.partition(0).start == 3
    rig.broker.topics.alter(flight_messages.AlterTopic(topic="r", config={"retention.bytes": "-1"}))
    assert "1 file in place of 2" in run(table, capsys)
    rig.append([b"5"], topic="r")
    rig.publish()
    assert rig.read("r", start=3) == [(3, b"3"), (4, b"4"), (5, b"5")]
    assert rows_of_table(rig.store, rig.clock, "r") == [(3, b"3"), (4, b"4"), (5, b"5")]


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_a_damaged_file_is_named_at_the_end(
    policy: str, spark: Spark, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other files are compacted before."""
    table = make(cleanup_policy=policy)
    fill(table, 3)
    damaged = table.snapshot.files[0][1]
    path = data_path("t", damaged)
    data = bytearray(table.store.get(path).to_pybytes())
    data[len(data) // 3] ^= 1
    table.store.put(path, bytes(data))
    with pytest.raises(errors.CorruptObject, match=path):
        run(table, capsys)
    assert [len(files) for files in table.refresh().files] == [3, 1]
    assert "left" not in capsys.readouterr().out


def test_a_lost_file_is_named_at_the_end(spark: Spark, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an error, unless the table does not name it any more."""
    table = make()
    fill(table, 3)
    path = data_path("t", table.snapshot.files[0][1])
    table.store.delete([path])
    with pytest.raises(errors.MissingObject, match=path):
        run(table, capsys)
    assert [len(files) for files in table.refresh().files] == [3, 1]


@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_a_crash_anywhere(
    policy: str, spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a power cut at any point no record is lost or doubled, and a further run ends it."""
    clock = tables.manual_clock()
    scene = MemoryStore(clock)
    table = TopicTable(scene, "t", clock=clock)
    table.commit(lambda _: create_change(TOPIC_ID, 1, {"cleanup.policy": policy}))
    fill(table, 3, rows=8)
    least = [*range(17, 24)] if policy == "compact" else [*range(24)]
    for number in range(1_000):
        store = MemoryStore(clock)
        store._objects = {path: copy.copy(each) for path, each in scene._objects.items()}
        faults = CrashAt(number)
        faulty = store.view(faults)
        monkeypatch.setattr(rewriting, "open_store", lambda *_, faulty=faulty: faulty)
        with contextlib.suppress(Crash):
            run(TopicTable(faulty, "t", clock=clock), capsys)
        store.lose_unsynced(lambda _: True)
        after = TopicTable(store, "t", clock=clock)
        found = offsets(after)
        assert found == sorted({*found})
        assert {*least} <= {*found} <= {*range(24)}
        monkeypatch.setattr(rewriting, "open_store", lambda *_, store=store: store)
        run(after, capsys)
        assert offsets(after) == least
        assert len(after.snapshot.files[0]) == 1
        if not faults.is_over:
            break
    assert number > 20


def test_a_long_pass_is_continued_by_another_run(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task ends while its first files are young enough to be committed."""
    monkeypatch.setattr("sparklog.storage.maintenance.key_compaction.COMPACT_STEP_BYTES", 1)
    monkeypatch.setattr(rewriting, "_STEPS_SECONDS", -1.0)
    choose = functools.partial(key_compaction.choose, target_bytes=1)
    monkeypatch.setattr(key_compaction, "choose", choose)
    table = make(1, cleanup_policy="compact")
    for rows in (7, 3, 1):  # a key for each row
        tables.publish_rows(table, 0, rows)
    said = run(table, capsys)
    assert "3 superseded records removed; left for another run: the rest of partition 0" in said
    assert progress(table) == [0]
    said = run(table, capsys)
    assert said.endswith("1 superseded record removed")
    assert progress(table) == [11]
    assert offsets(table) == [3, 4, 5, 6, 8, 9, 10]


def test_files_that_were_written_too_long_ago_are_not_added(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweeper may take them for orphans."""
    table = make()
    fill(table, 2)
    before, files = contents(table), data_files(table)
    late_us = round(limits.ORPHAN_GRACE_SECONDS / 2 * 1e6) + 1
    monkeypatch.setattr(
        rewriting, "DriverClock", lambda driver_us: DriverClock(driver_us - late_us)
    )
    with pytest.raises(errors.TimedOut):
        run(table, capsys)
    assert (contents(table), data_files(table)) == (before, files)


def test_executors_date_files_by_the_drivers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own may be wrong by any time; it moves on, because the driver judges ages."""
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    seconds = iter([10.0, 12.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    assert DriverClock(1_000_000).now_us() == 3_500_000
