"""Progress bars of `produce` and of `topics dead-letters`, on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn


class Meter:
    """A progress bar over the bytes of several inputs, and the number of their records."""

    def __init__(self, sizes_bytes: Sequence[int | None]) -> None:
        """Takes the size of each input, in order; None if unknown."""
        self._sizes_bytes = iter(sizes_bytes)
        self._before_bytes = 0
        self._records = 0
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.fields[records]:,} records"),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        total_bytes = None if None in sizes_bytes else sum(size or 0 for size in sizes_bytes)
        self._task = self._progress.add_task("", total=total_bytes, records=0)

    def advance(self, records: int, position_bytes: int) -> None:
        """Counts records, read up to a position in the current input."""
        self._records += records
        done_bytes = self._before_bytes + position_bytes
        self._progress.update(self._task, completed=done_bytes, records=self._records)

    def next_input(self) -> None:
        """Moves on to the next input."""
        self._before_bytes += next(self._sizes_bytes) or 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class CopyMeter:
    """A progress bar over the records of a topic, and the number of those that were copied."""

    def __init__(self, what: str) -> None:
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.completed:,} records, {task.fields[copied]:,} " + what),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, copied=0)

    def show(self, records: int, copied: int, *, left: int) -> None:
        """Shows how many records were examined and copied so far, and how many are left."""
        self._progress.update(self._task, completed=records, total=records + left, copied=copied)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
