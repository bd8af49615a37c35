"""Plots of the benchmarks: drawn from stored figures, which are those of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots
from sparklog.bench import command
from sparklog.bench.report import BenchOptions, Measurement, Report

PAGE = (plots.FOLDER.parent / "benchmarks.md").read_text(encoding="utf-8")
SOURCES = sorted(plots.FOLDER.glob("*.json"))
FIGURE = Measurement(name="n", value="1.50 ×", target="≥ 2 × Kafka", met=False, detail="3, Kafka 2")


def rows() -> dict[tuple[str, str], tuple[str, str]]:
    """The measured value and the verdict of each row of the page, by its name and goal."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4:
            name, goal, measured, mark = cells
            goal = "≥ " + goal.removeprefix("≥ ").removesuffix("'s sink")
            found[name.replace("`", ""), goal] = measured, mark
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_plots_show_the_stored_figures(source: Path) -> None:
    """Drawing again gives the plot of the page, byte by byte (`python -m benchmarks.plots`)."""
    report = Report.from_json(source.read_bytes())
    assert report.to_json() == source.read_bytes()
    drawn = plots.plot(report)
    assert drawn == plots.plot(report)
    assert drawn == source.with_suffix(".svg").read_bytes()
    assert f"](benchmarks/{source.stem}.svg)" in PAGE


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_stored_figures_are_those_of_the_page(source: Path) -> None:
    """Machine, command, and goal, value and verdict of each stored figure are in the page."""
    report = Report.from_json(source.read_bytes())
    assert f"Machine: {report.machine}." in PAGE
    assert f"`{report.command}`" in PAGE
    on_page = rows()
    assert len(report.figures) == len(plots.bars(report.figures)) > 5
    for each in report.figures:
        measured, mark = on_page[each.name, each.target]
        assert measured.startswith(f"{each.value} ({each.detail})")
        assert mark == {True: "✓", False: "✗", None: ""}[each.met]


def test_only_speeds_relative_to_kafka_are_drawn() -> None:
    """Times, other goals and figures without a ratio are left out."""
    others = [
        Measurement(name="a", value="p50 0.50 ×", target="p50 ≤ 1 × Kafka's"),
        Measurement(name="b", value="0.87 ×", target="≥ 0.8 × plain Delta"),
        Measurement(name="c", value="3 M rows/s", target="≥ 2 × Kafka"),
    ]
    (bar,) = plots.bars([*others, FIGURE])
    assert (bar.name, bar.ratio, bar.goal, bar.text) == ("n", 1.5, 2.0, "1.50 × (3, Kafka 2)")
    with pytest.raises(ValueError, match="no figure"):
        plots.plot(Report(machine="m", command="c", figures=tuple(others)))


def test_a_text_that_does_not_fit_is_refused() -> None:
    """A plot never shows a part of a text."""
    long = Measurement(name="n", value="1.50 ×", target="≥ 2 × Kafka", detail="more records " * 5)
    with pytest.raises(ValueError, match="too long"):
        plots.plot(Report(machine="m", command="c", figures=(long,)))


def test_texts_and_dark_colors_are_in_the_plot() -> None:
    """Texts can be searched and selected, and a dark page gets colors of its own."""
    drawn = plots.plot(Report(machine="m", command="c", figures=(FIGURE,))).decode()
    assert ">1.50 × (3, Kafka 2)</text>" in drawn
    assert "prefers-color-scheme: dark" in drawn
    assert plots._MISSED in drawn
    assert plots._MET not in drawn


def test_figures_of_a_run_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a file for its figures stores them with the machine and the command."""
    file = tmp_path / "figures.json"
    options = BenchOptions(folder=tmp_path)
    command.run_measures({"one": lambda _: [FIGURE]}, [], options, save=file)
    report = Report.from_json(file.read_bytes())
    assert report.figures == (FIGURE,)
    assert "Python 3" in report.machine
    assert report.command
