"""A broker whose installation cannot be written: where its compiled loops go."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import sparklog
from sparklog.formats import kernel_cache
from tests.support.kafkarequests import batch, create, produce
from tests.support.kafkas import Frames

STOP_SECONDS = 60.0


@pytest.fixture(name="installation")
def _installation(tmp_path: Path) -> Path:
    """A copy of the package where nothing can be cached, not even by root.

    The same goes for the user's home.
    """
    source = Path(sparklog.__file__).parent
    shutil.copytree(source, tmp_path / "sparklog", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("sparklog/formats/__pycache__", "home"):
        (tmp_path / name).write_text("not a folder", "utf-8")
    (tmp_path / "tmp").mkdir()
    return tmp_path


@contextmanager
def running(installation: Path) -> Iterator[tuple[str, Path]]:
    """Its broker: (address of the Kafka listener, the log)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        kafka = f"127.0.0.1:{probe.getsockname()[1]}"
    hidden = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {
        "PYTHONPATH": str(installation),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(installation / "home"),
        "TMPDIR": str(installation / "tmp"),
    }
    command = [sys.executable, "-m", "sparklog", "broker", "--root", str(installation / "root")]
    command += ["--flight", "127.0.0.1:0", "--kafka", kafka]
    log = installation / "log"
    with log.open("wb") as target:
        process = subprocess.Popen(
            command, cwd=installation, env=environment, stdout=subprocess.PIPE, stderr=target
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), log.read_text("utf-8")
        yield kafka, log
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def produce_first(kafka: str, topic: str = "t") -> float:
    """Takes the first record; returns the seconds until it is acked."""
    frames = Frames(kafka)
    try:
        create(frames, topic)
        began = time.monotonic()
        assert produce(frames, topic, 0, batch([b"v"] * 10, 4)).error_code == 0
        return time.monotonic() - began
    finally:
        frames.close()


def test_read_only_installation_takes_kafkas_records(installation: Path) -> None:
    """It keeps its loops in a temporary folder of the user's own, says so, and compiles them once.

    The loops are compiled before the listener opens, so no client waits for that.
    """
    with running(installation) as (kafka, log):
        assert produce_first(kafka) < 1.0
        assert "in a temporary folder" in log.read_text("utf-8")
    (folder,) = (installation / "tmp").glob("sparklog-loops-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = {each: each.stat().st_mtime_ns for each in folder.rglob("*.nbc")}
    assert kept
    with running(installation) as (kafka, _):
        produce_first(kafka, "another")
    assert {each: each.stat().st_mtime_ns for each in folder.rglob("*.nbc")} == kept


@pytest.mark.parametrize("obstacle", ["a file", "open to others"])
def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    """Files there are executed, so none is kept where there is no folder of this user alone."""
    place = tmp_path / "loops"
    monkeypatch.setattr(kernel_cache, "_place", lambda: place)
    assert kernel_cache._own_folder() == place
    place.rmdir()
    if obstacle == "a file":
        place.write_text("not a folder", "utf-8")
    else:
        place.mkdir()
        place.chmod(0o777)
    assert kernel_cache._own_folder() is None


@pytest.mark.soak(mode="limits")
@pytest.mark.parametrize("obstacle", ["a file", "open to others"])
def test_no_folder_is_needed_to_take_kafkas_records(installation: Path, obstacle: str) -> None:
    """Without a folder, or with one that others may write, the loops are compiled at each start."""
    place = installation / "tmp" / f"sparklog-loops-{os.getuid()}"
    if obstacle == "a file":
        place.write_text("not a folder", "utf-8")
    else:
        place.mkdir()
        place.chmod(0o777)
    with running(installation) as (kafka, log):
        assert produce_first(kafka) < 1.0
        assert "compiled at each start" in log.read_text("utf-8")
    assert place.is_file() or list(place.iterdir()) == []
