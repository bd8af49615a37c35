"""The checkpoint of a job that reads a topic in numbered windows.

    checkpoint.json   the name of the job's writes, and what they are of; put once
    <number>.json     the plan of a window: its offsets and its schema; put only if absent
    <number>.done     put after all that the window writes

A window is planned before anything of it is written. A run that follows one that was killed finds
the plan of the last window, and does exactly that again; targets know the numbers that they have.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.jobs.ranges import Range
from sparklog.options import storage_options
from sparklog.storage.objects import ObjectMissing, claim, open_store

_HEAD: Final = "checkpoint.json"


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a job's writes, and the things that must not change between its runs."""

    name: str
    job: Mapping[str, str | None]
    """None: a later run may choose it."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a window."""

    number: int
    run: str
    """The run that planned it."""
    starts: Mapping[int, int]
    ends: Mapping[int, int]
    schema: str
    """The columns, as Spark writes a schema as JSON."""

    @property
    def part(self) -> Range:
        return Range(starts=self.starts, ends=self.ends)


_head_decoder = msgspec.json.Decoder(Head)
_window_decoder = msgspec.json.Decoder(Window)


class Checkpoint:
    """A folder, or the prefix of a bucket, of one job. Raises the errors of its store."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._store = open_store(uri, storage_options(uri))
        self._clock = SystemClock()
        self._run = secrets.token_hex(8)

    def check(self, job: Mapping[str, str | None]) -> None:
        """Raises `BadRequest` if the checkpoint is one of another job."""
        head = self._head()
        if head is None:
            return
        changed = [key for key in job if head.job.get(key) not in (None, job[key])]
        if changed:
            was = ", ".join(f"{key} {head.job.get(key) or 'none'!r}" for key in changed)
            raise errors.BadRequest(
                reason=f"The checkpoint {self._uri} is of a job with {was}. Give it a checkpoint of"
                " its own, and --start if it is not to begin with the first record."
            )

    def open(self, job: Mapping[str, str | None]) -> str:
        """Returns the name of the job's writes; makes the checkpoint if there is none.

        `check` has passed.
        """
        head = self._head()
        if head is None:
            head = Head(name=secrets.token_hex(16), job=job)
            if not claim(self._store, _HEAD, msgspec.json.encode(head), clock=self._clock):
                raise self._busy()
        elif head.job != job:
            self._store.put(_HEAD, msgspec.json.encode(Head(name=head.name, job=job)))
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

    def plan(self, number: int, part: Range, schema: str) -> Window:
        """Returns the window, whose plan is durable. Raises `BadRequest` if another run has one."""
        window = Window(
            number=number, run=self._run, starts=part.starts, ends=part.ends, schema=schema
        )
        data = msgspec.json.encode(window)
        if not claim(self._store, _plan(number), data, clock=self._clock):
            raise self._busy()
        return window

    def finish(self, number: int) -> None:
        """Remembers that all of the window is written, and forgets an old one."""
        self._store.put(_done(number), b"")
        old = number - limits.WINDOWS_KEPT
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
