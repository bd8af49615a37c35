"""The code around the comparisons with Kafka: names, figures, jars, processes. Measures nothing."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from benchmarks import command, compare, jars, kafka_process, measures, processes
from benchmarks.progress import doing
from benchmarks.spark import bulk, stream
from sparklog import bench
from sparklog.bench.command import select
from sparklog.bench.measures import COMPARISONS
from sparklog.bench.report import BenchOptions, Measurement, Times
from tests.support.waiting import time_with

OPTIONS = BenchOptions(folder=Path())

# ------------------------------------------------------------------------------ names


def test_group_name_selects_all_of_its_measures() -> None:
    """A group selects its measures in order, and a full name selects one measure."""
    found = measures.MEASURES
    assert select(found, "spark") == [
        "spark-bulk", "spark-stream", "spark-bucket", "spark-age",
    ]  # fmt: skip
    assert select(found, "spark-age") == ["spark-age"]


def test_help_names_every_measure() -> None:
    """`python -m benchmarks --help` lists the measures."""
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [name for name in measures.MEASURES if name not in result.stdout] == []


def test_measure_is_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs the measures of the named group."""
    found = {"spark-a": lambda _: [Measurement(name="a", value="1")]}
    monkeypatch.setattr(command, "MEASURES", found)
    result = CliRunner().invoke(command.app, ["spark", "--markdown"])
    assert result.exit_code == 0
    assert "| a |" in result.stdout


