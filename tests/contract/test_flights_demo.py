"""The brokers of the flights demo: real processes, of which nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import sparklog
from examples import flights_demo as demo
from examples.flights_demo import Kill, Places
from tests.support.demos import REPOSITORY, brokers_of, demo_with_cluster
from tests.support.processes import is_running, processes_of
from tests.support.waiting import PATIENCE_SECONDS, wait_until

_FLIGHTS: Final = 12_000
_GROUP_AND_MEMBER: Final = """
import subprocess, time
from examples import flights_demo as demo
with demo.process_group() as group:
    member = subprocess.Popen(["sleep", "600"], process_group=group)
    print(group, member.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(name="places")
def _places(tmp_path: Path) -> Places:
    return Places(root=tmp_path / "root", scratch=tmp_path)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


def test_kill_of_a_broker_while_records_are_sent(places: Places) -> None:
    """All acked records are there once, in order and where their acks say; two brokers live on."""
    flights = demo.load_flights(_FLIGHTS)
    with (
        demo.cluster(places) as brokers,
        sparklog.connect([each.address for each in brokers]) as log,
    ):
        log.create_topic(demo.TOPIC, partitions=demo.PARTITIONS)
        kill = Kill(log, brokers, after=_FLIGHTS // 3)

        def on_progress(count: int) -> None:
            if kill.is_due(count):
                kill.do()

        sent = demo.send(
            log, flights, range(_FLIGHTS), pace_per_second=4_000, on_progress=on_progress
        )
        assert sorted(str(each.process.poll()) for each in brokers) == ["-9", "None", "None"]
        assert 0 < kill.seconds_without_ack(sent.acks) < PATIENCE_SECONDS
        records = demo.check_records(log, flights)
        assert records.holds, records.found
        acks = demo.check_acks(log, flights, sent.places, kill)
        assert acks.holds, acks.found
    assert all(each.process.poll() is not None for each in brokers)


def test_broker_that_does_not_start(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message is shown, and the brokers that had started are stopped."""
    monkeypatch.setattr(demo, "MEMBERS", (1, 2, 2))
    with pytest.raises(SystemExit, match=r"no broker: .*2"), demo.cluster(places):
        pass
    assert not brokers_of(places.root)


def test_group_ends_with_a_killed_program() -> None:
    """Brokers of a cluster do not outlive the demonstration, even if it is killed."""
    command = [sys.executable, "-c", _GROUP_AND_MEMBER]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        group, member = map(int, program.stdout.readline().split())
        assert is_running(member)
        program.kill()
    wait_until(lambda: not is_running(member) and not is_running(group), "the group has ended")


@pytest.mark.parametrize("brokers", [1, 3])
def test_interruption_while_brokers_start(tmp_path: Path, brokers: int) -> None:
    """Nothing is left after Ctrl-C, not even of a broker that does not serve yet."""
    with demo_with_cluster(tmp_path / "root", limit=10_000) as program:
        # Of the session are also the program itself and the shell of the brokers' group.
        wait_until(lambda: len(processes_of(program.pid)) >= 2 + brokers, "the broker is started")
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=PATIENCE_SECONDS)
        assert program.returncode == 130, output
        assert "all started processes have been stopped" in output
        assert processes_of(program.pid) == []
