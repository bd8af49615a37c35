"""The bounds on open streams of the Flight listener."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sparklog import errors
from sparklog.broker.flight.streams import OpenStream, OpenStreams, StreamBounds
from sparklog.clock import ManualClock

BOUNDS = StreamBounds(
    streams=32,
    held_bytes=1_000,
    idle_seconds=600.0,
    idle_short_seconds=5.0,
    pressed_seconds=5.0,
)


class Listener:
    """Streams that stay open until the test ends."""

    def __init__(self, bounds: StreamBounds = BOUNDS) -> None:
        self.clock = ManualClock()
        self.cuts: list[str] = []
        self.is_short = False
        self.streams = OpenStreams(bounds, clock=self.clock, is_short=lambda: self.is_short)
        self.open = ExitStack()

    def stream(self, peer: str, *, sends: bool = True) -> OpenStream:
        return self.open.enter_context(
            self.streams.open(peer, sends=sends, cut=lambda: self.cuts.append(peer))
        )

    def cuts_after(self, seconds: float) -> list[str]:
        """Returns the streams that are cut within that time."""
        self.clock.advance(seconds)
        self.streams.tick()
        found, self.cuts = self.cuts, []
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
    """It is cut whether it waits for a message or a reader; progress restarts the time."""
    idle, unread, busy = (listener.stream(name) for name in ("idle", "unread", "busy"))
    for each in (idle, unread, busy):
        each.waits()
    assert listener.cuts_after(BOUNDS.idle_seconds - 1) == []
    busy.advance()
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


def test_unread_rows_are_bounded(listener: Listener) -> None:
    """The streams that have waited longest are ended first, until enough memory is free."""
    for number in range(5):
        listener.stream(f"p{number}", sends=False).waits(400)
        listener.clock.advance(0.1)
    listener.stream("holds nothing").waits()
    assert listener.cuts_after(4) == []
    assert listener.cuts_after(2) == ["p0", "p1", "p2"]


def test_rows_are_read_within_seconds_while_memory_is_short(listener: Listener) -> None:
    """Only streams that hold rows are ended."""
    listener.stream("holds", sends=False).waits(400)
    listener.stream("holds nothing").waits()
    assert listener.cuts_after(BOUNDS.idle_short_seconds + 1) == []
    listener.is_short = True
    assert listener.cuts_after(0) == ["holds"]
