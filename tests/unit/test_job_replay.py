"""`sparklog.jobs.replay` as far as it needs no Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog import Log, errors
from sparklog.jobs import replay as jobs
from sparklog.jobs.ranges import Range, Source
from sparklog.jobs.replay import Times, _Replay
from sparklog.jobs.running import app_of
from sparklog.jobs.targets import Target
from sparklog.jobs.windows import Checkpoint
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
        kept = Checkpoint(str(tmp_path / "checkpoint"))
        with pytest.raises((errors.TopicChanged, errors.BadRequest), match="created again"):
            replay.write_paced(log, kept, Range(starts={0: 0}, ends={0: 2}), 1.0)
    assert [each.ends for each in written] == [{0: 1}]


_FIRST = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Iterator[Log]:
    """Four records in topic `from`, each in a window of its own, and an empty topic `to`."""
    with sparklog.connect(tmp_path / "root") as log:
        for name in ("from", "to"):
            log.create_topic(name, partitions=1)
        send(log, 0, 1, 2, 3)
        yield log


def send(log: Log, *windows: int) -> None:
    """Sends a record with a time in each window."""
    with log.producer() as producer:
        for number in windows:
            moment = _FIRST + timedelta(seconds=2 * number)
            producer.send("from", b"v", partition=0, timestamp=moment).result()


class Paced:
    """Runs of a paced replay, whose writes are noted instead of being written."""

    def __init__(self, root: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._log = log
        self.written: dict[int, Range] = {}
        """By the number that the target knows a write by."""
        self.dies_at: int | None = None
        monkeypatch.setattr(
            _Replay, "_write", lambda _, *given, **once: self._write(*given, **once)
        )
        monkeypatch.setattr(_Replay, "_time_bounds", lambda _, part: self._bounds(part))
        monkeypatch.setattr(Target, "newest", lambda *_: max(self.written, default=None))
        monkeypatch.setattr(jobs, "spark_session", lambda *_, **__: None)
        monkeypatch.setattr("sparklog.jobs.replay.time", time_with(sleep=lambda _: None))

    def _write(self, part: Range, *_: Any, **once: str) -> int:
        if len(self.written) == self.dies_at:
            raise KeyboardInterrupt
        self.written.setdefault(int(once["txnVersion"]), part)
        return part.count

    def _bounds(self, part: Range) -> tuple[datetime, datetime]:
        found = self._log.read("from", start=part.starts, end=part.ends)["timestamp"].to_pylist()
        return min(found), max(found)

    @property
    def offsets(self) -> list[int]:
        """The offsets that were written, in the order of the windows."""
        return [
            offset
            for _, part in sorted(self.written.items())
            for offset in range(part.starts[0], part.ends[0])
        ]

    def run(self, *arguments: str, speed: str = "--speed=1") -> Result:
        """Runs the job in this process."""
        given = [f"--root={self._root}", "--from=from", "--to=to", speed, *arguments]
        return CliRunner().invoke(app_of(jobs.replay), given)


@pytest.fixture(name="paced")
def _paced(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> Paced:
    return Paced(tmp_path / "root", log, monkeypatch)


def test_a_run_that_is_repeated_has_the_range_of_the_first(log: Log, paced: Paced) -> None:
    """Records that come between two runs up to `latest` change neither windows nor the end."""
    paced.dies_at = 2
    assert paced.run().exit_code == 130
    send(log, 1, 7)  # the first of them is older than its neighbours
    log.add_partitions("from", 2)
    paced.dies_at = None
    assert paced.run().exit_code == 0
    assert paced.offsets == [0, 1, 2, 3]
    assert "nothing to write" in paced.run().stdout
    assert paced.offsets == [0, 1, 2, 3]


def test_a_run_from_the_end_has_the_end_of_the_first(log: Log, paced: Paced) -> None:
    """`latest` is where the log ended when the first run began."""
    assert "nothing to write" in paced.run("--start=latest").stdout
    send(log, 4)
    assert "nothing to write" in paced.run("--start=latest").stdout
    assert not paced.written


def test_a_run_goes_on_after_retention(log: Log, paced: Paced) -> None:
    """Windows that were written need their records no more; those that were not are refused."""
    paced.dies_at = 2
    assert paced.run().exit_code == 130
    log.delete_records("from", {0: 2})
    paced.dies_at = 3
    assert paced.run().exit_code == 130
    assert paced.offsets == [0, 1, 2]
    log.delete_records("from", {0: 4})
    paced.dies_at = None
    refused = paced.run()
    assert refused.exit_code == 1
    assert "Offsets 3 to 4 of from-0 no longer exist" in refused.stderr
    assert "--once-as" in refused.stderr
    assert paced.offsets == [0, 1, 2]


def test_a_kill_between_a_write_and_its_note(
    log: Log, paced: Paced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target says that it has the window, whose records may be gone."""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "finish", die)
        assert paced.run().exit_code == 130
    log.delete_records("from", {0: 1})
    assert paced.run().exit_code == 0
    assert paced.offsets == [0, 1, 2, 3]


def test_a_run_at_once_that_is_repeated_needs_no_offsets(
    log: Log, paced: Paced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records are in the topic, so its range may be gone from the source."""
    monkeypatch.setattr(Target, "has", lambda *_: True)
    log.delete_records("from", {0: 3})
    log.add_partitions("from", 2)
    assert "nothing to write" in paced.run('--start={"0": 1}', speed="--times=keep").stdout


@pytest.mark.parametrize("spelling", ["{}", "{}/", "file://{}", "{}/../root", "{}/../link"])
def test_a_topic_is_not_replayed_into_itself(
    tmp_path: Path, log: Log, paced: Paced, spelling: str
) -> None:
    """The root is known by its identity, and not by its name."""
    (tmp_path / "link").symlink_to(tmp_path / "root")
    to_root = spelling.format(tmp_path / "root")
    refused = paced.run(f"--to-root={to_root}", "--to=from")
    assert refused.exit_code == 2
    assert "into itself" in refused.stderr
    assert not paced.written


def test_a_copy_of_a_root_is_another_root(tmp_path: Path, log: Log, paced: Paced) -> None:
    """A restored backup has the ids of its original, and its topics can be replayed there."""
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    target = Target(root=str(tmp_path / "copy"), topic="from", partitions=None)
    assert not target.is_topic(log, log.describe("from"))
    assert Target(root=str(tmp_path / "root"), topic="from", partitions=None).is_topic(
        log, log.describe("from")
    )
