"""What is going on in a long measure, told on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A line that turns on a terminal, and one that stands elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{what} …"):
            yield
    else:
        console.print(f"  {what} …", highlight=False)
        yield
