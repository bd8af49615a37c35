"""The Spark sink without Spark: targets of rows, refusals, and batches that exist once."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    DayTimeIntervalType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

import sparklog
from sparklog import errors, limits
from sparklog.client.log import Log
from sparklog.clock import ManualClock, SystemClock
from sparklog.formats.partitioner import murmur2, to_positive
from sparklog.formats.record import HEADERS
from sparklog.sinks import commit as commits
from sparklog.sinks import datasink
from sparklog.sinks.columns import check_columns
from sparklog.sinks.datasink import StagedTask, WriteTarget
from sparklog.sinks.foreach import QUERY_ID
from sparklog.sinks.options import parse
from sparklog.sinks.rows import route
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import LocalStore
from sparklog.storage.staging import manifest, query_run
from sparklog.storage.staging.manifest import Section, StagingWriter
from sparklog.storage.staging.sweep import StagingSweep
from tests.support.brokers import Row, rows_of_root

TYPES: Mapping[str, pa.DataType] = {
    "key": pa.string(),
    "value": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", tz="Europe/Berlin"),
}


def frame(**columns: Sequence[Any]) -> pa.RecordBatch:
    """A batch as Spark hands it to a task."""
    schema = pa.schema([(name, TYPES[name]) for name in columns])
    return pa.record_batch(
        [pa.array(values, TYPES[name]) for name, values in columns.items()], schema=schema
    )


def schema_of(ddl: str) -> StructType:
    """Spark's schema, without a Spark session."""
    fields = [part.strip().rsplit(" ", 1) for part in ddl.split(";")]
    described = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields
    ]
    return StructType.fromJson({"type": "struct", "fields": described})


# ------------------------------------------------------------------------------ where rows go

ROWS = st.lists(
    st.tuples(
        st.none() | st.text(max_size=5),
        st.sampled_from(["a", "b"]),
        st.none() | st.integers(0, 2),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(rows=ROWS, number=st.integers(0, 10), given=st.sampled_from([None, "a"]))
def test_every_row_goes_to_one_partition(
    rows: list[tuple[str | None, str, int | None]], number: int, given: str | None
) -> None:
    """By its column, else by its key's murmur2, else by the batch; the order is kept."""
    counts = {"a": 3, "b": 4}
    values = [str(index) for index in range(len(rows))]
    keys, topics, asked = ([row[column] for row in rows] for column in range(3))
    batch = frame(key=keys, value=values, topic=topics, partition=asked)
    wanted: dict[tuple[str, int], list[bytes]] = {}
    for value, (key, column, partition) in zip(values, rows, strict=True):
        topic = given or column
        if partition is None:
            partition = number if key is None else to_positive(murmur2(key.encode()))
        place = topic, partition % counts[topic]
        wanted.setdefault(place, []).append(value.encode())
    found = {
        (topic, partition): payload["value"].to_pylist()
        for topic, partition, payload in route(batch, number, topic=given, counts=counts)
    }
    assert found == wanted


def test_a_payload_has_its_own_columns_and_types() -> None:
    """Strings become binary, timestamps UTC, and topic and partition stay behind."""
    batch = frame(timestamp=[7], value=["v"], topic=["t"], partition=[0])
    ((_, _, payload),) = route(batch, 0, topic=None, counts={"t": 1})
    assert payload.to_pydict()["value"] == [b"v"]
    assert payload.schema.names == ["timestamp", "value"]
    assert payload["timestamp"].type == pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"topic": ["t", None]}, errors.WrongSchema, "topic is null"),
        ({"topic": ["t", "tt"]}, errors.UnknownTopic, "'tt' .* Did you mean 't'"),
        ({"topic": ["t", "t"], "partition": [0, 2]}, errors.UnknownPartition, "no partition 2"),
        ({"topic": ["t", "t"], "partition": [-1, 0]}, errors.UnknownPartition, "no partition -1"),
        (
            {"topic": ["t", "t"], "partition": [None, -1]},
            errors.UnknownPartition,
            "no partition -1",
        ),
    ],
)
def test_a_row_that_has_no_place_is_refused(
    columns: dict[str, Any], error: type[errors.Invalid], message: str
) -> None:
    """A task ends at the first of them, and nothing of the batch is appended."""
    batch = frame(value=["x", "y"], **columns)
    with pytest.raises(error, match=message):
        list(route(batch, 0, topic=None, counts={"t": 2}))


