"""`connect`: what a program gets that knows a root, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sparklog
from sparklog import errors

_FORGETFUL = """
import sys, sparklog
log = sparklog.connect(sys.argv[1])
log.create_topic("orders", partitions=1)
producer = log.producer()
producer.send("orders", b"tea").result()
"""


def test_a_program_that_closes_nothing_ends_and_leaves_its_records_in_the_table(
    tmp_path: Path,
) -> None:
    """The embedded broker leaves in good order at exit, also when nobody told it to."""
    done = subprocess.run(
        [sys.executable, "-c", _FORGETFUL, str(tmp_path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    with sparklog.connect(tmp_path) as log:
        topic = log.describe("orders")
        assert [(each.end, each.published) for each in topic.partitions] == [(1, 1)]


def test_no_target_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, address or variable, the error says which variables there are."""
    monkeypatch.delenv("SPARKLOG_ROOT", raising=False)
    monkeypatch.delenv("SPARKLOG_BOOTSTRAP", raising=False)
    with pytest.raises(errors.BadOption, match="SPARKLOG_ROOT"):
        sparklog.connect()


def test_two_logs_of_one_process_share_a_broker(tmp_path: Path) -> None:
    """The second `connect` to a root joins the broker that the first one started."""
    with sparklog.connect(tmp_path) as first, sparklog.connect(tmp_path) as second:
        first.create_topic("orders", partitions=2)
        assert second.topics() == ["orders"]
        assert first.cluster() == second.cluster()
