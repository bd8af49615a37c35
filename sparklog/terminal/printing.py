"""Results as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from sparklog.doctor import CheckResult


def print_finding(finding: CheckResult) -> None:
    """Prints a check's line."""
    state = typer.style(f"{finding.state:<5}", **_STYLES[finding.state])
    advice = f": {finding.advice}" if finding.advice else ""
    typer.echo(f"{state} {finding.check:<16} {finding.found}{advice}")


_STYLES: Final[dict[str, dict[str, Any]]] = {
    "ok": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "fail": {"fg": "red", "bold": True},
}


def print_columns(rows: Sequence[Sequence[object]]) -> None:
    """Prints rows in columns as wide as their longest cell; the first row is the heading."""
    texts = [[str(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())