@pytest.mark.parametrize("name", list(measures.MEASURES))
def test_bench_names_the_command_for_comparisons(name: str) -> None:
    """`sparklog bench` refuses a comparison and names the command that runs it."""
    assert name.partition("-")[0] in COMPARISONS
    result = CliRunner().invoke(bench.app, [name], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"python -m benchmarks {name}" in result.stderr


# ------------------------------------------------------------------------------ figures


def times(*ms: float) -> Times:
    """Durations of so many milliseconds."""
    return Times([each / 1e3 for each in ms])


@pytest.mark.parametrize(("ours", "met"), [(4.0, True), (5.0, True), (5.01, False)])
def test_faster_by_the_ratio_of_rates(ours: float, met: bool) -> None:
    """Half the other's seconds are twice its rate; the bound itself is met."""
    figure = compare.faster("scan", 10_000_000, ours, 10.0, least=2, than="Kafka")
    assert figure.value == f"{10 / ours:.2f} ×"
    assert figure.met is met
    assert figure.target == "≥ 2 × Kafka"
    assert figure.detail.endswith("Kafka 1.00 M rows/s")


def test_without_the_other_side_a_figure_is_only_told() -> None:
    """No target is met or missed by what nothing was compared with."""
    for figure in (
        compare.faster("scan", 10_000_000, 5.0, None, least=2, than="Kafka"),
        compare.sooner("way", times(1, 2), None, most={50: 0.9}, than="Kafka"),
    ):
        assert figure.met is None
        assert figure.detail == "no Kafka to compare"
    assert compare.faster("scan", 10_000_000, 5.0, None, least=2, than="K").value == "2.00 M rows/s"


@pytest.mark.parametrize(("limit", "met"), [(0.6, True), (0.5, True), (0.4, False)])
def test_sooner_in_every_percentile_that_counts(limit: float, met: bool) -> None:
    """One that is too late is enough."""
    figure = compare.sooner("way", times(10), times(20), most={50: 0.9, 99: limit}, than="Kafka")
    assert figure.value == "p50 0.50 ×, p99 0.50 ×"
    assert figure.met is met


@pytest.mark.parametrize(("old", "met"), [(12, True), (13, False)])
def test_no_dearer_by_the_medians(old: float, met: bool) -> None:
    """A slow run on either side changes nothing."""
    figure = compare.no_dearer("plan", times(10, 10, 900), times(1, old, old), most=1.2)
    assert figure.met is met


# ------------------------------------------------------------------------------ missing parts


def test_no_pyspark_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements without Spark still run."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    figures = list(bulk.bulk(OPTIONS))
    assert [each.value for each in figures] == ["pyspark is not installed"]


class JavaError(Exception):
    """An error of Java as py4j reports it."""

    @property
    def java_exception(self) -> Any:
        return SimpleNamespace(getMessage=lambda: self.args[0])


class Resolver:
    """A JVM whose Ivy finds everything but modules with `lacks` in their names."""

    def __init__(self, lacks: str) -> None:
        self.lacks = lacks
        self.asked: list[str] = []

    def __getattr__(self, _name: str) -> Any:
        return self

    def __call__(self, *_: object) -> Any:
        return self

    def URI(self, text: str) -> str:  # noqa: N802 (Java's name)
        return text

    def resolveMavenDependencies(self, uri: str) -> Any:  # noqa: N802 (Spark's name)
        self.asked.append(uri)
        if self.lacks in uri.partition("?")[0]:
            raise JavaError(f"[not found: {uri}]\nand a page more")
        return SimpleNamespace(size=lambda: 1, apply=lambda _: f"/jars/{len(self.asked)}.jar")

    def getPath(self) -> str:  # noqa: N802 (Java's name)
        return "/jars/scala-library.jar"


def found_by(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> jars.Jars:
    """Returns the jars that this resolver finds."""

    @contextmanager
    def jvm() -> Iterator[Resolver]:
        yield resolver

    monkeypatch.setattr(jars, "_jvm", jvm)
    return jars.find.__wrapped__()


def test_all_jars_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark gets Delta and the connector; a broker of Kafka has its own, and Spark's Scala."""
    found = found_by(Resolver("nothing"), monkeypatch)
    assert found.missing == ()
    assert found.of_spark == found.delta + found.connector
    assert found.broker[-1] == "/jars/scala-library.jar"
    assert not set(found.broker) & set(found.of_spark)


@pytest.mark.parametrize(
    ("lacks", "what", "field"),
    [
        ("delta-spark", "Delta", "delta"),
        ("token-provider", "Spark's Kafka connector", "connector"),
        ("kafka_2.13", "Kafka", "broker"),
    ],
)
def test_jars_that_cannot_be_got(
    lacks: str, what: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing jars are logged in one line each, and the others are found."""
    found = found_by(Resolver(lacks), monkeypatch)
    assert len(found.missing) == 1
    assert found.missing[0].startswith(what)
    assert "not found" in found.missing[0]
    assert "\n" not in found.missing[0]
    fields = ("delta", "connector", "broker")
    assert [bool(getattr(found, each)) for each in fields] == [each != field for each in fields]


def test_ivy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its JVM is ended after a while; then no jar is found, and a message says so."""
    resolver = Resolver("nothing")
    monkeypatch.setattr(resolver, "resolveMavenDependencies", None, raising=False)
    found = found_by(resolver, monkeypatch)
    assert (found.of_spark, found.broker) == ((), ())
    assert len(found.missing) == 3
    assert all("did not answer" in each for each in found.missing)


# ------------------------------------------------------------------------------ a broker of Kafka

FAKE_JAVA = """\
#!{python}
import signal, socket, sys, time
config = dict(line.strip().split("=", 1) for line in open(sys.argv[-1]) if "=" in line) if (
    sys.argv[-1].endswith(".properties")) else {{}}
if "kafka.tools.StorageTool" in sys.argv:
    sys.exit(0)
{body}
port = int(config["listeners"].split(",")[0].rpartition(":")[2])
server = socket.create_server(("127.0.0.1", port))
time.sleep(60)
"""


def fake_java(home: Path, monkeypatch: pytest.MonkeyPatch, body: str = "") -> None:
    """Puts a fake `java` in place for the test; `body` runs before it serves."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(FAKE_JAVA.format(python=sys.executable, body=body), "utf-8")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))


def test_kafka_serves_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an address of this machine alone; then the process is gone."""
    fake_java(tmp_path / "java", monkeypatch)
    with kafka_process.KafkaProcess(["a.jar"], tmp_path / "kafka") as broker:
        host, _, port = broker.address.partition(":")
        pid = broker.pid
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), 5).close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_kafka_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words say why."""
    body = 'print("much"); print("no such class"); sys.exit(1)'
    fake_java(tmp_path / "java", monkeypatch, body)
    with pytest.raises(RuntimeError, match="Kafka did not start: no such class"):
        kafka_process.KafkaProcess(["a.jar"], tmp_path / "kafka").start()


def test_kafka_that_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed."""
    monkeypatch.setattr(kafka_process, "_STOP_SECONDS", 0.1)
    fake_java(tmp_path / "java", monkeypatch, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    broker = kafka_process.KafkaProcess(["a.jar"], tmp_path / "kafka").start()
    pid = broker.pid
    broker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_kafka_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is a broker that does not start, too."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match="Kafka did not start"):
        kafka_process.KafkaProcess(["a.jar"], tmp_path / "kafka").start()


# ------------------------------------------------------------------------------ arrivals


def batch_of(*values: bytes) -> Any:
    """Returns the frame that `foreachBatch` passes."""
    rows = [SimpleNamespace(value=value) for value in values]
    return SimpleNamespace(collect=lambda: rows)


def test_way_of_a_record() -> None:
    """From its stamp to the end of the collect that has it; a value is as large as any other."""
    arrivals = stream.Arrivals()
    first, second = stream.stamped(0), stream.stamped(1)
    assert len(first) == 100
    time.sleep(0.01)
    arrivals.collect(batch_of(first, second), 0)
    assert arrivals.seconds[0] >= arrivals.seconds[1] >= 0.01
    arrivals.await_all(range(2))


def test_record_that_comes_twice() -> None:
    """No figure is made of it."""
    arrivals = stream.Arrivals()
    value = stream.stamped(7)
    with pytest.raises(RuntimeError, match="record 7 arrived twice"):
        arrivals.collect(batch_of(value, value), 0)


def test_record_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of one that is lost."""
    monkeypatch.setattr(stream, "_PATIENCE_SECONDS", 0.0)
    arrivals = stream.Arrivals()
    arrivals.collect(batch_of(stream.stamped(0)), 0)
    with pytest.raises(RuntimeError, match="1 of 2 records"):
        arrivals.await_all(range(2))


def raise_from(error: Exception | None) -> None:
    """Raises it, if there is one."""
    if error is not None:
        raise error


@pytest.mark.parametrize("body", [None, RuntimeError("never came")])
def test_query_that_fails_says_so_itself(body: Exception | None) -> None:
    """The error of the query explains the missing records, and the query is stopped."""
    stopped: list[bool] = []
    query: Any = SimpleNamespace(
        exception=lambda: ValueError("the query's own"), stop=lambda: stopped.append(True)
    )
    with pytest.raises(ValueError, match="own"), stream._stopped(query):
        raise_from(body)
    assert stopped == [True]


# ------------------------------------------------------------------------------ processes


def test_processor_time_of_a_family() -> None:
    """A child that works is in its parent's family; one of another is not."""
    busy = [sys.executable, "-c", "while True: pass"]
    child = subprocess.Popen(busy)
    try:
        deadline = time.monotonic() + 30
        while processes.cpu_seconds(os.getpid()).get(child.pid, 0.0) < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert set(processes.cpu_seconds(child.pid)) == {child.pid}
    finally:
        child.kill()
        child.wait()


def test_usage_is_told_in_shares_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JVM's own, and that of all beneath it, those included that came meanwhile."""
    pid = os.getpid()
    looks: list[Mapping[int, float]] = [{pid: 1.0, 5: 2.0}, {pid: 2.0, 5: 2.5, 6: 0.25}]
    monkeypatch.setattr(processes, "cpu_seconds", lambda _: looks.pop(0))
    monkeypatch.setattr(processes, "_pid", lambda _: pid)
    moments = iter((0.0, 10.0))
    still = time_with(perf_counter=lambda: next(moments), sleep=lambda _: None)
    monkeypatch.setattr(processes, "time", still)
    usage = processes.Usage.over(cast("Any", None), 10.0)
    assert usage.jvm == pytest.approx(0.1)
    assert usage.python == pytest.approx(0.075)


# ------------------------------------------------------------------------------ progress


def test_progress_is_a_line_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error: standard output is the report's."""
    with doing("counting"):
        pass
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == "counting …"
