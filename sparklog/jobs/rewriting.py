"""The tasks of the job `compact`: they rewrite files for the driver to commit.

Executors find these classes by name, which would fail in a job's own module: run with `python -m`,
that is `__main__`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pyarrow as pa

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.storage.maintenance import file_compaction, key_compaction
from sparklog.storage.maintenance.file_compaction import FileGroup
from sparklog.storage.maintenance.key_compaction import CompactionPass, CompactionStep
from sparklog.storage.objects import ObjectMissing, Store, open_store

_STEPS_SECONDS: Final = limits.ORPHAN_GRACE_SECONDS / 4
"""The time after which a task ends with the steps it has, while they can still be committed."""

Piece: TypeAlias = Sequence[FileGroup] | CompactionPass
"""The work of one task."""


@dataclass(frozen=True, slots=True)
class PassSteps:
    """The written steps of a pass, and the error that ended it."""

    steps: Sequence[CompactionStep]
    failure: errors.SparklogError | ObjectMissing | None = None

    def __iter__(self) -> Iterator[CompactionStep]:
        yield from self.steps
        if self.failure is not None:
            raise self.failure


class DriverClock(SystemClock):
    """The driver's time on an executor, whose own may differ: the driver judges how old files are.

    It may lag by the time that a task has waited, so no file seems younger than it is.
    """

    def __init__(self, driver_us: int) -> None:
        self._driver_us = driver_us
        self._began = self.monotonic()

    def now_us(self) -> int:
        return self._driver_us + round((self.monotonic() - self._began) * 1e6)


def rewrite(
    root: str,
    storage: Mapping[str, str],
    topic: str,
    pieces: Sequence[Piece],
    driver_us: int,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yields the pickled result of each piece whose number is in the batches."""
    store, clock = open_store(root, storage), DriverClock(driver_us)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            piece = pieces[number]
            written = (
                _steps(store, topic, piece, clock)
                if isinstance(piece, CompactionPass)
                else file_compaction.merge(store, topic, piece, clock=clock)
            )
            pickled = pa.array([pickle.dumps(written)], pa.binary())
            yield pa.RecordBatch.from_arrays([pickled], ["written"])


def _steps(store: Store, topic: str, each: CompactionPass, clock: DriverClock) -> PassSteps:
    """Returns all steps of the pass, or those written in `_STEPS_SECONDS`."""
    steps: list[CompactionStep] = []
    began = clock.monotonic()
    try:
        for step in key_compaction.rewrite(store, topic, each, clock=clock):
            steps.append(step)
            if clock.monotonic() - began > _STEPS_SECONDS:
                break
    except (errors.SparklogError, ObjectMissing) as error:
        return PassSteps(steps, error)
    return PassSteps(steps)
