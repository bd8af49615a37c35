"""Progress of a measure that takes long, on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_Result = TypeVar("_Result")
_STEP_SECONDS: Final = 0.25


def awaited(what: str, seconds: float, work: Future[_Result]) -> _Result:
    """Returns the result of work that takes about `seconds`, and shows the time that has passed."""
    began = time.perf_counter()
    with _bar(what, seconds) as (progress, task):
        while not wait([work], _STEP_SECONDS).done:
            progress.update(task, completed=time.perf_counter() - began)
    return work.result()


def slept(what: str, seconds: float) -> None:
    """Sleeps, and shows the time that has passed."""
    began = time.perf_counter()
    with _bar(what, seconds) as (progress, task):
        while (left := began + seconds - time.perf_counter()) > 0:
            time.sleep(min(left, _STEP_SECONDS))
            progress.update(task, completed=seconds - left)


@contextmanager
def _bar(what: str, seconds: float) -> Iterator[tuple[Progress, TaskID]]:
    """Shows a bar on a terminal; elsewhere, a line that names the work and its time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"  {what}: {seconds:.0f} s …", highlight=False)
    with Progress(
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress, progress.add_task(what, total=seconds)
