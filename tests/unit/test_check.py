"""The checker of histories: it finds every planted fault by its name, and nothing where none is."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparklog import errors
from sparklog.check import driving
from sparklog.check import history as histories
from sparklog.check.analysis import KINDS, analyse
from sparklog.check.history import (
    ACKED,
    NO_OFFSET,
    Consumers,
    History,
    Reads,
    Recorder,
    Sends,
    value_of,
)
from tests.support.brokenlog import FAULTS, play

SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_log_is_clean(seed: int) -> None:
    """Retries without an answer, refusals, seeks and rebalances are not findings."""
    history, _ = play(seed)
    assert analyse(history) == []
    assert history.operations > 5_000


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_found(fault: str) -> None:
    """A fault is found under its own name, in each of several runs in which it happened."""
    ran = 0
    for seed in range(5):
        history, planted = play(seed, fault)
        if planted:
            ran += 1
            found = {each.kind: each for each in analyse(history)}
            assert FAULTS[fault] in found, (fault, seed, planted, sorted(found))
            assert found[FAULTS[fault]].examples
    assert ran >= 3


def test_every_kind_is_planted() -> None:
    """There is no kind of finding that no test has ever seen."""
    assert set(FAULTS.values()) == set(KINDS)
    assert len(FAULTS) >= 20


def test_an_empty_history_is_clean() -> None:
    """Nothing was done, nothing is wrong."""
    assert analyse(histories.joined([])) == []
    assert analyse(histories.joined([Recorder(), Recorder()])) == []


class Delivered:
    """A record of librdkafka's whose ack was lost, and that the ack of a later one implies."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def value(self) -> bytes:
        return self._payload

    def partition(self) -> int:
        return 2

    def offset(self) -> None:
        return None


def test_an_ack_without_an_offset_is_an_ack() -> None:
    """The record must be read, and may be anywhere in its partition."""
    run = driving._Run(driving.Workload(bootstrap="x"), lambda *_: None, threading.Event())
    sender = driving._Sender(run, 0, random.Random(1))
    value = value_of(0, 7)
    sender._undecided[value] = 2, 1
    sender._delivered(None, Delivered(run.payload(value)))
    assert run.acked == 1
    sends = sender._recorder.sends.columns()
    assert (sends.status[0], sends.acked_partition[0], sends.offset[0]) == (ACKED, 2, NO_OFFSET)
    (finding,) = analyse(histories.joined([sender._recorder]))
    assert finding.kind == "unseen"


def test_a_commit_that_failed_is_sent_again() -> None:
    """A member that keeps its partitions would else never commit the end of the log."""
    run = driving._Run(driving.Workload(bootstrap="x"), lambda *_: None, threading.Event())
    member = driving._Member(run, 0, 1, random.Random(1))
    asked: list[dict[int, int]] = []

    class Consumer:
        """Refuses the first commit."""

        def commit(self, *, offsets: list[Any], **_: Any) -> list[Any]:
            asked.append({each.partition: each.offset for each in offsets})
            if len(asked) == 1:
                raise run.kafka.KafkaException(run.kafka.KafkaError(27))
            return offsets

    member._after = {0: 7, 1: 9}
    member._commit(Consumer())
    assert run.positions(1) == {}
    member._revoked(Consumer(), [])
    assert asked == [{0: 7, 1: 9}] * 2
    assert run.positions(1) == {0: 7, 1: 9}
    assert member._after == {}


def test_a_million_operations_in_time() -> None:
    """The analysis is a few sorts: a million operations take seconds."""
    rows = 500_000
    at = np.arange(rows, dtype=np.int64)
    partition, offset, value = at % 8, at // 8, at  # one producer, in turn
    ones = np.ones(rows, np.int64)
    empty = histories.joined([])
    history = History(
        sends=Sends(value, partition, ones * ACKED, partition, offset, at, at + 1),
        reads=Reads(ones * 0, partition, offset // 500, partition, offset, value, ones, at + 2),
        commits=empty.commits,
        fetches=empty.fetches,
        ends=empty.ends,
        consumers=Consumers(*(np.array([each]) for each in (0, -1, 1))),
    )
    assert history.operations >= 1_000_000
    began = time.process_time()
    assert analyse(history) == []
    assert time.process_time() - began < 60.0


def test_a_history_is_kept_in_a_file(tmp_path: Path) -> None:
    """A saved history loads unchanged, with the same anomalies."""
    history, _ = play(3, "lose an acked record")
    histories.save(history, tmp_path / "history.npz")
    loaded = histories.load(tmp_path / "history.npz")
    assert analyse(loaded) == analyse(history) != []
    assert loaded.operations == history.operations
    (tmp_path / "other").write_bytes(b"nonsense")
    with pytest.raises(errors.BadRequest, match="is not a history"):
        histories.load(tmp_path / "other")


def test_examples_name_the_place() -> None:
    """An example is enough to look for the record."""
    seen = Recorder()
    seen.consumers.add(0, histories.NO_GROUP, 1)
    for number in range(3):
        seen.sends.add(value_of(7, number), 2, ACKED, 2, number, number, number + 1)
    for offset in (0, 2):
        seen.reads.add(0, 0, 0, 2, offset, value_of(7, offset), 1, 9)
    found = {each.kind: each.examples for each in analyse(histories.joined([seen]))}
    assert found == {
        "lost-write": ("record 1 of producer 7, acked at 2/1",),
        "gap": ("between 2/0 and 2/2",),
        "int-poll-skip": ("consumer 0, poll 0: 2/2 after 2/0",),
    }
