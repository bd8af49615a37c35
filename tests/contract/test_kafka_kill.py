"""`kill -9` of a real broker at any moment, with Kafka's producers and a group at work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from tests.support.kafkakilling import kafka_broker, survive, survive_a_check
from tests.support.kafkarequests import batch, create, new_producer, produce
from tests.support.kafkas import Frames
from tests.support.waiting import wait_until


@pytest.mark.slow
@pytest.mark.parametrize("log", ["objects", "segments"])
def test_nothing_acked_to_kafkas_clients_is_lost_doubled_or_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    """Through three kills: records of idempotent producers, and what a group has committed."""
    monkeypatch.setenv("SPARKLOG_WRITER_LOG", log)
    survive(tmp_path, kills=3, minutes=0.0, seed=5)


@pytest.mark.soak(mode="kills")
def test_nothing_acked_to_kafkas_clients_is_ever_lost_doubled_or_taken_back(
    tmp_path: Path,
) -> None:
    """This holds through thirty kills, or for as many minutes as are given."""
    minutes = float(os.environ.get("SPARKLOG_SOAK_MINUTES", "0"))
    survive(tmp_path, kills=30, minutes=minutes, seed=int.from_bytes(os.urandom(4)))


@pytest.mark.slow
def test_a_checker_of_histories_finds_nothing_through_kills(tmp_path: Path) -> None:
    """The records that consumers, seekers and groups get through three kills are consistent."""
    survive_a_check(tmp_path, kills=3, seed=11)


@pytest.mark.soak(mode="kills")
def test_a_checker_of_histories_never_finds_anything(tmp_path: Path) -> None:
    """The histories are consistent through thirty kills at random moments."""
    survive_a_check(tmp_path, kills=30, seed=int.from_bytes(os.urandom(4)))


@pytest.mark.slow
def test_a_producer_is_known_when_all_that_it_wrote_is_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each kill its retry is a duplicate, its next batch is taken, and a gap is refused."""
    monkeypatch.setenv("SPARKLOG_WRITER_LOG", "objects")  # a segment goes after 64 MiB only
    broker = kafka_broker(tmp_path, limits={"CONFIRM_AFTER_SECONDS": 0.1, "TRIM_GRACE_SECONDS": 0})
    broker.start()
    try:
        frames = Frames(broker.kafka_address)
        create(frames, "t")
        producer = new_producer(frames).producer_id
        stands = _send(frames, producer, 0)
        assert stands == (ErrorCode.none, 0)
        for sequence in (0, 2):
            _await_trim(frames, tmp_path)
            broker.kill()
            broker.start()
            frames.close()
            frames = Frames(broker.kafka_address)
            assert _send(frames, producer, sequence) == stands
            gap = _send(frames, producer, sequence + 4)
            assert gap == (ErrorCode.out_of_order_sequence_number, -1)
            stands = _send(frames, producer, sequence + 2)
            assert stands[0] == ErrorCode.none
            assert _send(frames, producer, sequence + 2) == stands
        frames.close()
    finally:
        broker.stop()


def _send(frames: Frames, producer: int, sequence: int) -> tuple[ErrorCode, int]:
    """Two records."""
    producer_sequence = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence}
    found = produce(frames, "t", 0, batch([b"%d" % sequence, b"more"], **producer_sequence))
    return found.error_code, found.base_offset


def _await_trim(frames: Frames, root: Path) -> None:
    """Returns when nothing is left of the log as it was; others write meanwhile."""
    epoch = max((root / "wal" / "1").iterdir())
    old = set(epoch.glob("[0-9]*"))
    assert old

    def is_gone() -> bool:
        produce(frames, "t", 0, batch([b"another's"]))
        return old.isdisjoint(epoch.glob("[0-9]*"))

    wait_until(is_gone, "the log was trimmed")
