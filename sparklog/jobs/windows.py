"""The checkpoint of a job that reads a topic in numbered windows.

    checkpoint.json   the name of the job's writes, the properties of the job, and the offsets that
                      its arguments resolved to at its start; created only if absent, and replaced
                      if a run adds to it
    <number>.json     the plan of a window: its offsets and its schema; created only if absent, and
                      replaced only while none of the window has been written
    <number>.done     put after everything that the window writes

A window is planned before any of it is written. A run that follows a killed one finds the plan of
the last window, and repeats it; targets recognise the numbers that they already have.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.jobs.ranges import Range
from sparklog.options import storage_options
from sparklog.storage.objects import ObjectMissing, claim, open_store

WINDOWS_KEPT = 100  # plans of a job's newest windows that its checkpoint retains

_HEAD: Final = "checkpoint.json"
_ADVICE: Final = (
    "Give this job its own checkpoint, and --start if it should not begin with the first record."
)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a job's writes, and the properties that must not change between its runs."""

    name: str
    job: Mapping[str, str | None]
    """None: a later run may choose it."""
    start: str | None = None
    """The argument that `starts` were resolved from."""
    starts: Mapping[int, int] | None = None
    """The first offsets; absent partitions start at their first record. None if unknown."""
    ends: Mapping[int, int] | None = None
    """The end offsets; None if there are none."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a window."""

    number: int
    run: str
    """The run that planned it."""
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    schema: str
    """The columns, in Spark's JSON form of a schema; empty if the job has none."""

    @property
    def part(self) -> Range:
        return Range(starts=self.starts, ends=self.ends)


_head_decoder = msgspec.json.Decoder(Head)
_window_decoder = msgspec.json.Decoder(Window)


class Checkpoint:
    """A folder, or the prefix of a bucket, of one job. Raises its store's errors.

    `advice` ends the error for another job: how to give that job its own checkpoint.
    """

    def __init__(self, uri: str, advice: str = _ADVICE) -> None:
        self._uri = uri
        self._advice = advice
        self._store = open_store(uri, storage_options(uri))
        self._clock = SystemClock()
        self._run = secrets.token_hex(8)

    def check(self, job: Mapping[str, str | None]) -> Head | None:
        """Returns the notes of earlier runs; None if there were none.

        Raises `BadRequest` if the checkpoint belongs to another job.
        """
        head = self._head()
        if head is None:
            return None
        changed = [key for key in job if head.job.get(key) not in (None, job[key])]
        if changed:
            was = ", ".join(f"{key} {head.job.get(key) or 'none'!r}" for key in changed)
            raise errors.BadRequest(
                reason=f"The checkpoint {self._uri} belongs to a job with {was}. {self._advice}"
            )
        return head

    def open(
        self,
        job: Mapping[str, str | None],
        *,
        start: str | None = None,
        starts: Mapping[int, int] | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> str:
        """Returns the name of the job's writes; creates the checkpoint if there is none.

        Requires that `check` has passed. Records the offsets, unless `starts` is None.
        """
        found = self._head()
        head = found or Head(name=secrets.token_hex(16), job=job)
        noted = msgspec.structs.replace(head, job=job)
        if starts is not None:
            noted = msgspec.structs.replace(noted, start=start, starts=starts, ends=ends)
        if found is None:
            if not claim(self._store, _HEAD, msgspec.json.encode(noted), clock=self._clock):
                raise self._busy()
        elif noted != found:
            self._store.put(_HEAD, msgspec.json.encode(noted))
        return head.name

    def _head(self) -> Head | None:
        try:
            return _head_decoder.decode(self._store.get(_HEAD))
        except ObjectMissing:
            return None
        except msgspec.MsgspecError as error:
            raise errors.CorruptObject(path=f"{self._uri}/{_HEAD}", check=str(error)) from None

    def last(self) -> tuple[Window | None, bool]:
        """Returns the newest window, and whether it is done."""
        names = {stat.name for stat in self._store.list_after("")}
        plans = sorted(name for name in names if name.endswith(".json") and name != _HEAD)
        if not plans:
            return None, True
        try:
            window = _window_decoder.decode(self._store.get(plans[-1]))
        except msgspec.MsgspecError as error:
            path = f"{self._uri}/{plans[-1]}"
            raise errors.CorruptObject(path=path, check=str(error)) from None
        return window, _done(window.number) in names

    def plan(self, number: int, part: Range, schema: str = "") -> Window:
        """Returns a window whose plan is durable. Raises `BadRequest` if another run planned it."""
        window = Window(
            number=number, run=self._run, starts=part.starts, ends=part.ends, schema=schema
        )
        data = msgspec.json.encode(window)
        if not claim(self._store, _plan(number), data, clock=self._clock):
            raise self._busy()
        return window

    def replan(self, window: Window, schema: str) -> Window:
        """Replaces the columns of a window if none of it has been written."""
        found = msgspec.structs.replace(window, run=self._run, schema=schema)
        self._store.put(_plan(found.number), msgspec.json.encode(found))
        return found

    def finish(self, number: int) -> None:
        """Records that the whole window has been written, and deletes an old one."""
        self._store.put(_done(number), b"")
        old = number - WINDOWS_KEPT
        if old >= 0:
            self._store.delete([_plan(old), _done(old)])

    def _busy(self) -> errors.BadRequest:
        return errors.BadRequest(
            reason=f"Another run uses the checkpoint {self._uri}. Stop one of them."
        )


def _plan(number: int) -> str:
    return f"{number:020}.json"


def _done(number: int) -> str:
    return f"{number:020}.done"
