"""Waits for conditions that other threads or processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

PATIENCE_SECONDS: Final = 90.0
"""Many times as long as anything takes on an idle machine, but less than the limit of a test."""

_LOOK_SECONDS: Final = 0.05


def wait_until(
    met: Callable[[], bool],
    what: str,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    look_seconds: float = _LOOK_SECONDS,
) -> None:
    """Polls a condition; fails after a long time, with a message that names `what`.

    Args:
        look_seconds: between two polls; longer if a poll starts a program.
    """
    deadline = time.monotonic() + patience_seconds
    while not met():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(look_seconds)


def time_with(**replaced: Callable[..., Any]) -> SimpleNamespace:
    """Returns the module `time` with some functions replaced, to replace that name in one module.

    Other threads call the functions of `time` itself, where a replacement would affect them.
    """
    return SimpleNamespace(**{**vars(time), **replaced})
