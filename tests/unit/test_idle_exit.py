"""When a broker that was started on demand is idle."""

from __future__ import annotations

from dataclasses import dataclass

from sparklog.broker.idle_exit import IdleExit
from sparklog.clock import ManualClock


@dataclass
class Listener:
    """The calls of clients."""

    calls: int = 0
    open_calls: int = 0


class World:
    """A broker with records that wait to be published."""

    def __init__(self, after_seconds: float) -> None:
        self.clock = ManualClock()
        self.flight = Listener()
        self.waiting = 0
        self.reasons: list[str] = []
        self.idle = IdleExit(
            after_seconds=after_seconds,
            clock=self.clock,
            publish_all=lambda: self.waiting > 0,
            stop_soon=self.reasons.append,
        )

    def stops_after(self, seconds: float) -> bool:
        """Returns whether the broker stops at its next heartbeat, so many seconds later."""
        self.clock.advance(seconds)
        return self.idle.tick(self.flight)


def test_each_call_begins_the_idle_time_again() -> None:
    """A call that is over, between two heartbeats, counts like one that is open."""
    world = World(after_seconds=10.0)
    assert not world.stops_after(11.0), "the time begins once the listener is open"
    world.flight.calls += 1
    assert not world.stops_after(9.0)
    assert not world.stops_after(9.0)
    world.flight.open_calls = 1
    assert not world.stops_after(9.0)
    assert not world.stops_after(9.0)
    world.flight.open_calls = 0
    assert not world.stops_after(9.0)
    assert world.stops_after(2.0)
    assert world.reasons == ["no client for 11 s"]


def test_an_idle_broker_stops_once_nothing_waits() -> None:
    """Records that wait for publication delay the stop, but do not end the idle time."""
    world = World(after_seconds=10.0)
    world.stops_after(0.0)
    world.waiting = 1
    assert not world.stops_after(11.0)
    world.waiting = 0
    assert world.stops_after(0.1)


def test_a_broker_without_an_idle_time_never_stops() -> None:
    """`liveness.idle_exit_seconds=0`, the default."""
    world = World(after_seconds=0.0)
    world.stops_after(0.0)
    assert not world.stops_after(1e9)
    assert world.reasons == []
