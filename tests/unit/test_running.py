"""The signals of a broker that is a whole process."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from sparklog.broker.running import _Signals, _StoppedEarly


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_callback_from_c_is_not_lost() -> None:
    """Python prints an exception that is raised there, and continues; compilers have such calls."""
    signals, agent = _Signals(()), FakeAgent()
    signals.interrupt_start()

    ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()
    with pytest.raises(_StoppedEarly, match="SIGTERM"):
        signals.stop(agent)  # type: ignore[arg-type]
    assert agent.reasons == []
