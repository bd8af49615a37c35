"""The bill of an object store while nothing happens: what a broker, a cluster and topics cost."""

from __future__ import annotations

import pytest

from tests.support.bills import Bucket

# ------------------------------------------------------------------------------ whole brokers


def test_an_idle_broker() -> None:
    """Promise: a broker without topics costs less than 5 dollars per month, and puts heartbeats."""
    with Bucket() as bucket:
        bucket.start()
        bucket.pass_time(60)
        bill = bucket.bill(10)
    assert bill.dollars < 5, bill
    assert bill.of("put") == bill.of("put", "heartbeats/") == pytest.approx(15, abs=0.5), bill
    assert bill.of("list") < 2.5, bill


def test_a_member_beats_faster_than_a_lone_broker() -> None:
    """Promise: a broker that others watch beats three times before it would count as dead.

    It notices by itself that it is no longer alone, or that it is again.
    """
    with Bucket() as bucket:
        first = bucket.start()
        bucket.pass_time(60)
        bucket.start()
        bucket.pass_time(60)
        assert bucket.bill(5).of("put", "heartbeats/") == pytest.approx(40, abs=1)
        assert {0, 1} == first.parts.broker.members.up().keys()
        bucket.stop(1)
        bucket.pass_time(60)
        assert bucket.bill(5).of("put", "heartbeats/") == pytest.approx(15, abs=0.5)


def test_the_death_of_a_member_is_found_in_time() -> None:
    """Promise: the partitions of a member that dies on a bucket move within 15 seconds."""
    with Bucket() as bucket:
        agents = [bucket.start() for _ in range(3)]
        bucket.create(["t"], 6)
        bucket.pass_time(60)
        metadata = agents[1].parts.broker.metadata
        assert set(metadata.known.topics["t"].leaders) == {0, 1, 2}
        bucket.kill(0)
        bucket.pass_time(15)
        assert set(metadata.known.topics["t"].leaders) == {1, 2}
