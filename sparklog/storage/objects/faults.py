"""Hooks into store operations that raise errors, block, or delay. For tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from sparklog.clock import Clock

Operation: TypeAlias = Literal[
    "put_new",
    "put",
    "get",
    "get_range",
    "open",
    "stat",
    "list_after",
    "folders",
    "walk",
    "delete",
    "sync_folder",
    "sync_files",
    "append",
    "sync",
]
Moment: TypeAlias = Literal["before", "between", "after"]


class Faults(Protocol):
    """Hooks into store operations. `path` is the object, or the listed folder."""

    def before(self, operation: Operation, path: str, /) -> None:
        """Runs before any effect: the place to raise `StorageUnavailable` or `StorageFull`."""
        ...

    def between(self, operation: Operation, path: str, /) -> None:
        """Runs during puts: the object is visible, but a power cut would remove it."""
        ...

    def after(self, operation: Operation, path: str, /) -> None:
        """Runs after the effect, before the operation returns: the place for `PutUnresolved`."""
        ...


class NoFaults:
    """Hooks that do nothing; also the base of hooks for a single moment."""

    def before(self, _operation: Operation, _path: str, /) -> None: ...

    def between(self, _operation: Operation, _path: str, /) -> None: ...

    def after(self, _operation: Operation, _path: str, /) -> None: ...


class DelayFaults(NoFaults):
    """Delays every operation by `seconds` on the clock before its effect."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def before(self, _operation: Operation, _path: str, /) -> None:
        self._clock.sleep(self._seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Raises `error` the `count`-th time that `operation` reaches `moment` below `prefix`."""

    operation: Operation
    error: BaseException
    moment: Moment = "before"
    count: int = 1
    prefix: str = ""


class ScriptedFaults:
    """Raises each error in the script once."""

    def __init__(self, *script: Fault) -> None:
        self._script = script
        self._reached = Counter[int]()

    def before(self, operation: Operation, path: str) -> None:
        self._reach("before", operation, path)

    def between(self, operation: Operation, path: str) -> None:
        self._reach("between", operation, path)

    def after(self, operation: Operation, path: str) -> None:
        self._reach("after", operation, path)

    def _reach(self, moment: Moment, operation: Operation, path: str) -> None:
        due = None
        for number, fault in enumerate(self._script):
            here = (fault.moment, fault.operation) == (moment, operation)
            if here and path.startswith(fault.prefix):
                self._reached[number] += 1
                if self._reached[number] == fault.count:
                    due = due or fault.error
        if due:
            raise due
