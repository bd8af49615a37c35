"""Plots of stored figures for the documentation: `python -m benchmarks.plots`.

Each `docs/benchmarks/NAME.json` contains the figures of one run, as written by
`python -m benchmarks --save`; `NAME.svg` next to it shows those that are speeds relative to
Kafka's. The same figures produce the same bytes. Text in a plot remains text, and its colors follow
dark mode.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
import typer
from matplotlib.figure import Figure

from sparklog.bench.report import Measurement, Report

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"

_LABEL: Final = 40
"""Maximum characters per line of a bar's name."""
_RATIO: Final = re.compile(r"([\d.]+) ×")
_GOAL: Final = re.compile(r"≥ ([\d.]+) × Kafka")
_INK, _NOTE, _PAGE = "#0f172a", "#475569", "#ffffff"
_MET, _MISSED = "#059669", "#d97706"
_DARK: Final = {_INK: "#f1f5f9", _NOTE: "#cbd5e1", _PAGE: "#0f172a"}
_STYLE: Final = "*{stroke-linejoin: round; stroke-linecap: butt}"
"""The style sheet written by matplotlib."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A speed as a multiple of Kafka's, and the minimum multiple that is the goal."""

    name: str
    ratio: float
    goal: float
    text: str


def bars(figures: Sequence[Measurement]) -> list[Bar]:
    """Returns the figures that are speeds relative to Kafka's, in their order."""
    found = []
    for each in figures:
        ratio, goal = _RATIO.fullmatch(each.value), _GOAL.fullmatch(each.target)
        if ratio and goal:
            text = f"{each.value} ({each.detail})" if each.detail else each.value
            found.append(Bar(name=each.name, ratio=float(ratio[1]), goal=float(goal[1]), text=text))
    return found


def plot(report: Report) -> bytes:
    """Returns an SVG with `bars`. Raises ValueError if there are none, or a text is too long."""
    shown = bars(report.figures)
    if not shown:
        raise ValueError("no figure is a speed relative to Kafka's")
    with mpl.rc_context():
        mpl.rcdefaults()  # independent of the user's own settings
        mpl.rcParams.update(
            {
                "font.family": "sans-serif",
                "font.size": 9.0,
                "svg.fonttype": "none",
                "svg.hashsalt": "sparklog",
                "text.color": _INK,
                "axes.edgecolor": _NOTE,
                "axes.labelcolor": _NOTE,
                "xtick.color": _NOTE,
                "ytick.color": _INK,
            }
        )
        figure = Figure(figsize=(8.0, 0.9 + 0.42 * len(shown)), facecolor=_PAGE)
        inch = 1.0 / figure.get_figheight()
        axes = figure.add_axes((0.36, 0.5 * inch, 0.28, 1.0 - 0.6 * inch))
        axes.set_facecolor(_PAGE)
        places = range(len(shown))
        colors = [_MET if each.ratio >= each.goal else _MISSED for each in shown]
        axes.barh(places, [each.ratio for each in shown], height=0.5, color=colors)
        beside = axes.get_yaxis_transform()
        for place, each in zip(places, shown, strict=True):
            axes.plot([each.goal] * 2, [place - 0.36, place + 0.36], color=_INK, linewidth=1.5)
            axes.text(
                1.04, place, each.text, transform=beside, verticalalignment="center", color=_NOTE
            )
        axes.axvline(1.0, color=_NOTE, linewidth=0.8, linestyle="--")
        axes.set_yticks(places, [textwrap.fill(each.name, _LABEL) for each in shown])
        axes.invert_yaxis()
        axes.set_xlim(0.0, 1.05 * max(max(each.ratio, each.goal) for each in shown))
        axes.set_xlabel("speed as a multiple of Kafka's (dashed line); the solid line is the goal")
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        taken = figure.get_tightbbox()
        if taken.x0 < 0.0 or taken.x1 > figure.get_figwidth():
            raise ValueError("a text is too long for the plot: shorten the names or details")
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return _follow_dark_mode(written.getvalue().decode()).encode()


def _follow_dark_mode(svg: str) -> str:
    """Adds colors for dark pages to the style sheet."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    ]
    rules = ["@media (prefers-color-scheme: dark) {", *rules, "}"]
    assert svg.count(_STYLE) == 1
    return svg.replace(_STYLE, "\n".join([_STYLE, *rules]))


def main() -> None:
    """Redraws all plots, and prints the paths of those that have changed."""
    for source in sorted(FOLDER.glob("*.json")):
        target = source.with_suffix(".svg")
        drawn = plot(Report.from_json(source.read_bytes()))
        if not target.exists() or target.read_bytes() != drawn:
            target.write_bytes(drawn)
            typer.echo(target.relative_to(FOLDER.parents[1]))


if __name__ == "__main__":
    main()
