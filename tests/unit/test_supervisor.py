"""When the supervisor starts, stops and kills the processes of its brokers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sparklog.broker.supervisor import (
    PROCESS_RETRY_MAX_SECONDS,
    PROCESS_RETRY_SECONDS,
    PROCESS_STEADY_SECONDS,
    PROCESS_STOP_SECONDS,
    Ended,
    Event,
    Serves,
    StopRequested,
    Supervisor,
)
from sparklog.clock import ManualClock

BROKERS = (1, 2, 3)


@dataclass(slots=True)
class FakeChild:
    """A process that does nothing by itself."""

    is_first: bool
    calls: list[str] = field(default_factory=list)

    def stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")


class Machine:
    """A supervisor of processes that serve and end when a test says so."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.children: dict[int, list[FakeChild]] = {broker: [] for broker in BROKERS}
        self.refused: set[int] = set()
        """Brokers whose processes cannot be started."""
        self.lines: list[str] = []
        self.supervisor = Supervisor(
            BROKERS, self._start, clock=self.clock, tell=self.lines.append, root="/data"
        )

    def _start(self, broker: int, is_first: bool) -> FakeChild:
        if broker in self.refused:
            raise OSError("no memory")
        child = FakeChild(is_first)
        self.children[broker].append(child)
        return child

    @property
    def starts(self) -> list[int]:
        """The number of starts of each broker."""
        return [len(found) for found in self.children.values()]

    @property
    def calls(self) -> list[list[str]]:
        """The calls that the newest process of each broker got."""
        return [found[-1].calls for found in self.children.values()]

    def handle(self, *events: Event) -> None:
        for event in events:
            self.supervisor.handle(event)
            self.supervisor.tick()

    def serve(self, *brokers: int) -> None:
        self.handle(*(Serves(broker=each, line=f"broker {each} serves") for each in brokers))

    def end(self, broker: int, code: int) -> None:
        self.handle(Ended(broker=broker, code=code))

    def stop(self, reason: str = "SIGTERM") -> None:
        self.handle(StopRequested(reason=reason))


@pytest.fixture(name="machine")
def _machine() -> Machine:
    """A supervisor that has started three brokers, none of which serves yet."""
    machine = Machine()
    machine.supervisor.tick()
    return machine


@pytest.fixture(name="serving")
def _serving(machine: Machine) -> Machine:
    """A supervisor whose three brokers serve."""
    machine.serve(*BROKERS)
    return machine


def test_brokers_start_beside_each_other(machine: Machine) -> None:
    """All are started before one serves, each once; a line says so when all of them serve."""
    assert machine.starts == [1, 1, 1]
    machine.serve(2, 1)
    assert machine.lines == ["broker 2 serves", "broker 1 serves"]
    machine.serve(3)
    assert machine.lines[2:] == [
        "broker 3 serves",
        "sparklog serves /data with all its brokers: 1, 2, 3",
    ]
    assert machine.starts == [1, 1, 1]
    assert machine.supervisor.exit_code is None


def test_a_stop_is_for_all_at_once(serving: Machine) -> None:
    """All are stopped together, none is started again, and the code is 0 once all have ended."""
    serving.stop()
    assert serving.calls == [["stop"]] * 3
    for broker in BROKERS:
        assert serving.supervisor.exit_code is None
        serving.end(broker, 0)
        serving.clock.advance(3600.0)
    assert serving.supervisor.exit_code == 0
    assert serving.starts == [1, 1, 1]


def test_a_broker_that_dies_is_started_again(serving: Machine) -> None:
    """It is started at once, and the line that all serve comes again; the others continue."""
    serving.end(2, -9)
    assert serving.starts == [1, 2, 1]
    assert serving.calls == [[], [], []]
    serving.lines.clear()
    serving.serve(2)
    assert serving.lines[-1] == "sparklog serves /data with all its brokers: 1, 2, 3"
    assert serving.supervisor.exit_code is None


def test_only_a_first_start_replaces_others(serving: Machine) -> None:
    """`--take-over` is not for a restart, after which two brokers would take turns forever."""
    serving.end(2, 1)
    assert [child.is_first for child in serving.children[2]] == [True, False]


def test_pauses_grow(serving: Machine) -> None:
    """A broker that ends again and again, served or not, is started after growing pauses."""
    pauses = []
    for round_ in range(8):
        serving.end(2, 1)
        pause_seconds = 0.0
        while serving.starts[1] == round_ + 1:
            wait_seconds = serving.supervisor.pause_seconds()
            assert 0.0 < wait_seconds <= 1.0
            serving.clock.advance(wait_seconds)
            pause_seconds += wait_seconds
            serving.supervisor.tick()
        pauses.append(pause_seconds)
        if round_ % 2:
            serving.serve(2)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert serving.supervisor.exit_code is None
    assert serving.starts == [1, 9, 1]


