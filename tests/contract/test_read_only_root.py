"""A root that a process may only read, such as a read-only volume, while no broker serves it."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner, Result

import sparklog
from sparklog import connecting, errors
from sparklog.cli import app
from sparklog.storage import objects
from sparklog.storage.objects import MemoryStore, NoFaults
from sparklog.storage.objects.faults import Operation
from sparklog.storage.objects.memory import named_store

_NUMBERS: Final = itertools.count()
_WRITES: Final = ("put_new", "put", "delete", "append")

_DYING: Final = """
import os, sys
os.environ["SPARKLOG_PUBLISHER_INTERVAL_SECONDS"] = "60"
import sparklog
log = sparklog.connect(sys.argv[1])
log.create_topic("t", partitions=1)
producer = log.producer()
for number in range(10):
    producer.send("t", b"%d" % number).result()
os._exit(7)
"""


class _Refusing(NoFaults):
    """A role that may read a bucket, and not write to it."""

    def before(self, operation: Operation, path: str) -> None:
        if operation in _WRITES:
            raise errors.RootNotWritable(root="memory://bucket", reason=f"403 for {path}")


def _mount_read_only(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Refuses the system calls that write below a folder, also to root, whom modes do not bind."""

    def refusing(call: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def made(path: Any, *given: Any, dir_fd: int | None = None, **options: Any) -> Any:
            is_inside = dir_fd is not None or str(path).startswith(str(folder))
            if is_inside and writes(*given):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
            return call(path, *given, dir_fd=dir_fd, **options)

        return made

    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    patch.setattr(os, "open", refusing(os.open, lambda flags, *_: bool(flags & writing)))
    for name in ("mkdir", "unlink"):
        patch.setattr(os, name, refusing(getattr(os, name), lambda *_: True))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the developer's environment variables."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=["folder", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A root with 3 records of topic `t`, which was served before; now it can only be read."""
    if request.param == "bucket":
        name = f"read-only-{next(_NUMBERS)}"
        _fill(f"memory://{name}")
        bucket = named_store(name).view(_Refusing())

        def opened(*_: object) -> MemoryStore:
            return bucket

        monkeypatch.setattr(connecting, "open_store", opened)
        return f"memory://{name}"
    folder = tmp_path / "root"
    _fill(str(folder))
    _mount_read_only(folder, monkeypatch)
    return str(folder)


def _fill(root: str) -> None:
    with sparklog.connect(root) as log, log.producer() as producer:
        log.create_topic("t", partitions=2, config={"retention.ms": 3_600_000})
        for partition, value in ((0, b"a"), (1, b"b"), (1, b"c")):
            producer.send("t", value, partition=partition).result()


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_refused_calls_start_no_broker_each(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads the whole root, and readers of the process wait for it."""
    starts: list[None] = []
    start = connecting._RootSession._start

    def counted(session: connecting._RootSession) -> str:
        starts.append(None)
        return start(session)

    monkeypatch.setattr(connecting._RootSession, "_start", counted)
    with sparklog.connect(root) as log:
        for _ in range(3):
            with pytest.raises(errors.RootReadOnly):
                log.create_topic("u", partitions=1)
        assert log.read("t").num_rows == 3
    assert len(starts) == 1


def test_a_client_reads_a_read_only_root(root: str) -> None:
    """Readers need only the root: no right to write, and no broker."""
    with sparklog.connect(root) as log:
        assert log.topics() == ["t"]
        described = log.describe("t")
        assert [(each.start, each.end) for each in described.partitions] == [(0, 1), (0, 2)]
        assert described.config == {"retention.ms": "3600000"}
        assert log.read("t", values="text").column("value").to_pylist() == ["a", "b", "c"]
        assert log.read("t", partitions=[1], start=1).num_rows == 1
        assert log.offsets_for_times("t", "2020-01-01") == {0: 0, 1: 0}
        assert log.offsets_for_times("t", "2100-01-01") == {0: 1, 1: 2}
        assert log.cluster().brokers == []
        with pytest.raises(errors.UnknownTopic, match="Did you mean 't'"):
            log.read("T")


@pytest.mark.parametrize("follow", [True, False])
def test_a_consumer_reads_a_read_only_root(root: str, follow: bool) -> None:
    """A consumer without a group reads the partitions from the root."""
    with sparklog.connect(root) as log, log.consumer("t", follow=follow) as consumer:
        found: list[bytes] = []
        while len(found) < 3:
            found += [each.value for each in consumer.poll(timeout=10)]
        assert sorted(found) == [b"a", b"b", b"c"]


_CHANGES: Final[dict[str, Callable[[sparklog.Log], object]]] = {
    "topics.create": lambda log: log.create_topic("u"),
    "topics.alter": lambda log: log.alter("t", {"retention.ms": 1}),
    "topics.delete": lambda log: log.delete_topic("t"),
    "records.delete": lambda log: log.delete_records("t", {0: 1}),
    "publish.now": lambda log: log.flush_to_table(),
    "groups.commit": lambda log: log.commit_group_offsets("g", {("t", 0): 1}),
    "groups.list": lambda log: log.groups(),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_of_a_read_only_root_is_refused(root: str, what: str) -> None:
    """A request that needs a broker is refused with the reason why there is none."""
    with sparklog.connect(root) as log:
        with pytest.raises(errors.RootReadOnly) as refused:
            _CHANGES[what](log)
        assert refused.value.facts["what"] == what
        assert "read-only" in str(refused.value)
        assert "no broker serves it" in str(refused.value)
        assert log.topics() == ["t"]


def test_records_for_a_read_only_root_are_refused(root: str, tmp_path: Path) -> None:
    """A record that is sent fails at once with the reason why there is no broker."""
    with sparklog.connect(root) as log, log.producer() as producer:
        sent = producer.send("t", b"d")
        with pytest.raises(errors.RootReadOnly):
            sent.result(timeout=20)
    lines = tmp_path / "lines.txt"
    lines.write_text("d\n")
    refused = _run("produce", "t", str(lines), "--root", root)
    assert "read-only" in refused.stderr
    assert refused.stderr.endswith(" Nothing was sent.\n")


def test_a_member_of_a_group_needs_a_broker(root: str) -> None:
    """A consumer in a group of a read-only root is refused, because it joins at a broker."""
    with sparklog.connect(root) as log, log.consumer("t", group="g") as consumer:
        with pytest.raises(errors.RootReadOnly) as refused:
            consumer.poll(timeout=10)
        assert refused.value.facts["what"].startswith("groups.")


def test_the_log_of_a_broker_that_died_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acked records are read from the write-ahead log, and no broker has to publish them first."""
    folder = tmp_path / "root"
    done = subprocess.run([sys.executable, "-c", _DYING, str(folder)], timeout=60, check=False)
    assert done.returncode == 7
    _mount_read_only(folder, monkeypatch)
    with sparklog.connect(folder) as log:
        (found,) = log.describe("t").partitions
        assert (found.published, found.end) == (0, 10)
        values = log.read("t", values="text").column("value").to_pylist()
        assert values == [str(number) for number in range(10)]


def test_a_read_only_folder_becomes_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not a root and cannot become one is refused, as before."""
    _mount_read_only(tmp_path, monkeypatch)
    with pytest.raises(errors.RootNotWritable) as refused:
        sparklog.connect(tmp_path)
    assert type(refused.value) is errors.RootNotWritable


@pytest.mark.parametrize("root", ["bucket"], indirect=True)
def test_a_broker_that_starts_later_is_asked(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is refused only while there is no broker; the next one asks the new broker."""
    with sparklog.connect(root) as log:
        with pytest.raises(errors.RootReadOnly):
            log.create_topic("u")
        monkeypatch.setattr(connecting, "open_store", objects.open_store)
        with sparklog.connect(root):
            log.create_topic("u", partitions=1)
            assert log.topics() == ["t", "u"]


def test_a_kafka_listener_needs_write_access(root: str) -> None:
    """The address of a Kafka listener is not ignored where no broker can be started."""
    with pytest.raises(errors.RootNotWritable):
        sparklog.connect(root, kafka="127.0.0.1:0")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("topics", "list"), "t"),
        (("topics", "describe", "t"), "retention.ms"),
        (("consume", "t"), "a"),
        (("status",), "no broker"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_commands_that_read_need_no_broker(
    root: str, arguments: tuple[str, ...], told: str
) -> None:
    """The commands that only read show a read-only root."""
    result = _run(*arguments, "--root", root)
    assert result.exit_code == (4 if arguments == ("status",) else 0), result.output
    assert told in result.stdout
