"""Open file descriptors of this process."""

from __future__ import annotations

import contextlib
from pathlib import Path


def sockets() -> set[str]:
    """The sockets that are open, each by a name that no other has."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(str(each.readlink()))
    return {name for name in found if name.startswith("socket:")}
