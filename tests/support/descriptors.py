"""Open file descriptors of this process."""

from __future__ import annotations

import contextlib
from pathlib import Path


def sockets() -> set[str]:
    """The open sockets, each by a unique name."""
    return {name for name in _open() if name.startswith("socket:")}


def below(folder: Path) -> list[str]:
    """The open files and folders below a folder, once per descriptor."""
    return sorted(name for name in _open() if Path(name).is_relative_to(folder))


def _open() -> list[str]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(str(each.readlink()))
    return found
