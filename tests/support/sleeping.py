"""Prints its pid and its parent's, and waits for a signal."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    print(os.getpid(), os.getppid(), flush=True)  # noqa: T201
    signal.pause()
