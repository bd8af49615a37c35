"""Options of Spark's readers and writers: text by name, in whatever case Spark hands them on.

An option that nobody knows is refused by name, with the nearest that exists. `storage.*` goes to
the object store as it is. The root is an option too: `root`, the path given to `load` or `save`, or
the environment's `SPARKLOG_ROOT`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

from sparklog import errors

ROOT_VARIABLE: Final = "SPARKLOG_ROOT"
_STORAGE: Final = "storage."


class Options:
    """What one reader or writer was given, under the options' right names.

    Args:
        where: who was given them, as an error shall call it.
        given: as Spark hands them on.
        known: the options that there are, besides `root`, `path` and `storage.*`.

    Raises:
        errors.UnknownOption: one is not known.
        errors.BadOption: there is no root, or there are two.
    """

    def __init__(self, where: str, given: Mapping[str, str], known: Iterable[str]) -> None:
        names = {name.lower(): name for name in ("root", "path", *known)}
        self._values: dict[str, str] = {}
        self.storage: dict[str, str] = {}
        for option, value in given.items():
            lowered = option.lower()
            if lowered.startswith(_STORAGE):
                self.storage[lowered.removeprefix(_STORAGE)] = value
            elif lowered in names:
                self._values[names[lowered]] = value
            else:
                raise errors.UnknownOption.among(where, option, [*names.values(), f"{_STORAGE}*"])
        self.root = self._root()

    def _root(self) -> str:
        root, path = self._values.get("root"), self._values.get("path")
        if root and path and root != path:
            raise errors.BadOption(option="path", value=path, reason=f"root = {root!r} says other")
        found = root or path or os.environ.get(ROOT_VARIABLE)
        if not found:
            reason = f"name a folder or s3://, gs://, az://; or set {ROOT_VARIABLE}"
            raise errors.BadOption(option="root", value=found, reason=reason)
        return found

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str, *, default: bool) -> bool:
        """Raises `BadOption` for anything but true and false."""
        value = self._values.get(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise errors.BadOption(option=name, value=value, reason="expected true or false")
        return value.lower() == "true"

    def count(self, name: str) -> int | None:
        """A whole number from 1 up. Raises `BadOption` for anything else."""
        value = self._values.get(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            raise errors.BadOption(option=name, value=value, reason="expected a number from 1 up")
        return int(value)

    def names(self, name: str) -> tuple[str, ...]:
        """What stands between commas, each once."""
        parts = (part.strip() for part in (self._values.get(name) or "").split(","))
        return tuple(dict.fromkeys(part for part in parts if part))

    def refuse(self, name: str, reason: str) -> None:
        """Raises `BadOption` where the option was given."""
        value = self._values.get(name)
        if value is not None:
            raise errors.BadOption(option=name, value=value, reason=reason)
