from __future__ import annotations

import json
import math
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyarrow as pa
import pytest

from examples import flights_demo as demo
from examples.flights_demo import Ack, Broker, Delays, Disk, Flights, Kill
from sparklog.client.log import Log
from sparklog.formats.flight_messages import PartitionInfo, TopicInfo
from sparklog.formats.record import ROW_SCHEMA

CARRIERS = ["UA", "AA", "UA", "B6", "AA", "UA"]
PARTITION_OF = {"UA": 3, "AA": 0, "B6": 0}

FLIGHTS = Flights(
    carriers=CARRIERS,
    delays_minutes=pd.Series([1.0, 2.0, 4.0, math.nan, 5.0, math.nan]),
    values=[b'{"n":%d}' % number for number in range(6)],
    times_ms=[1_000 * number for number in range(6)],
)


class ReadLog:
    """A log that returns these rows to every reader."""

    def __init__(self, rows: list[dict[str, object]], leaders: Sequence[int] = ()) -> None:
        self.rows = rows
        self.leaders = leaders

    def read(self, _topic: str, columns: list[str] | None = None) -> pa.Table:
        rows = pa.Table.from_pylist(self.rows, ROW_SCHEMA)
        return rows if columns is None else rows.select(columns)

    def describe(self, topic: str) -> TopicInfo:
        partitions = [
            PartitionInfo(partition=number, leader=leader)
            for number, leader in enumerate(self.leaders)
        ]
        return TopicInfo(topic=topic, topic_id="", partitions=partitions)


class Process:
    """A process that runs until it is killed."""

    def __init__(self) -> None:
        self.code: int | None = None

    def kill(self) -> None:
        self.code = -9

    def poll(self) -> int | None:
        return self.code


def stored() -> list[dict[str, object]]:
    """The rows of `FLIGHTS` as a log keeps them."""
    ends = dict.fromkeys(range(demo.PARTITIONS), 0)
    rows: list[dict[str, object]] = []
    for carrier, value, time_ms in zip(CARRIERS, FLIGHTS.values, FLIGHTS.times_ms, strict=True):
        partition = PARTITION_OF[carrier]
        rows.append(
            {
                "partition": partition,
                "offset": ends[partition],
                "timestamp": time_ms * 1_000,
                "key": carrier.encode(),
                "value": value,
            }
        )
        ends[partition] += 1
    return rows


def holds(rows: list[dict[str, object]]) -> bool:
    """Returns true if the demonstration accepts these rows."""
    return demo.check_records(cast("Log", ReadLog(rows)), FLIGHTS).holds


def test_right_records() -> None:
    """The sent records, in order, are accepted."""
    assert holds(stored())


def _change_value(rows: list[dict[str, object]]) -> None:
    rows[0]["value"] = b"{}"


def _change_time(rows: list[dict[str, object]]) -> None:
    rows[0]["timestamp"] = 17


def _swap_order(rows: list[dict[str, object]]) -> None:
    rows[0]["value"], rows[2]["value"] = rows[2]["value"], rows[0]["value"]


def _swap_offsets(rows: list[dict[str, object]]) -> None:
    rows[0]["offset"], rows[2]["offset"] = rows[2]["offset"], rows[0]["offset"]


def _lose_last(rows: list[dict[str, object]]) -> None:
    del rows[-1]


def _lose_carrier(rows: list[dict[str, object]]) -> None:
    rows[:] = [row for row in rows if row["partition"] != 0]


def _double_one(rows: list[dict[str, object]]) -> None:
    rows.append({**rows[-1], "offset": 3})


def _split_carrier(rows: list[dict[str, object]]) -> None:
    rows[-1].update(partition=2, offset=0)


@pytest.mark.parametrize(
    "spoil",
    [
        _change_value,
        _change_time,
        _swap_order,
        _swap_offsets,
        _lose_last,
        _lose_carrier,
        _double_one,
        _split_carrier,
    ],
)
def test_wrong_records(spoil: Callable[[list[dict[str, object]]], None]) -> None:
    """A record that is changed, lost, doubled, out of order or out of place is noticed."""
    rows = stored()
    spoil(rows)
    assert not holds(rows)


def kill_with(rows: list[dict[str, object]], *, leaders: Sequence[int] = (1, 2, 3, 2)) -> Kill:
    """Returns a kill that is due after three records; broker 2 leads most partitions."""
    brokers = [
        Broker(id=member, address="", process=cast("subprocess.Popen[str]", Process()))
        for member in demo.MEMBERS
    ]
    return Kill(cast("Log", ReadLog(rows, leaders)), brokers, after=3)


def places(rows: list[dict[str, object]]) -> list[tuple[int, int]]:
    """Returns partition and offset of each record of `FLIGHTS`, by its value."""
    found = {row["value"]: cast("Any", (row["partition"], row["offset"])) for row in rows}
    return [found[value] for value in FLIGHTS.values]


def check_acks(rows: list[dict[str, object]], kill: Kill) -> demo.Check:
    """Returns the check of these rows against the acks of those that were `stored`."""
    return demo.check_acks(cast("Log", ReadLog(rows)), FLIGHTS, places(stored()), kill)


def test_kill_of_the_broker_that_leads_most() -> None:
    """It happens once, when it is due, and to that broker only."""
    kill = kill_with(stored())
    assert not kill.is_due(2)
    assert kill.is_due(4)
    assert kill.do() == "broker 2, which leads partitions [1, 3]"
    assert not kill.is_due(5)
    assert [each.process.poll() for each in kill.brokers] == [None, -9, None]
    assert kill.others_ended() == []
    kill.brokers[2].process.kill()
    assert kill.others_ended() == [3]


