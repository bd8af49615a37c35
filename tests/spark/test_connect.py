"""Source and sink through a Spark Connect server, by clients that have no JVM of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

import sparklog
from tests.support import fences, spark_programs
from tests.support.over_connect import ROWS

pytestmark = [
    pytest.mark.spark,
    pytest.mark.spark_program,
    pytest.mark.since("4.2"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

EACH_ONCE = sorted(str(number) for number in range(ROWS))


@pytest.fixture(name="root", scope="module")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root that no broker serves."""
    root = tmp_path_factory.mktemp("root")
    with sparklog.connect(root) as log:
        for topic in ("t", "u", "v", "produced", "replayed", "orders", "late"):
            log.create_topic(topic, partitions=3)
    yield root
    spark_programs.end_detached_brokers(root)


@pytest.fixture(name="address", scope="module")
def _address(root: Path) -> Iterator[str]:
    """The server's, which has the root in its environment."""
    with spark_programs.connect_server(SPARKLOG_ROOT=str(root)) as address:
        yield address


@pytest.fixture(name="found", scope="module")
def _found(root: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the client."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    found: dict[str, Any] = spark_programs.run(
        "over_connect", address, folder, str(root), timeout_seconds=240.0
    )
    return found


def test_a_client_reads_what_it_wrote(found: dict[str, Any]) -> None:
    """Each row once, although the write was made twice under one name and version."""
    assert found["session"].startswith("pyspark.sql.connect.")
    assert found["read"] == EACH_ONCE


def test_a_wrong_write_is_refused(found: dict[str, Any]) -> None:
    """The client reads our own message, and no frames before it."""
    assert "Topic 'nowhere' does not exist" in found["refused"].splitlines()[0], found["refused"]
    assert "Traceback" not in found["refused"]


def test_a_stream_is_copied(found: dict[str, Any]) -> None:
    """From topic to topic, each record once."""
    assert found["copied"] == EACH_ONCE


@pytest.mark.skipif(
    tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3),
    reason="the function finds no query since Spark 4.3",
)
def test_foreach_batch_writes_each_row_once(found: dict[str, Any]) -> None:
    """A micro-batch that is run again, because the query died after its write, is skipped."""
    assert found["died"].startswith("[STREAM_FAILED]")
    assert found["ended"] == ""
    assert found["handed over"] == EACH_ONCE


def test_foreach_batch_needs_the_query_s_name(found: dict[str, Any]) -> None:
    """Without the name, the function cannot know the query that it is called for."""
    assert "no active query is named 'copy'" in found["unnamed"]
    assert "writeStream.queryName('copy')" in found["unnamed"]


def test_jobs_run(found: dict[str, Any]) -> None:
    """They write from files and from topic to topic, and compact, with the session there is."""
    assert found["jobs"] == [
        "produced: 3 records",
        "produced: nothing to write, this run's records are in the topic",
        "replayed: 3 records",
        "produced: 3 records",
        "produced: 6 records, 1 file in place of 2",
    ]


@pytest.mark.since("4.1")
def test_a_pipeline_reads_and_writes_what_is_new(root: Path, address: str, tmp_path: Path) -> None:
    """A second run takes only new records; a full refresh reads all, and appends them again."""
    arguments = (address, str(tmp_path), str(root))
    found = spark_programs.run("over_pipelines", *arguments, timeout_seconds=240.0)
    assert found == {
        "first": [20],
        "second": [20, 30],
        "refreshed": [20, 20, 30, 30],
    }


def test_the_documentation_shows_the_pipeline() -> None:
    """Its two files are in the page as they are."""
    page = (fences.ROOT / "docs" / "spark.md").read_text()
    for file in ("spark-pipeline.yml", "orders.py"):
        assert (fences.ROOT / "examples" / "pipeline" / file).read_text() in page
