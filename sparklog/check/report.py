"""The result of a check, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparklog.check.analysis import Anomaly
from sparklog.check.history import History


def verdict(findings: Sequence[Anomaly], problems: Sequence[str], history: History) -> str:
    """ "clean", "findings", or "incomplete" if nothing was found but not everything was seen."""
    if findings:
        return "findings"
    return "incomplete" if problems or not history.acked else "clean"


def as_json(
    findings: Sequence[Anomaly], problems: Sequence[str], history: History, topic: str
) -> Mapping[str, Any]:
    """Returns the result as JSON values."""
    return {
        "verdict": verdict(findings, problems, history),
        "topic": topic,
        "operations": history.operations,
        "sent": len(history.sends),
        "acked": history.acked,
        "read": len(history.reads),
        "commits": len(history.commits),
        "findings": [
            {
                "kind": each.kind,
                "about": each.about,
                "count": each.count,
                "examples": list(each.examples),
            }
            for each in findings
        ],
        "problems": list(problems),
    }


def show(
    findings: Sequence[Anomaly], problems: Sequence[str], history: History, topic: str
) -> None:
    """Prints the result, as wide as the terminal."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{history.operations:,} operations: {len(history.sends):,} records sent,"
        f" {history.acked:,} acked; {len(history.reads):,} read; {len(history.commits):,} commits,"
        f" {len(history.fetches):,} fetches of them; {len(history.ends):,} lookups of log ends"
    )
    for problem in problems:
        console.print(f"[yellow]not seen[/]: {escape(problem)}")
    if findings:
        table = Table("finding", "count", "meaning", "examples", box=box.SIMPLE)
        for each in findings:
            table.add_row(
                f"[red]{each.kind}[/]",
                f"{each.count:,}",
                each.about,
                escape("; ".join(each.examples)),
            )
        console.print(table)
    match verdict(findings, problems, history):
        case "clean":
            console.print("[green]clean[/]: nothing was lost, duplicated, moved or reordered")
        case "incomplete" if not history.acked:
            console.print("[yellow]incomplete[/]: no record was acked, so nothing was checked")
        case "incomplete":
            console.print("[yellow]incomplete[/]: nothing was found, but not everything was seen")
        case _:
            kinds = len(findings)
            summary = f"{kinds} kind{'' if kinds == 1 else 's'} of anomalies"
            console.print(f"[red]findings[/]: {summary}" + (f", in topic {topic}" if topic else ""))