def test_time_without_an_ack() -> None:
    """It ends when each partition of the killed broker has acked a record that was sent later."""
    kill = kill_with(stored())
    kill.do()
    at = kill.at

    def ack(partition: int, sent: float, acked: float) -> Ack:
        return Ack(partition=partition, sent=at + sent, acked=at + acked)

    acks = [
        ack(1, -0.5, -0.4),
        ack(1, -0.1, 0.001),  # by the killed broker, on its way at the time
        ack(0, 0.1, 0.2),  # another broker leads the partition
        ack(3, 0.1, 0.75),
        ack(1, 0.2, 1.5),
        ack(1, 0.1, 1.25),
        ack(1, 2.0, 2.1),
    ]
    assert kill.seconds_without_ack(acks) == pytest.approx(1.25)
    assert kill.seconds_without_ack(acks[:4]) == math.inf


def test_acked_records_are_where_their_acks_say() -> None:
    """All of them are counted, and no other broker may have ended."""
    kill = kill_with(stored())
    kill.do()
    right = check_acks(stored(), kill)
    assert (right.holds, right.found) == (True, "6 of 6 records are where their acks say")
    kill.brokers[0].process.kill()
    ended = check_acks(stored(), kill)
    assert not ended.holds
    assert ended.found.endswith("; brokers [1] have ended too")


@pytest.mark.parametrize(
    "spoil", [_change_value, _swap_order, _swap_offsets, _lose_last, _lose_carrier, _split_carrier]
)
def test_acked_records_that_are_elsewhere(
    spoil: Callable[[list[dict[str, object]]], None],
) -> None:
    """A record that is changed, lost or moved after its ack is noticed."""
    kill = kill_with(stored())
    kill.do()
    rows = stored()
    spoil(rows)
    assert not check_acks(rows, kill).holds


def test_delays_by_pandas() -> None:
    """Cancelled flights count as flights and not as delays."""
    found = demo.delays_by_pandas(FLIGHTS)
    assert found["UA"] == Delays(flights=3, mean_minutes=2.5, worst_minutes=4.0)
    assert found["B6"].flights == 1
    assert math.isnan(found["B6"].mean_minutes)


def test_delays_are_compared() -> None:
    """Figures may differ by the order of additions and by nothing else; no carrier may lack."""
    right = demo.delays_by_pandas(FLIGHTS)
    assert demo.check_delays(dict(right), right).holds
    almost = Delays(flights=3, mean_minutes=2.5 + 1e-15, worst_minutes=4.0)
    assert demo.check_delays({**right, "UA": almost}, right).holds
    for wrong in (
        Delays(flights=2, mean_minutes=2.5, worst_minutes=4.0),
        Delays(flights=3, mean_minutes=2.6, worst_minutes=4.0),
        Delays(flights=3, mean_minutes=2.5, worst_minutes=math.nan),
    ):
        check = demo.check_delays({**right, "UA": wrong}, right)
        assert (check.holds, check.found) == (False, "differ for UA")
    assert not demo.check_delays({"UA": right["UA"]}, right).holds
    assert not demo.check_delays({**right, "XX": right["UA"]}, right).holds


def test_disk_use(tmp_path: Path) -> None:
    """Published bytes are counted by commit, live bytes by the last commit."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    commits: list[list[dict[str, object]]] = [
        [{"add": {"path": "a", "size": 100, "dataChange": True}}],
        [{"add": {"path": "b", "size": 50, "dataChange": True}}, {"txn": {"version": 1}}],
        [
            {"remove": {"path": "a", "dataChange": False}},
            {"remove": {"path": "b", "dataChange": False}},
            {"add": {"path": "c", "size": 120, "dataChange": False}},
        ],
    ]
    for version, actions in enumerate(commits):
        lines = "\n".join(json.dumps(action) for action in actions)
        (log / f"{version:020d}.json").write_text(lines)
    found = demo.disk_use(tmp_path)
    assert found == Disk(published_files=2, published_bytes=150, files=1, bytes=120)
    assert demo.check_disk(found, 1_000).holds
    assert not demo.check_disk(found, 900).holds


# ------------------------------------------------------------------------------ waiting


class Query:
    """A streaming query that runs."""

    def exception(self) -> None:
        return None


def delays_of(flights: int) -> dict[str, Delays]:
    """A result of the query with so many flights."""
    return {"UA": Delays(flights=flights, mean_minutes=1.0, worst_minutes=2.0)}


def test_a_slow_query_is_waited_for_as_long_as_it_counts_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine makes the query slow, and nothing is wrong."""
    monkeypatch.setattr(demo, "_CATCH_UP_SECONDS", 1.0)
    board = demo.Board(total=8)
    stopping = threading.Event()

    def count() -> None:
        for flights in range(1, 9):
            stopping.wait(0.3)
            board.show_result(delays_of(flights))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        board.wait_until_counted(8, cast("Any", Query()))
    finally:
        stopping.set()
        counting.join()


def test_a_query_that_counts_nothing_more_ends_the_demonstration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says how far the query is, and what to do."""
    monkeypatch.setattr(demo, "_CATCH_UP_SECONDS", 0.1)
    board = demo.Board(total=8)
    board.show_result(delays_of(3))
    with pytest.raises(SystemExit, match="3 of 8 flights") as raised:
        board.wait_until_counted(8, cast("Any", Query()))
    assert "Run it again" in str(raised.value)
