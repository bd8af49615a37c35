"""The sender's decisions: no thread, no socket, no clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparklog import errors, limits
from sparklog.client.producer.batch import PartitionBatch
from sparklog.client.producer.schedule import (
    NEVER,
    STREAM_IDLE_SECONDS,
    EndStream,
    GetProducerId,
    OpenStream,
    Route,
    SendSchedule,
    Sleep,
    Step,
    Stop,
    StreamState,
    Work,
    Write,
)
from sparklog.formats import flight_messages

WAIT_SECONDS = 3.0
BUSY = errors.QueueFull(queue="writer", bytes=1, setting="x")
TOO_LARGE = errors.RecordTooLarge(bytes=2, limit_bytes=1)
GONE = errors.BrokerUnavailable(address="a:1", reason="the connection broke")
LATE = errors.TimedOut(what="delivery", timeout_seconds=1)

Schedule = SendSchedule[StreamState]


class FixedBackoff:
    """Waits `WAIT_SECONDS` each time."""

    def next_seconds(self, error: errors.SparklogError) -> float:
        return WAIT_SECONDS

    def reset(self) -> None:
        pass


def _part(partition: int = 0, *, deadline: float = NEVER, columns: str = "value") -> PartitionBatch:
    batch: Any = SimpleNamespace(deadline=deadline)
    payload = pa.RecordBatch.from_pydict({name: [b"x"] for name in columns.split()})
    return PartitionBatch(batch, partition, payload, None)


def _schedule(*leaders: int, refresh_at: float = NEVER) -> Schedule:
    schedule: Schedule = SendSchedule("t", FixedBackoff)
    schedule.set_leaders(leaders or (0,), refresh_at=refresh_at)
    return schedule


def _route(schedule: Schedule, broker: int = 0) -> Route[StreamState]:
    [route] = [each for each in schedule.routes if each.broker == broker]
    return route


def _write(schedule: Schedule, now: float = 1.0, *, broker: int = 0) -> list[PartitionBatch]:
    """Carries out the decisions of one route, and returns the batches that were written."""
    route, written = _route(schedule, broker), []
    while (step := schedule.next_write(route, now)) is not None:
        match step:
            case GetProducerId(partition):
                identity = flight_messages.ProducerIdentity(producer_id=1)
                schedule.producer_id_granted(partition, identity)
            case OpenStream(of, columns):
                schedule.stream_opened(of, StreamState(columns))
            case Write():
                written += [part for part, _ in step.batches]
            case EndStream():
                break
    return written


def _stream(schedule: Schedule, broker: int = 0) -> StreamState:
    stream = _route(schedule, broker).stream
    assert stream is not None
    return stream


def _step(schedule: Schedule, now: float, **state: Any) -> Step:
    usual: dict[str, Any] = {
        "is_signalled": False,
        "is_ending": False,
        "has_undecided": True,
        "open_due": NEVER,
        "idle_since": now,
    }
    return schedule.next_step(now, **(usual | state))


# ------------------------------------------------------------------------------ the thread's step


def test_sleep_until_the_linger_is_over() -> None:
    """The thread sleeps until the open batch is due, and then seals it."""
    schedule = _schedule()
    assert schedule.is_give_up_check_due(10.0)
    assert _step(schedule, 10.0, open_due=10.05) == Sleep(10.05)
    assert _step(schedule, 10.05, open_due=10.05) == Work(seals=True)


def test_sleep_until_a_retry() -> None:
    """The thread sleeps until the first delayed partition may send again."""
    schedule = _schedule()
    schedule.add(_part())
    _write(schedule, 1.0)
    schedule.answered(_route(schedule), _stream(schedule), BUSY, 1.0)
    assert schedule.is_give_up_check_due(1.0 + WAIT_SECONDS - 0.01)
    assert _step(schedule, 1.0 + WAIT_SECONDS - 0.01) == Sleep(1.0 + WAIT_SECONDS)


def test_sleep_until_late_batches_are_looked_for() -> None:
    """Undecided batches are looked at every tenth of a second, and no more often."""
    schedule = _schedule()
    assert _step(schedule, 5.0) == Work()
    assert schedule.is_give_up_check_due(5.0)
    assert not schedule.is_give_up_check_due(5.09)
    step = _step(schedule, 5.0)
    assert isinstance(step, Sleep)
    assert step.until == pytest.approx(5.1)


def test_signal_is_work() -> None:
    """A signal ends the sleep at once."""
    assert _step(_schedule(), 1.0, is_signalled=True, has_undecided=False) == Work()


def test_metadata_that_is_too_old() -> None:
    """Metadata is asked for again when its time is over."""
    schedule = _schedule(refresh_at=8.0)
    assert _step(schedule, 7.9, is_signalled=True) == Work()
    assert _step(schedule, 8.0, is_signalled=True) == Work(refreshes=True)


def test_idle_thread_ends() -> None:
    """A thread without batches ends after a while, or at once when it is to end."""
    schedule = _schedule()
    end = 1.0 + STREAM_IDLE_SECONDS
    assert _step(schedule, 1.0, has_undecided=False, idle_since=1.0) == Sleep(end)
    assert _step(schedule, end, has_undecided=False, idle_since=1.0) == Stop()
    assert _step(schedule, 1.0, has_undecided=False, is_ending=True) == Stop()
    assert _step(schedule, 1.0, has_undecided=False, is_ending=True, is_signalled=True) == Stop()
    assert _step(schedule, 1.0, is_ending=True, is_signalled=True) == Work()


# ------------------------------------------------------------------------------ writing


def test_first_write() -> None:
    """A partition gets a producer id, then its route a stream, and then its batches go."""
    schedule = _schedule()
    first, second = _part(), _part()
    schedule.add(first)
    schedule.add(second)
    route = _route(schedule)
    step = schedule.next_write(route, 1.0)
    assert isinstance(step, GetProducerId)
    assert schedule.next_write(route, 1.0) == step  # it stays due
    identity = flight_messages.ProducerIdentity(producer_id=7)
    schedule.producer_id_granted(step.partition, identity)
    assert schedule.next_write(route, 1.0) == OpenStream(route, frozenset({"value"}))
    stream = StreamState(frozenset({"value"}))
    schedule.stream_opened(route, stream)
    step = schedule.next_write(route, 1.0)
    assert step == Write(stream, [(first, first.payload), (second, second.payload)], True)
    assert [(each.identity, each.sequence) for each in (first, second)] == [
        (identity, 0),
        (identity, 1),
    ]
    assert schedule.next_write(route, 1.0) is None


def test_partitions_take_turns() -> None:
    """Partitions of one route send one batch each in turn."""
    schedule = _schedule(0, 0)
    parts = [_part(number) for number in (0, 0, 0, 1, 1)]
    for part in parts:
        schedule.add(part)
    assert [each.partition for each in _write(schedule)] == [0, 1, 0, 1, 0]


def test_write_is_bounded() -> None:
    """One write takes 32 batches at most, and no partition has more than its window in flight."""
    schedule = _schedule(*[0] * 40)
    for number in range(40):
        for _ in range(limits.PRODUCER_WINDOW + 1):
            schedule.add(_part(number))
    route = _route(schedule)
    _write(schedule)
    written = [part for _, part in _stream(schedule).awaiting]
    assert len(written) == 40 * limits.PRODUCER_WINDOW
    for _ in range(40):
        schedule.answered(route, _stream(schedule), None, 1.0)
    step = schedule.next_write(route, 1.0)
    assert isinstance(step, Write)
    assert len(step.batches) == 32


def test_wider_batch_ends_the_stream() -> None:
    """A batch with more columns waits for a stream that has all columns used so far."""
    schedule = _schedule()
    schedule.add(_part())
    _write(schedule)
    route, narrow = _route(schedule), _stream(schedule)
    wide = _part(columns="key value")
    schedule.add(wide)
    assert schedule.next_write(route, 1.0) == EndStream(narrow)
    assert narrow.is_ending
    assert schedule.next_write(route, 1.0) is None
    schedule.answered(route, narrow, None, 1.0)
    assert schedule.stream_ended(route, narrow, None, 1.0) == []
    step = schedule.next_write(route, 1.0)
    assert step == OpenStream(route, frozenset({"key", "value"}))


def test_failed_route_waits() -> None:
    """A route that failed is not used before its wait is over."""
    schedule = _schedule()
    schedule.add(_part())
    route = _route(schedule)
    schedule.route_failed(route, GONE, 1.0)
    assert schedule.next_write(route, 1.0 + WAIT_SECONDS - 0.01) is None
    assert schedule.next_write(route, 1.0 + WAIT_SECONDS) is not None


def test_producer_id_that_is_refused_for_now() -> None:
    """A partition without a producer id waits, and lets the others send."""
    schedule = _schedule(0, 0)
    schedule.add(_part(0))
    schedule.add(_part(1))
    route = _route(schedule)
    step = schedule.next_write(route, 1.0)
    assert isinstance(step, GetProducerId)
    schedule.producer_id_failed(step.partition, BUSY, 1.0)
    assert [each.partition for each in _write(schedule)] == [1]
    schedule.retry_due(1.0 + WAIT_SECONDS)
    assert [each.partition for each in _write(schedule)] == [0]


# ------------------------------------------------------------------------------ answers


def test_ack() -> None:
    """An ack decides the oldest batch on the stream."""
    schedule = _schedule()
    first, second = _part(), _part()
    schedule.add(first)
    schedule.add(second)
    _write(schedule)
    route, stream = _route(schedule), _stream(schedule)
    assert schedule.answered(route, stream, None, 1.0) == [(first, None)]
    assert schedule.answered(route, stream, None, 1.0) == [(second, None)]


def test_refusal_that_may_pass() -> None:
    """A batch that is refused for now is sent again after a wait."""
    schedule = _schedule()
    part = _part()
    schedule.add(part)
    _write(schedule)
    assert schedule.answered(_route(schedule), _stream(schedule), BUSY, 1.0) == []
    assert _write(schedule, 1.0) == []
    schedule.retry_due(1.0 + WAIT_SECONDS)
    assert _write(schedule, 1.0 + WAIT_SECONDS) == [part]


def test_refusal_for_good() -> None:
    """A batch that is refused for good has that failure."""
    schedule = _schedule()
    part = _part()
    schedule.add(part)
    _write(schedule)
    decided = schedule.answered(_route(schedule), _stream(schedule), TOO_LARGE, 1.0)
    assert decided == [(part, TOO_LARGE)]


@pytest.mark.parametrize(
    "error", [errors.UnknownTopic(topic="t"), errors.TopicChanged(topic="t", expected="", found="")]
)
def test_topic_that_is_gone(error: errors.SparklogError) -> None:
    """A refusal because of the topic is known to the next caller, until there is new metadata."""
    schedule = _schedule()
    schedule.add(_part())
    _write(schedule)
    schedule.answered(_route(schedule), _stream(schedule), error, 1.0)
    assert schedule.topic_error is error
    schedule.set_leaders([0], refresh_at=NEVER)
    assert schedule.topic_error is None


def test_leader_that_moved() -> None:
    """A broker that does not lead makes the metadata stale; the batch goes to the new leader."""
    schedule = _schedule()
    part = _part()
    schedule.add(part)
    _write(schedule)
    moved = errors.NotLeader(topic="t", partition=0, leader=7)
    schedule.answered(_route(schedule), _stream(schedule), moved, 1.0)
    assert _step(schedule, 1.0, is_signalled=True) == Work(refreshes=True)
    schedule.set_leaders([7], refresh_at=NEVER)
    schedule.retry_due(1.0 + WAIT_SECONDS)
    assert _write(schedule, 1.0 + WAIT_SECONDS, broker=7) == [part]


def test_leader_changes_only_without_batches_in_flight() -> None:
    """A partition stays on its route until every batch in flight is answered."""
    schedule = _schedule()
    first, second = _part(), _part()
    schedule.add(first)
    _write(schedule)
    route, stream = _route(schedule), _stream(schedule)
    schedule.set_leaders([7], refresh_at=NEVER)
    schedule.add(second)
    assert list(route.ready) == [stream.awaiting[0][0]]
    schedule.stream_ended(route, stream, GONE, 1.0)
    schedule.set_leaders([7], refresh_at=NEVER)
    assert _write(schedule, broker=7) == [first, second]


def test_waiting_partitions_follow_the_leader() -> None:
    """A partition that waits for its turn moves to the new leader's route."""
    schedule = _schedule(0, 0)
    schedule.add(_part(0))
    schedule.add(_part(1))
    schedule.set_leaders([0, 7], refresh_at=NEVER)
    assert [each.partition for each in _write(schedule)] == [0]
    assert [each.partition for each in _write(schedule, broker=7)] == [1]


