"""The bounds on open streams of the Flight listener."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from sparklog import errors
from sparklog.broker.streams import Stream, StreamBounds, Streams
from sparklog.clock import ManualClock

BOUNDS = StreamBounds(
    streams=32,
    held_bytes=1_000,
    message_bytes=100,
    idle_seconds=600.0,
    idle_short_seconds=5.0,
    pressed_seconds=5.0,
)


class Connections:
    """What each has received, as a test says it, and which were cut."""

    def __init__(self) -> None:
        self.received: dict[str, int] = {}
        self.cuts: list[str] = []

    def received_bytes(self) -> Mapping[str, int]:
        return self.received

    def cut(self, peer: str) -> None:
        self.cuts.append(peer)


class Listener:
    """Streams that stay open until the test ends."""

    def __init__(self, bounds: StreamBounds = BOUNDS) -> None:
        self.clock = ManualClock()
        self.connections = Connections()
        self.streams = Streams(bounds, clock=self.clock, connections=self.connections)
        self.open = ExitStack()

    def stream(self, peer: str, *, sends: bool = True) -> Stream:
        return self.open.enter_context(self.streams.open(peer, sends=sends))

    def cuts_after(self, seconds: float) -> list[str]:
        """Who is cut within so much time."""
        self.clock.advance(seconds)
        self.streams.tick()
        found, self.connections.cuts = self.connections.cuts, []
        return found


@pytest.fixture(name="listener")
def _listener() -> Listener:
    return Listener()


def test_streams_beyond_the_bound_are_refused(listener: Listener) -> None:
    """They are taken again once others have ended."""
    for number in range(BOUNDS.streams):
        listener.stream(f"p{number}")
    with pytest.raises(errors.TooManyStreams, match=r"flight\.max_streams") as refused:
        listener.stream("more")
    assert isinstance(refused.value, errors.Retriable)
    listener.open.close()
    listener.stream("more")


def test_stream_that_waits_for_long_is_cut(listener: Listener) -> None:
    """Whether for a message or a reader; one that went on since has the whole time again."""
    idle, unread, busy = (listener.stream(name) for name in ("idle", "unread", "busy"))
    for each in (idle, unread, busy):
        each.waits()
    assert listener.cuts_after(BOUNDS.idle_seconds - 1) == []
    busy.goes_on()
    assert sorted(listener.cuts_after(2)) == ["idle", "unread"]
    busy.waits()
    assert "busy" not in listener.cuts_after(BOUNDS.idle_seconds - 1)


def test_some_that_wait_make_room_where_one_was_refused(listener: Listener) -> None:
    """Those that have waited longest go, no more than are needed, and none that works."""
    for number in range(BOUNDS.streams):
        if number:
            listener.stream(f"p{number}").waits()
        else:
            listener.stream("works")
        listener.clock.advance(0.1)
    assert listener.cuts_after(60) == []
    with pytest.raises(errors.TooManyStreams):
        listener.stream("more")
    assert listener.cuts_after(0) == ["p1", "p2"]
    assert listener.cuts_after(60) == []


def test_short_waits_are_nobodys_fault(listener: Listener) -> None:
    """However short streams are, a client has some seconds."""
    for number in range(BOUNDS.streams):
        listener.stream(f"p{number}").waits()
    with pytest.raises(errors.TooManyStreams):
        listener.stream("more")
    assert listener.cuts_after(BOUNDS.idle_short_seconds - 1) == []


def test_rows_that_nobody_reads_are_bounded(listener: Listener) -> None:
    """Streams whose clients do not read go first that have waited longest, until it is enough."""
    for number in range(5):
        listener.stream(f"p{number}", sends=False).waits(400)
        listener.clock.advance(0.1)
    listener.stream("holds nothing").waits()
    assert listener.cuts_after(4) == []
    assert listener.cuts_after(2) == ["p0", "p1", "p2"]


def test_message_without_an_end_is_cut(listener: Listener) -> None:
    """What has come since the last whole message is counted, of each connection for itself."""
    growing, steady = listener.stream("growing"), listener.stream("steady")
    for each in (growing, steady):
        each.waits()
    received = listener.connections.received
    received |= {"growing": 0, "steady": 90}
    assert listener.cuts_after(1) == []
    for _ in range(5):
        received["growing"] += 20
        received["steady"] += 90
        steady.goes_on()
        assert listener.cuts_after(1) == []
    received["growing"] += 1
    steady.goes_on()
    assert listener.cuts_after(1) == ["growing"]
    received["growing"] += 1_000
    assert listener.cuts_after(1) == []  # it is on its way out


def test_request_without_an_end_is_cut(listener: Listener) -> None:
    """Also where no stream is open; requests and streams that have ended count as progress."""
    received = listener.connections.received
    received["p"] = 50
    listener.streams.tick()
    for step in range(4):
        received["p"] += 90
        if step % 2:
            listener.streams.came("p")
        else:
            with listener.streams.open("p", sends=True) as stream:
                stream.goes_on()
        assert listener.cuts_after(1) == []
    received["p"] += 101
    assert listener.cuts_after(1) == ["p"]
    del received["p"]
    assert listener.cuts_after(1) == []
    received["p"] = 100  # another connection, of the same name
    assert listener.cuts_after(1) == []
    received["p"] = 101
    assert listener.cuts_after(1) == ["p"]


def test_streams_of_one_connection_share_it(listener: Listener) -> None:
    """Each may have a message on its way."""
    for _ in range(3):
        listener.stream("p").waits()
    listener.connections.received["p"] = 0
    assert listener.cuts_after(1) == []
    listener.connections.received["p"] = 300
    assert listener.cuts_after(1) == []
    listener.connections.received["p"] = 301
    assert listener.cuts_after(1) == ["p"]
