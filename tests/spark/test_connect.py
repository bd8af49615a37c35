"""Source and sink through a Spark Connect server, by a client that has no JVM of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import sparklog
from tests.support import spark_programs
from tests.support.over_connect import ROWS

pytestmark = [
    pytest.mark.spark,
    pytest.mark.since("4.2"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

EACH_ONCE = sorted(str(number) for number in range(ROWS))


@pytest.fixture(name="found", scope="module")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Results of the client, on a root that only the server knows and no broker serves."""
    root = tmp_path_factory.mktemp("root")
    with sparklog.connect(root) as log:
        for topic in ("t", "u", "v", "produced", "replayed"):
            log.create_topic(topic, partitions=3)
    checkpoints = str(tmp_path_factory.mktemp("checkpoints"))
    try:
        with spark_programs.connect_server(SPARKLOG_ROOT=str(root)) as address:
            yield spark_programs.run(
                "over_connect", address, checkpoints, str(root), timeout_seconds=240.0
            )
    finally:
        spark_programs.end_detached_brokers(root)


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
        "produced: 6 records, 1 files in place of 2",
    ]