def test_broken_stream() -> None:
    """The batches on a stream that broke are sent again, in order."""
    schedule = _schedule()
    parts = [_part(), _part()]
    for part in parts:
        schedule.add(part)
    _write(schedule)
    route = _route(schedule)
    assert schedule.stream_ended(route, _stream(schedule), GONE, 1.0) == []
    assert route.stream is None
    assert _write(schedule) == parts


def test_refused_stream_of_one_batch() -> None:
    """A stream that was refused with one batch on it fails that batch."""
    schedule = _schedule()
    part = _part()
    schedule.add(part)
    _write(schedule)
    decided = schedule.stream_ended(_route(schedule), _stream(schedule), TOO_LARGE, 1.0)
    assert decided == [(part, TOO_LARGE)]


def test_refused_stream_of_several_batches() -> None:
    """After a refusal of several batches they are sent one by one, until one is acked."""
    schedule = _schedule()
    first, second, third = parts = [_part(), _part(), _part()]
    for part in parts:
        schedule.add(part)
    _write(schedule)
    route = _route(schedule)
    assert schedule.stream_ended(route, _stream(schedule), TOO_LARGE, 1.0) == []
    assert _write(schedule) == [first]
    schedule.answered(route, _stream(schedule), None, 1.0)
    assert _write(schedule) == [second, third]