def test_a_record_over_the_limit_is_refused() -> None:
    """Key, value and headers count together, as in the broker's limit."""
    half = "x" * (limits.MAX_RECORD_BYTES // 2)
    fits = frame(key=[half, None], value=[half, None])
    assert sum(part.num_rows for *_, part in route(fits, 0, topic="t", counts={"t": 1})) == 2
    headers = pa.array([[{"key": "x", "value": b""}], None], HEADERS)
    for over in (
        frame(key=[half], value=[half + "x"]),
        fits.append_column("headers", headers),
    ):
        with pytest.raises(errors.RecordTooLarge):
            list(route(over, 0, topic="t", counts={"t": 1}))


# ------------------------------------------------------------------------------ refusals


def identity(**given: str) -> tuple[str | None, int]:
    """Returns the identity of a batch write with these options."""
    options = parse({"root": "memory://x", **given}, streaming=False)
    return options.query, options.batch


def test_options_name_the_batch() -> None:
    """A name is one batch for each topic; without a name each write is a batch of its own."""
    assert identity(idempotencykey="2013-01", topic="t") == ("2013-01@t", 0)
    assert identity(idempotencykey="2013-01") == ("2013-01", 0)
    assert identity(txnappid="2013-01", txnversion="0") == ("2013-01", 0)
    assert identity(txnappid="copy", txnversion="17", topic="t") == ("copy@t", 17)
    assert identity()[0] is None


def test_no_topic_is_too_long_to_name_a_batch() -> None:
    """The longest names make a folder's name, and two topics two batches."""
    names = {identity(idempotencykey="k" * 200, topic="t" * length)[0] for length in (40, 248, 249)}
    assert len(names) == 3
    for name in names:
        assert manifest.folder(str(name), 0)


def test_options_of_a_moved_query_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Broker options of Spark's Kafka connector are accepted without effect."""
    given = {"root": "memory://x", "kafka.bootstrap.servers": "k:9092", "kafka.acks": "all"}
    (moved,) = parse({**given, "includeHeaders": "true"}, streaming=True).notes
    assert "kafka.acks, kafka.bootstrap.servers (set root" in moved
    assert "includeHeaders" not in moved
    assert parse({"root": "memory://x", "includeHeaders": "true"}, streaming=True).notes == ()


def test_a_sink_tells_of_secrets_that_spark_prints() -> None:
    """Under their other name there is no warning; its options show neither."""
    for name, count in (("storage.sas_key", 1), ("storage.secret.sas_key", 0)):
        options = parse({"root": "memory://x", name: "hush"}, streaming=True)
        assert options.storage == {"sas_key": "hush"}
        assert len(options.notes) == count
        assert "hush" not in f"{options!r}{options.notes}"


@pytest.mark.parametrize(
    ("given", "streaming", "message"),
    [
        ({"topik": "t"}, False, "Did you mean 'topic'"),
        ({"idempotencyKey": "a/b"}, False, "use 1–200 characters"),
        ({"idempotencyKey": ".a"}, False, "use 1–200 characters"),
        ({"idempotencyKey": "a"}, True, "checkpoint identifies"),
        ({"txnAppId": "a", "txnVersion": "1"}, True, "checkpoint identifies"),
        ({"txnAppId": "a"}, False, "txnVersion = None: set both"),
        ({"txnVersion": "1"}, False, "txnAppId = None: set both"),
        ({"txnAppId": "a/b", "txnVersion": "1"}, False, "txnAppId = 'a/b': use 1–200 characters"),
        ({"txnAppId": "a", "txnVersion": "-1"}, False, "from 0 to"),
        ({"txnAppId": "a", "txnVersion": "1.5"}, False, "expected a whole number"),
        (
            {"txnAppId": "a", "txnVersion": "1", "idempotencyKey": "a"},
            False,
            "idempotencyKey = 'a': txnAppId and txnVersion already identify",
        ),
        ({"valueFormat": "avro"}, False, "expected binary or json"),
        ({"checkpointLocation": "/x"}, False, "no option 'checkpointLocation'"),
        ({"topic": "a/b"}, True, "a/b"),
    ],
)
def test_a_wrong_option_is_refused(given: dict[str, str], streaming: bool, message: str) -> None:
    """The refusal names the option and what would be right."""
    with pytest.raises(errors.Invalid, match=message):
        parse({"root": "memory://x", **given}, streaming=streaming)


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Iterator[Log]:
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t", partitions=2)
        yield log


JSON = {"valueFormat": "json"}


@pytest.mark.parametrize(
    ("ddl", "options", "message"),
    [
        ("key binary", {}, "needs a column 'value'"),
        ("value integer", {}, "column 'value' is int, not binary or string"),
        ("value string; partition long", {}, "column 'partition' is bigint, not int"),
        ("value string; timestamp timestamp_ntz", {}, "'timestamp' is timestamp_ntz"),
        ("value string; topic binary", {}, "'topic' is binary, not string"),
        ("value string; offset string", {}, "column 'offset' is string, not bigint"),
        ("value string; key string; value string", {}, "column 'value' occurs 2 times"),
        ("value string", {"topic": ""}, "topic name"),
        ("value string", {"topic": "u"}, r"Topic 'u' does not exist.*name\.$"),
        ("value string", {"topic": "T1"}, r"Did you mean 't'\?$"),
        ("key string; timestamp timestamp", JSON, "needs a column besides key, topic"),
        ("key integer; n integer", JSON, "column 'key' is int, not binary or string"),
    ],
)
def test_a_frame_is_judged_before_a_task_starts(
    log: Log, tmp_path: Path, ddl: str, options: dict[str, str], message: str
) -> None:
    """Wrong columns, types and topics are refused on the driver, by name."""
    given = {"root": str(tmp_path), "topic": "t"} | options
    with pytest.raises(errors.Invalid, match=message):
        datasink.batch_writer(given, schema_of(ddl), overwrite=False)


def test_what_json_cannot_hold_is_found_within() -> None:
    """The path to it is named, through structs, arrays and maps."""
    gap = DayTimeIntervalType()
    within = StructType([StructField("gaps", ArrayType(gap))])
    for kind, message in (
        (within, r"column 'x.gaps\[\]' is interval"),
        (MapType(StringType(), gap), r"column 'x\[\]' is interval"),
        (
            MapType(IntegerType(), StringType()),
            "column 'x' is map<int,string>; JSON keys can only be strings",
        ),
    ):
        with pytest.raises(errors.WrongSchema, match=message):
            check_columns(StructType([StructField("x", kind)]), as_json=True, needs_topic=False)


def test_a_row_s_topic_comes_from_option_or_column(log: Log, tmp_path: Path) -> None:
    """One of the two must be there; a column without a single topic is none."""

    def writer(ddl: str, **options: str) -> None:
        given = {"root": str(tmp_path), **options}
        datasink.batch_writer(given, schema_of(ddl), overwrite=False)

    with pytest.raises(errors.WrongSchema, match="set option 'topic'"):
        writer("value string")
    with pytest.raises(errors.WrongSchema, match="'topic' is null in every row: set option"):
        writer("value string; topic void")
    writer("value string; topic string")
    writer("value string; topic void", topic="t")


def test_rows_of_the_source_are_taken(log: Log, tmp_path: Path) -> None:
    """A query may copy a topic with all its columns; offset and timestamp type are not written."""
    everything = schema_of(
        "key binary; value binary; topic string; partition integer; offset long;"
        " timestamp timestamp; timestampType integer"
    )
    given = {"root": str(tmp_path), "topic": "t"}
    datasink.batch_writer(given, everything, overwrite=False)
    rows = frame(value=["v"]).append_column("offset", pa.array([7]))
    rows = rows.append_column("timestampType", pa.array([0], pa.int32()))
    ((_, _, payload),) = route(rows, 0, topic="t", counts={"t": 1})
    assert payload.schema.names == ["value"]


def test_a_moved_query_is_told_once(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many micro-batches ask for a writer."""
    caplog.set_level(logging.WARNING, "sparklog.sinks")
    given = {"root": str(tmp_path), "topic": "t", "kafka.linger.ms": "5"}
    for _ in range(3):
        datasink.stream_writer(given, schema_of("value string"))
    assert [record.name for record in caplog.records] == ["sparklog.sinks"]
    assert "no effect here: kafka.linger.ms" in caplog.text


def test_the_process_that_commits_tells_nothing(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark creates a stream's writer there too, after the user was warned."""
    runner = "pyspark.sql.worker.python_streaming_sink_runner"
    assert importlib.util.find_spec(runner) is not None
    monkeypatch.setitem(sys.modules, runner, ModuleType(runner))
    given = {"root": str(tmp_path), "topic": "t", "kafka.batch.size": "5"}
    datasink.stream_writer(given, schema_of("value string"))
    assert caplog.records == []


def test_a_log_is_not_overwritten(log: Log, tmp_path: Path) -> None:
    """Mode overwrite is refused."""
    given = {"root": str(tmp_path), "topic": "t"}
    with pytest.raises(errors.BadOption, match="only appended to"):
        datasink.batch_writer(given, schema_of("value string"), overwrite=True)


def test_other_columns_are_left_out_with_a_warning(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by Spark's Kafka sink, which says nothing; a misspelt name shows in the warning."""
    caplog.set_level(logging.WARNING, "sparklog.sinks")
    given = {"root": str(tmp_path), "topic": "t"}
    datasink.batch_writer(given, schema_of("value string; keys string; n integer"), overwrite=False)
    (record,) = caplog.records
    assert record.message.startswith("columns of the data frame are not written: keys, n;")
    rows = frame(value=["v"]).append_column("keys", pa.array(["k"]))
    ((_, _, payload),) = route(rows, 0, topic="t", counts={"t": 1})
    assert payload.schema.names == ["value"]


EARLIER = """
import sys
import pyspark.sql.datasource as known
del known.DataSourceStreamArrowWriter  # since 4.1
from pyspark.sql.types import StructType
from sparklog import errors
from sparklog.sinks import datasink
options = {"root": sys.argv[1], "topic": "t"}
schema = StructType().add("value", "string")
print(type(datasink.batch_writer(options, schema, overwrite=False)).__name__)
try:
    datasink.stream_writer(options, schema)
except errors.BadRequest as error:
    print(error)
"""


def test_an_earlier_spark_writes_batches(log: Log, tmp_path: Path) -> None:
    """Spark 4.0 has no Arrow for a stream's sink; the error names foreachBatch, which works."""
    command = [sys.executable, "-c", EARLIER, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert said[0] == "BatchWriter"
    assert "only since pyspark 4.1; use foreachBatch" in said[1]


# ------------------------------------------------------------------------------ once


def target(store: LocalStore, topic: str) -> WriteTarget:
    """A topic of the root as it is now."""
    topics = MetadataStore(store, clock=SystemClock()).reload().topics
    found = manifest.destinations({topic: topics[topic]})
    return WriteTarget(root=store.uri, storage={}, topic=topic, topics=found)


class Sink:
    """One batch of a query, staged and committed as Spark would."""

    def __init__(self, root: Path, query: str = "query", batch: int = 0) -> None:
        self.store = LocalStore(root)
        self.target = target(self.store, "t")
        self.query = query
        self.batch = batch

    def stage(self, *values: str) -> StagedTask:
        """Returns the message of one staged task."""
        rows = iter([frame(value=list(values), key=list(values))])
        return datasink._stage(self.target, self.query, self.batch, rows)

    def commit(self, *staged: StagedTask) -> None:
        datasink.StreamWriter(self.target).commit(list(staged), self.batch)

    def files(self) -> set[str]:
        return {
            stat.name.rpartition("/")[2]
            for stat in self.store.walk(f"staging/{self.query}/{self.batch}")
        }


def values_of(log: Log) -> list[str]:
    """Every value of topic `t`, sorted."""
    return sorted(value.decode() for value in log.read("t")["value"].to_pylist())


def test_a_batch_is_all_of_its_tasks(log: Log, tmp_path: Path) -> None:
    """Rows that several tasks staged are appended together, and readable at once."""
    sink = Sink(tmp_path)
    sink.commit(sink.stage("a", "b"), sink.stage("c"))
    assert values_of(log) == ["a", "b", "c"]


def test_a_staged_batch_is_read_from_log_and_table_alike(log: Log, tmp_path: Path) -> None:
    """A reader without a broker finds the rows where they were staged, and later in the table."""
    sink = Sink(tmp_path)

    def read() -> list[list[Row]]:
        return [rows_of_root(sink.store, SystemClock(), "t", partition) for partition in (0, 1)]

    sink.commit(sink.stage("a", "b", "c", "d"))
    staged = read()
    assert {value for rows in staged for _, value in rows} == {b"a", b"b", b"c", b"d"}
    log.flush_to_table()
    assert read() == staged


def test_a_committed_batch_is_not_appended_again(log: Log, tmp_path: Path) -> None:
    """A rerun finds the manifest, and takes away what it staged for nothing."""
    sink = Sink(tmp_path)
    sink.commit(sink.stage("a"))
    before = sink.files()
    sink.commit(sink.stage("a"))
    assert values_of(log) == ["a"]
    assert sink.files() == before


def test_a_rerun_drives_the_manifest_that_stands(log: Log, tmp_path: Path) -> None:
    """A driver that died after its decision is finished by the next, whatever that one has."""
    for batch, rerun in enumerate(["other", None]):
        sink = Sink(tmp_path, batch=batch)
        decided = tuple(sink.stage(f"decided {batch}").sections)
        known = manifest.Manifest(query=sink.query, batch=batch, sections=decided)
        manifest.write(sink.store, known, SystemClock())
        sink.commit(
            StagedTask(query=sink.query, batch=batch, run="", encoded=b"\x90"),
            *([sink.stage(rerun)] if rerun else []),
        )
    assert values_of(log) == ["decided 0", "decided 1"]


@pytest.mark.parametrize("rows", [("x",), ("x", "y", "z")])
@pytest.mark.parametrize("fails", [True, False])
def test_a_batch_with_other_rows_is_no_rerun(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: tuple[str, ...], fails: bool
) -> None:
    """It is one of a query with a copy of the checkpoint, unless the user says that rows differ."""
    sink = Sink(tmp_path)
    sink.commit(sink.stage("a"), sink.stage("b"))
    copy = Sink(tmp_path)
    copy.target = dataclasses.replace(copy.target, fails_on_different_rerun=fails)
    said = f"already decided with 2 rows for t, and now has {len(rows)} rows for t"
    if fails:
        with pytest.raises(errors.BadRequest, match=said):
            copy.commit(copy.stage(*rows))
    else:
        copy.commit(copy.stage(*rows))
        assert said in caplog.text
    copy.commit(copy.stage("c", "d"))
    copy.commit(copy.stage())
    assert sorted(values_of(log)) == ["a", "b"]


def test_an_empty_batch_leaves_nothing(log: Log, tmp_path: Path) -> None:
    """A micro-batch without rows costs no manifest."""
    sink = Sink(tmp_path)
    sink.commit(sink.stage())
    assert not sink.files()


class FakeTask:
    """The micro-batch properties of a task's context."""

    def __init__(self, query: str, batch: int, run: str | None = None) -> None:
        self._properties = {QUERY_ID: query, "streaming.sql.batchId": str(batch)}
        if run is not None:
            self._properties["spark.jobGroup.id"] = run

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802
        return self._properties.get(name)


def test_a_copied_checkpoint_writes_to_its_own_topic(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query with another's checkpoint and another topic is not a rerun of the other's batches."""
    log.create_topic("u", partitions=2)
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: FakeTask("query", 3))
    for topic in ("t", "u", "u"):
        given = {"root": str(tmp_path), "topic": topic}
        writer = datasink.stream_writer(given, schema_of("value string"))
        staged = writer.write(iter([frame(value=[f"for {topic}"])]))
        writer.commit([staged], 3)
    assert log.read("t")["value"].to_pylist() == [b"for t"]
    assert log.read("u")["value"].to_pylist() == [b"for u"]


class Query:
    """A run of query `query`, whose micro-batches are one row of topic t."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        self._run = str(uuid.uuid4())

    def write(self, batch: int, value: str) -> None:
        task = FakeTask("query", batch, self._run)
        self._monkeypatch.setattr("pyspark.TaskContext.get", lambda: task)
        given = {"root": str(self._root), "topic": "t"}
        writer = datasink.stream_writer(given, schema_of("value string"))
        staged = writer.write(iter([frame(value=[value])]))
        self._monkeypatch.setattr("pyspark.TaskContext.get", lambda: None)
        writer.commit([staged], batch)


@pytest.mark.parametrize("is_swept", [False, True])
def test_of_two_queries_with_one_checkpoint_one_is_refused(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_swept: bool
) -> None:
    """Batches with equal numbers of rows look alike; their runs differ."""
    query, copy = Query(tmp_path, monkeypatch), Query(tmp_path, monkeypatch)
    query.write(0, "a")
    query.write(1, "b")
    if is_swept:
        log.flush_to_table()
        store = LocalStore(tmp_path)
        names = [f"staging/{stat.name}" for stat in store.walk("staging")]
        store.delete(name for name in names if not name.endswith(query_run.NAME))
    copy.write(1, "b")  # as a query does that is started again
    with pytest.raises(errors.BadRequest, match="was started again"):
        query.write(2, "c")
    copy.write(2, "c")
    assert values_of(log) == ["a", "b", "c"]
    again = Query(tmp_path, monkeypatch)
    again.write(2, "c")
    again.write(3, "d")
    for late in (query, copy):
        with pytest.raises(errors.BadRequest, match="stop one of them"):
            late.write(3, "e")
    assert values_of(log) == ["a", "b", "c", "d"]
    assert len(list(tmp_path.glob("staging/query@t/3/*.arrow"))) <= 1


def test_a_run_that_is_overtaken_while_it_writes_is_refused(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that another run decides meanwhile is not a repetition of ours."""
    query, copy = Query(tmp_path, monkeypatch), Query(tmp_path, monkeypatch)
    query.write(0, "a")
    begin = commits._begin
    monkeypatch.setattr(commits, "_begin", lambda *_given: None)
    copy.write(1, "b")  # it has not noted its run yet
    monkeypatch.setattr(commits, "_begin", begin)
    with pytest.raises(errors.BadRequest, match="was started again"):
        query.write(1, "x")
    assert values_of(log) == ["a", "b"]


@pytest.mark.parametrize("is_swept", [False, True])
def test_a_batch_that_stands_elsewhere_is_refused(log: Log, tmp_path: Path, is_swept: bool) -> None:
    """If the rows name their topics, a copied checkpoint ends the query and names the topics."""
    log.create_topic("u", partitions=2)
    sink = Sink(tmp_path)
    sink.commit(sink.stage("a"))
    if is_swept:
        log.flush_to_table()
        sink.store.delete([f"staging/query/0/{name}" for name in sink.files()])
    other = Sink(tmp_path)
    other.target = target(sink.store, "u")
    with pytest.raises(errors.BadRequest, match="previously written to t, and now goes to u"):
        other.commit(other.stage("b"))
    assert log.read("u").num_rows == 0
    assert values_of(log) == ["a"]


def test_a_given_up_batch_is_refused(log: Log, tmp_path: Path) -> None:
    """A batch that the sweeper refused is not appended, and the error says what to do."""
    sink = Sink(tmp_path)
    staged = sink.stage("a")
    manifest.refuse(sink.store, f"staging/{sink.query}/{sink.batch}", clock=SystemClock())
    with pytest.raises(errors.BadRequest, match="Start the query again"):
        sink.commit(staged)
    assert values_of(log) == []


def test_a_query_that_was_given_up_stages_its_batch_again(log: Log, tmp_path: Path) -> None:
    """A run after the refusal is written; the driver from before it is refused, and so is a mix."""
    sink = Sink(tmp_path)
    late = sink.stage("a")
    manifest.refuse(sink.store, f"staging/{sink.query}/{sink.batch}", clock=SystemClock())
    resumed = sink.stage("a")
    with pytest.raises(errors.BadRequest, match="while its tasks were staging"):
        sink.commit(late, resumed)
    sink.commit(resumed)
    sink.commit(late)  # it asks the broker, which has the batch
    sink.commit(sink.stage())
    assert values_of(log) == ["a"]


def test_a_refusal_of_a_rerun_hides_nothing(log: Log, tmp_path: Path) -> None:
    """An appended batch is skipped, although a rerun was given up and its manifest swept.

    An error that says to write it again as a new batch would double it.
    """
    sink = Sink(tmp_path)
    sink.commit(sink.stage("a"))
    log.flush_to_table()
    folder = f"staging/{sink.query}/{sink.batch}"
    sink.store.delete([f"{folder}/{name}" for name in sink.files()])
    rerun = sink.stage("a")
    manifest.refuse(sink.store, folder, clock=SystemClock())
    sink.commit(rerun)
    assert values_of(log) == ["a"]
    assert sink.files() == {manifest.NAME}


def test_a_skipped_batch_is_told(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that was used before is not a silent loss of rows."""
    caplog.set_level(logging.WARNING, "sparklog.sinks")
    sink = Sink(tmp_path, batch=3)
    sink.commit(sink.stage("a"))
    assert caplog.records == []
    sink.commit(sink.stage("b"))
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        ("sparklog.sinks", "batch 3 of query was appended before and is not written again")
    ]


def test_what_losing_attempts_staged_is_swept(log: Log, tmp_path: Path) -> None:
    """If two attempts of a task staged rows, the unnamed one is removed with the batch."""
    sink = Sink(tmp_path)
    winner, loser = sink.stage("a"), sink.stage("a")
    unfinished = sink.stage("b")  # of a task that was killed
    sink.commit(winner)
    staged = {each.sections[0].path for each in (winner, loser, unfinished)}
    assert sink.files() == {manifest.NAME} | {path.rpartition("/")[2] for path in staged}
    assert values_of(log) == ["a"]

    def sweep(*, is_published: bool) -> int:
        return StagingSweep(
            sink.store,
            topics=dict,
            is_published=lambda *_: is_published,
            abandoned_seconds=0.0,
            clock=SystemClock(),
        ).run()

    assert sweep(is_published=False) == 0
    log.flush_to_table()
    assert sweep(is_published=True) == 4
    assert sink.files() == set()
    assert values_of(log) == ["a"]


def test_other_engines_find_the_newest_batch_in_the_table(log: Log, tmp_path: Path) -> None:
    """As Delta's transaction version of the query, whatever this program remembers."""
    for batch in (3, 4):
        sink = Sink(tmp_path, batch=batch)
        sink.commit(sink.stage("a", "b"))
    log.flush_to_table()
    topic = log.describe("t")
    table = deltalake.DeltaTable(str(tmp_path / "topics/t"))
    assert table.transaction_version(f"sparklog/{topic.topic_id}/query/query") == 4


def test_swept_batches_leave_no_folders(log: Log, tmp_path: Path) -> None:
    """After publishing, no staging folder of a job or query remains under a local root."""
    for number in range(5):
        for sink in (Sink(tmp_path, query=f"job{number}"), Sink(tmp_path, batch=number)):
            sink.commit(sink.stage(f"{number}"))
    waiting = Sink(tmp_path, query="waiting").stage("a").sections[0].path
    (tmp_path / "staging/dead/7").mkdir(parents=True)
    log.flush_to_table()
    assert (
        StagingSweep(
            LocalStore(tmp_path),
            topics=dict,
            is_published=lambda *_: True,
            abandoned_seconds=3600.0,
            clock=SystemClock(),
        ).run()
        == 20
    )
    left = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "staging").rglob("*"))
    assert left == ["staging/waiting", "staging/waiting/0", waiting]


def test_the_run_of_a_query_is_forgotten_after_a_month(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended queries leave nothing; one that still writes notes its run again."""
    query, store = Query(tmp_path, monkeypatch), LocalStore(tmp_path)
    clock = ManualClock(SystemClock().now_us() + 1_000_000)
    query.write(0, "a")
    log.flush_to_table()
    sweep = StagingSweep(
        store, topics=dict, is_published=lambda *_: True, abandoned_seconds=0.0, clock=clock
    )
    assert sweep.run() == 2
    assert query_run.load(store, "query@t") is not None
    clock.advance(limits.BATCH_MEMORY_SECONDS)
    assert sweep.run() == 1
    assert not list((tmp_path / "staging").iterdir())
    query.write(1, "b")
    found = query_run.load(store, "query@t")
    assert found is not None
    assert (found.first_batch, found.replaced) == (1, ())


@pytest.mark.parametrize(
    "named", [{}, {"idempotencyKey": "k"}, {"txnAppId": "copy", "txnVersion": "0"}]
)
def test_writes_that_have_no_order_note_no_run(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    """Each micro-batch of a query may write under another name, and would leave a note."""
    task = FakeTask("query", 3, str(uuid.uuid4()))
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: task)
    given = {"root": str(tmp_path), "topic": "t", **named}
    writer = datasink.batch_writer(given, schema_of("value string"), overwrite=False)
    writer.commit([writer.write(iter([frame(value=["a"])]))])
    assert values_of(log) == ["a"]
    assert bool(list(tmp_path.glob("staging/*/run.json"))) is ("txnAppId" in named)


def test_a_named_write_is_its_version(log: Log, tmp_path: Path) -> None:
    """The tasks stage for the version that the options name."""
    given = {"root": str(tmp_path), "topic": "t", "txnAppId": "copy", "txnVersion": "17"}
    writer = datasink.batch_writer(given, schema_of("value string"), overwrite=False)
    staged = writer.write(iter([frame(value=["a"])]))
    assert isinstance(staged, StagedTask)
    assert (staged.query, staged.batch) == ("copy@t", 17)


def test_the_same_batch_of_two_queries_is_two_batches(log: Log, tmp_path: Path) -> None:
    """Query and number name a batch together."""
    for query in ("one", "two"):
        sink = Sink(tmp_path, query=query)
        sink.commit(sink.stage(query))
    assert values_of(log) == ["one", "two"]


def test_a_large_batch_of_many_sections_is_appended_once(log: Log, tmp_path: Path) -> None:
    """Several sections of one partition follow one another; all are skipped together."""
    sink = Sink(tmp_path)
    numbers = np.arange(300_000).astype(str)
    keys = pa.array(["k"] * len(numbers))
    rows = pa.record_batch([keys, pa.array(numbers)], names=["key", "value"])
    staged = datasink._stage(sink.target, "query", 0, iter([rows]))
    assert len(staged.sections) == 3
    sink.commit(staged)
    sink.commit(staged)
    table = log.read("t")
    assert table["value"].cast(pa.string()).to_pylist() == numbers.tolist()
    assert table["offset"].to_pylist() == list(range(len(numbers)))


@pytest.mark.parametrize("failed", [True, False])
def test_abort_removes_only_what_nobody_tried_to_commit(
    log: Log, tmp_path: Path, failed: bool
) -> None:
    """If every task has succeeded, a commit may have been tried, so its files stay."""
    sink = Sink(tmp_path)
    staged = sink.stage("a")
    datasink._abort(sink.target, [staged, None] if failed else [staged])
    assert bool(sink.files()) is not failed


def test_a_failing_task_takes_its_files_along(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a failed task are removed before its error is raised."""
    monkeypatch.setattr(datasink, "StagingWriter", partial(StagingWriter, file_bytes=1))
    sink = Sink(tmp_path)

    def rows() -> Iterator[pa.RecordBatch]:
        yield frame(value=["x" * 100])
        assert sink.files()
        raise RuntimeError("the task's input failed")

    with pytest.raises(RuntimeError, match="input failed"):
        datasink._stage(sink.target, sink.query, sink.batch, rows())
    assert not sink.files()


def test_no_broker_is_asked_for_nothing(tmp_path: Path) -> None:
    """An empty commit starts no broker; its root need not even have one."""
    commits.commit(str(tmp_path), {}, query="q", batch=0, sections=list[Section](), topics={})
    assert not list(tmp_path.iterdir())
