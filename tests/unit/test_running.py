"""The signals of a broker that is a whole process."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sparklog import errors, pandas_import
from sparklog.broker import running
from sparklog.broker.running import _Signals, _StoppedEarly
from sparklog.settings import BrokerSettings
from tests.support.waiting import time_with


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(each) for each in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class FakeAgent:
    """An agent that notes its stops."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def stop_soon(self, reason: str, **_: Any) -> None:
        self.reasons.append(reason)


def test_a_signal_ends_a_start() -> None:
    """Wherever the start is; afterwards a signal stops the broker in good order."""
    signals, agent = _Signals(()), FakeAgent()
    signals.interrupt_start()
    with pytest.raises(_StoppedEarly, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)
    signals = _Signals(())
    signals.interrupt_start()
    signals.stop(agent)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGTERM)
    assert agent.reasons == ["SIGTERM"]


@pytest.mark.parametrize(
    ("before", "reasons"), [(signal.SIG_DFL, ["SIGHUP"]), (signal.SIG_IGN, [])]
)
def test_a_hangup_stops_a_broker_unless_it_is_ignored(
    before: signal.Handlers, reasons: list[str]
) -> None:
    """A closed terminal stops it in good order, and `nohup` keeps it running."""
    signal.signal(signal.SIGHUP, before)
    signals, agent = _Signals(()), FakeAgent()
    signals.interrupt_start()
    signals.stop(agent)  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGHUP)
    assert agent.reasons == reasons


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_callback_from_c_is_not_lost() -> None:
    """Python prints an exception that is raised there, and continues; compilers have such calls."""
    signals, agent = _Signals(()), FakeAgent()
    signals.interrupt_start()

    ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()
    with pytest.raises(_StoppedEarly, match="SIGTERM"):
        signals.stop(agent)  # type: ignore[arg-type]
    assert agent.reasons == []


FENCED = errors.BrokerFenced(broker=1, epoch=1)
OUTAGE = errors.StorageUnavailable(operation="get", path="meta", reason="no answer")
IN_USE = errors.BrokerAlive(root="r", leader="broker 1")


@pytest.mark.parametrize(
    ("ends", "may_return", "raised"),
    [
        ([FENCED, None], True, None),
        ([FENCED], False, FENCED),
        ([OUTAGE], True, OUTAGE),
        ([FENCED, OUTAGE, OUTAGE, None], True, None),
        ([FENCED, OUTAGE, IN_USE], True, IN_USE),
    ],
    ids=["fenced", "replaced", "outage at the first start", "outage", "its id is in use"],
)
def test_a_broker_that_was_fenced_joins_again(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[errors.SparklogError | None],
    may_return: bool,
    raised: errors.SparklogError | None,
) -> None:
    """Also if the store, whose outage has made it silent, is still not there."""
    left = list(ends)

    def run(*_: Any, **__: Any) -> None:
        if (error := left.pop(0)) is not None:
            raise error

    agent = SimpleNamespace(may_return=lambda: may_return)
    monkeypatch.setattr(running, "Agent", lambda *_, **__: agent)
    monkeypatch.setattr(running, "_run", run)
    monkeypatch.setattr(running, "configure", lambda *_, **__: None)
    monkeypatch.setattr(pandas_import, "block", lambda: None)
    monkeypatch.setattr(running, "time", time_with(sleep=lambda _: None))
    settings = BrokerSettings(root="memory://", id=1)
    if raised is None:
        running.run_broker(settings)
    else:
        with pytest.raises(type(raised)):
            running.run_broker(settings)
    os.kill(os.getpid(), signal.SIGTERM)  # while the process ends, and says why
    assert not left