def test_answer_of_a_stream_that_was_left() -> None:
    """Answers on a stream that is not the route's any more change nothing."""
    schedule = _schedule()
    part = _part(deadline=5.0)
    schedule.add(part)
    _write(schedule)
    stream = _stream(schedule)
    [(failed, failure)] = schedule.give_up(5.0, LATE).failed
    assert failed is part
    assert isinstance(failure, errors.OutcomeUnknown)
    assert schedule.answered(_route(schedule), stream, None, 5.0) == []
    assert schedule.stream_ended(_route(schedule), stream, GONE, 5.0) == []


# ------------------------------------------------------------------------------ giving up


def test_stream_that_does_not_answer() -> None:
    """When a batch in flight is given up, its stream is left and its other batches go again."""
    schedule = _schedule(0, 0)
    late, other = _part(0, deadline=5.0), _part(1)
    schedule.add(late)
    schedule.add(other)
    _write(schedule)
    stream = _stream(schedule)
    given_up = schedule.give_up(5.0, LATE)
    assert [part for part, _ in given_up.failed] == [late]
    assert given_up.abandoned == [stream]
    assert _route(schedule).stream is None
    assert _write(schedule) == [other]


def test_batch_that_was_never_sent_is_late() -> None:
    """A batch that was never sent fails as late, and no stream is left for it."""
    schedule = _schedule()
    part = _part(deadline=5.0)
    schedule.add(part)
    assert schedule.give_up(4.9, LATE).failed == []
    given_up = schedule.give_up(5.0, LATE)
    assert (given_up.failed, given_up.abandoned) == ([(part, LATE)], [])
    assert _write(schedule) == []


def test_clear() -> None:
    """After `clear` nothing is sent, and the caller has the streams to close."""
    schedule = _schedule()
    schedule.add(_part())
    _write(schedule)
    schedule.add(_part())
    stream = _stream(schedule)
    assert schedule.clear() == [stream]
    assert not schedule.has_ready
    assert _write(schedule) == []


def test_idle_streams_end() -> None:
    """An idle stream takes no more batches."""
    schedule = _schedule()
    schedule.add(_part())
    _write(schedule)
    assert schedule.has_stream
    stream = _stream(schedule)
    assert schedule.end_idle_streams() == [stream]
    assert not schedule.has_stream
