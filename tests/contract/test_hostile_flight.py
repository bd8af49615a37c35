"""Flight clients that do not behave: each does its worst for some seconds, and others go on.

As in `test_hostile`, beside a bystander of the Kafka listener; and here one of Flight looks, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from sparklog import errors, limits, wire
from tests.support.brokers import payload
from tests.support.flights import Door, Stream
from tests.support.hostile import Siege

MIB = 1 << 20
STREAMS = 16
LOADED, LOADED_BYTES = "loaded", 256 * MIB
SECONDS = 30.0
SCHEMA = payload(["a"]).schema

Attack = Callable[[str], None]


@pytest.fixture(name="siege", scope="module")
def _siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    root: Path = tmp_path_factory.mktemp("hostile") / "root"
    with Siege(root, {"SPARKLOG_FLIGHT_MAX_STREAMS": str(STREAMS)}) as siege:
        with Door(siege.flight_address) as door:
            door.create(LOADED)
            batch = payload([bytes(MIB)] * 16)
            with Stream(door, LOADED, batch.schema) as stream:
                for _ in range(LOADED_BYTES // (16 * MIB)):
                    stream.append(batch, wire.AppendHeader(partition=0))
        yield siege


def zeros(size_bytes: int) -> pa.RecordBatch:
    """A value of so many zeros, which take no memory here."""
    ends = pa.py_buffer(np.array([0, size_bytes], np.int32))
    data = pa.py_buffer(np.zeros(size_bytes, np.uint8))
    return pa.record_batch([pa.Array.from_buffers(pa.binary(), 1, [None, ends, data])], ["value"])


def sends_huge_messages(address: str) -> None:
    """A gigabyte as one batch, and as one action."""
    with Door(address) as door:
        failed = (pa.ArrowException, OSError, errors.SparklogError)
        with pytest.raises(failed), Stream(door, LOADED, SCHEMA) as stream:
            stream.append(zeros(1_000 * MIB), wire.AppendHeader(partition=0))
    body = zeros(1_000 * MIB)["value"].buffers()[2]
    with Door(address) as door, pytest.raises(failed):
        list(door.flight.do_action(flight.Action("cluster", body)))


def names_one_value_often(address: str) -> None:
    """A dictionary that makes a megabyte of each of many rows."""
    indices = pa.array(np.zeros(100_000, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([bytes(MIB)]))
    batch = pa.record_batch([column], ["value"])
    with Door(address) as door, Stream(door, LOADED, batch.schema) as stream:
        for _ in range(5):
            with pytest.raises(errors.BatchTooLarge):
                stream.append(batch, wire.AppendHeader(partition=0))


def never_reads(address: str) -> None:
    """All streams that there may be, of which nothing is read."""
    ticket = wire.ReadTicket(topic=LOADED, partition=0, start=0, end=LOADED_BYTES // MIB)
    with contextlib.ExitStack() as doors:
        for _ in range(STREAMS):
            door = doors.enter_context(Door(address))
            door.flight.do_get(flight.Ticket(wire.encode(ticket)))
        time.sleep(3.0)


@pytest.mark.xdist_group("hostile-flight")
@pytest.mark.parametrize(
    "attack",
    [sends_huge_messages, names_one_value_often, never_reads],
    ids=lambda attack: attack.__name__,
)
def test_others_go_on_beside(attack: Attack, siege: Siege) -> None:
    """A Kafka client is answered in time, an action of Flight likewise, and memory is bounded.

    But for messages that are cut: a connection is looked at from time to time, and the loopback may
    bring all of one between two looks. The listener is for clients trusted with that memory.
    """
    met = siege.withstand(lambda _: attack(siege.flight_address))
    print(attack.__name__, met)  # noqa: T201 - the numbers, for those who ask with -s
    if attack is sends_huge_messages:
        met = dataclasses.replace(met, memory_bytes=0)
    assert met.is_within, met
    with Door(siege.flight_address) as door:
        assert door.describe(LOADED).topic == LOADED


@pytest.mark.xdist_group("hostile-flight")
def test_streams_that_do_nothing_make_room(siege: Siege) -> None:
    """Streams beyond the bound are refused, actions are answered, and idle ones end in seconds."""
    address = siege.flight_address
    with contextlib.ExitStack() as opened:
        idle = []
        for _ in range(STREAMS):
            door = opened.enter_context(Door(address))
            descriptor = flight.FlightDescriptor.for_command(
                wire.encode(wire.AppendStream(topic=LOADED))
            )
            writer, _ = door.flight.do_put(descriptor, SCHEMA)
            idle.append(writer)
        bystander = opened.enter_context(Door(address))
        time.sleep(1.0)
        with pytest.raises(errors.TooManyStreams):
            bystander.append(["a"], topic=LOADED)
        began = time.monotonic()
        while True:
            assert bystander.describe(LOADED).topic == LOADED
            with contextlib.suppress(errors.TooManyStreams):
                assert bystander.append(["a"], topic=LOADED).error is None
                break
            assert time.monotonic() - began < SECONDS
            time.sleep(0.2)
        assert time.monotonic() - began < limits.FLIGHT_IDLE_SHORT_SECONDS + 5.0
        for writer in idle:
            with contextlib.suppress(pa.ArrowException, OSError):
                writer.close()
