"""The folder for loops compiled by numba, so that a machine compiles them only once.

It is alongside the package or in the user's cache folder, as numba chooses. In a read-only
installation where neither is writable, it is a folder of this user in the system's temporary
folder. If that is not possible either, there is none, and each process compiles the loops again;
numba on its own would refuse to compile (https://github.com/numba/numba/issues/5566).

The files there are executed, so a folder that another user owns or can write to is not used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def folder_for(loop: Callable[..., Any]) -> Path | None:
    """Sets the folder for the compiled loops of `loop`'s file; None if there is none."""
    found = _folder_for(loop)
    if found is None and (own := _own_folder()) is not None:
        numba.config.CACHE_DIR = str(own)  # type: ignore[attr-defined]
        found = _folder_for(loop)
    return found


def is_temporary(folder: Path) -> bool:
    """Returns true if the folder is in the system's temporary one, for lack of a better place."""
    return folder.is_relative_to(_place())


def _folder_for(loop: Callable[..., Any]) -> Path | None:
    try:
        found = numba.njit(cache=True)(loop).stats.cache_path
        return Path(found) if found is not None else None
    except RuntimeError:  # numba says: no locator available
        return None


def _place() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"sparklog-loops-{user}"


def _own_folder() -> Path | None:
    """Returns a folder that only this user can write to, and creates it if needed."""
    try:
        place = _place()
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
    except OSError:
        return None
    is_ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    is_closed = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    return place if is_ours and is_closed else None