def test_a_steady_broker_is_forgiven(serving: Machine) -> None:
    """A broker that has served for long is started at once again; the pauses of others stay."""
    for _ in range(3):
        for broker in (1, 2):
            serving.end(broker, 1)
            serving.clock.advance(PROCESS_RETRY_MAX_SECONDS)
            serving.supervisor.tick()
    serving.serve(2)
    serving.clock.advance(PROCESS_STEADY_SECONDS)
    serving.end(2, 1)
    serving.end(1, 1)  # it has run for as long, and has not served
    assert serving.starts == [4, 5, 1]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (-9, 137)])
def test_a_broker_that_cannot_start_ends_all(machine: Machine, code: int, expected: int) -> None:
    """A failure before a broker ever served stops the others, and its code is the supervisor's."""
    machine.serve(1)
    machine.end(2, code)
    assert machine.starts == [1, 1, 1]
    assert [machine.calls[0], machine.calls[2]] == [["stop"], ["stop"]]
    machine.end(3, 0)
    assert machine.supervisor.exit_code is None
    machine.end(1, 7)
    assert machine.supervisor.exit_code == expected


def test_a_process_that_cannot_be_created_ends_all() -> None:
    """Brokers that were started are stopped, and the others are not started any more."""
    machine = Machine()
    machine.refused = {2}
    machine.supervisor.tick()
    assert machine.starts == [1, 0, 0]
    assert machine.children[1][0].calls == ["stop"]
    machine.end(1, 0)
    assert machine.supervisor.exit_code == 1


def test_a_process_that_cannot_be_created_again_is_retried(serving: Machine) -> None:
    """A broker that has served waits until the machine can start processes again."""
    serving.refused = {2}
    serving.end(2, -9)
    serving.clock.advance(PROCESS_RETRY_SECONDS)
    serving.supervisor.tick()
    serving.refused = set()
    assert serving.starts == [1, 1, 1]
    serving.clock.advance(PROCESS_RETRY_MAX_SECONDS)
    serving.supervisor.tick()
    assert serving.starts == [1, 2, 1]
    assert serving.supervisor.exit_code is None


def test_a_broker_that_was_stopped_by_hand_while_it_started(machine: Machine) -> None:
    """It has not failed, so it is started again."""
    machine.end(2, 0)
    assert machine.starts == [1, 2, 1]
    assert machine.supervisor.exit_code is None


def test_an_unclean_stop_is_told(serving: Machine) -> None:
    """One broker that fails while all stop makes the supervisor's exit code that of the failure."""
    serving.stop()
    serving.end(1, 0)
    serving.end(2, 1)
    serving.end(3, 0)
    assert serving.supervisor.exit_code == 1


def test_a_second_signal_kills(serving: Machine) -> None:
    """Those that still stop are killed, and the exit code says so."""
    serving.stop("SIGINT")
    serving.end(1, 0)
    serving.stop("SIGINT")
    assert serving.calls == [["stop"], ["stop", "kill"], ["stop", "kill"]]
    serving.end(2, -9)
    serving.end(3, -9)
    assert serving.supervisor.exit_code == 137


def test_a_hangup_never_kills(serving: Machine) -> None:
    """One that follows another signal, as a closed terminal does, lets the brokers stop."""
    serving.stop()
    serving.handle(StopRequested(reason="SIGHUP", may_kill=False))
    assert serving.calls == [["stop"]] * 3


def test_the_first_signal_never_kills(machine: Machine) -> None:
    """A signal that arrives while brokers stop because of a failure lets them stop cleanly."""
    machine.serve(1, 3)
    machine.end(2, 1)
    machine.stop()
    assert [machine.calls[0], machine.calls[2]] == [["stop"], ["stop"]]
    machine.stop()
    assert [machine.calls[0], machine.calls[2]] == [["stop", "kill"]] * 2


def test_a_broker_that_does_not_stop_is_killed(serving: Machine) -> None:
    """Nothing waits for it forever, also without a second signal."""
    serving.stop()
    serving.end(1, 0)
    serving.clock.advance(PROCESS_STOP_SECONDS - 1.0)
    serving.supervisor.tick()
    assert serving.calls[1] == ["stop"]
    serving.clock.advance(1.0)
    serving.supervisor.tick()
    assert serving.calls == [["stop"], ["stop", "kill"], ["stop", "kill"]]
    serving.end(2, -9)
    serving.end(3, -9)
    assert serving.supervisor.exit_code == 137


def test_a_stop_before_all_serve(machine: Machine) -> None:
    """Brokers that start are stopped too; one that waits for its restart does not come back."""
    machine.serve(1, 2)
    for code in (1, 1):
        machine.end(1, code)
    machine.stop()
    machine.clock.advance(PROCESS_RETRY_MAX_SECONDS)
    machine.supervisor.tick()
    assert machine.starts == [2, 1, 1]
    assert [machine.calls[1], machine.calls[2]] == [["stop"], ["stop"]]
    machine.end(2, 0)
    machine.end(3, 0)
    assert machine.supervisor.exit_code == 0
