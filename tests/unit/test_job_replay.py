"""`sparklog.jobs.replay` as far as it needs no Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import sparklog
from sparklog import errors
from sparklog.jobs.ranges import Range, Source
from sparklog.jobs.replay import Times, _Replay
from sparklog.jobs.targets import Target
from tests.support.waiting import time_with


@pytest.mark.parametrize("again", ["from", "to"])
def test_a_topic_that_is_created_again_ends_a_paced_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Offsets are those of the topic that is gone, and so are the windows that were written."""
    root = str(tmp_path / "root")
    first = datetime(2026, 1, 1, tzinfo=UTC)
    last = first + timedelta(seconds=8)
    written: list[Range] = []
    spark: Any = None
    with sparklog.connect(root) as log:
        for name in ("from", "to"):
            log.create_topic(name, partitions=1)
        with log.producer() as producer:
            for moment in (first, last):
                producer.send("from", b"v", partition=0, timestamp=moment).result()

        def write(_replay: _Replay, part: Range, *_: Any, **__: str) -> int:
            written.append(part)
            log.delete_topic(again)
            log.create_topic(again, partitions=1)
            return part.count

        monkeypatch.setattr(_Replay, "_write", write)
        monkeypatch.setattr(_Replay, "_time_bounds", lambda *_: (first, last))
        monkeypatch.setattr("sparklog.jobs.replay.time", time_with(sleep=lambda _: None))
        replay = _Replay(
            spark,
            Source(root=root, topic="from", topic_id=log.describe("from").topic_id),
            Target(root=root, topic="to", partitions=None),
            "name",
            Times.KEEP,
            keeps_partitions=True,
        )
        with pytest.raises((errors.TopicChanged, errors.BadRequest), match="created again"):
            replay.write_paced(log, Range(starts={0: 0}, ends={0: 2}), 1.0)
    assert [each.ends for each in written] == [{0: 1}]
