"""Waiting for what happens in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

PATIENCE_SECONDS: Final = 90.0
"""Many times what anything takes on a machine that has time for it; less than a test may take."""

_LOOK_SECONDS: Final = 0.05


def wait_until(
    met: Callable[[], bool],
    what: str,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    look_seconds: float = _LOOK_SECONDS,
) -> None:
    """Looks again and again; fails after a long time, saying `what` did not happen.

    Args:
        look_seconds: between two looks; more where a look starts a program.
    """
    deadline = time.monotonic() + patience_seconds
    while not met():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(look_seconds)


def time_with(**replaced: Callable[..., Any]) -> SimpleNamespace:
    """Returns the module `time` with other functions, to replace that name in one module.

    Other threads call the functions of `time` itself, and would meet a replacement there.
    """
    return SimpleNamespace(**{**vars(time), **replaced})
