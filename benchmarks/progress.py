"""Progress of long measurements, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Shows a spinner on a terminal, and prints a line elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{what} …"):
            yield
    else:
        console.print(f"  {what} …", highlight=False)
        yield
