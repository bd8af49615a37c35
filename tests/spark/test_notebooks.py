"""The notebooks run from top to bottom, in a process of their own, and are kept without results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.spark

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
RUN_SECONDS = 300

RUNNER = """
import json, sys

cells, wanted = json.load(sys.stdin)
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    exec(compile(cell, f"<code cell {number}>", "exec"), names)
print()
print(json.dumps(eval(wanted, names)))
names["spark"].stop()
"""


def code_cells(notebook: Path) -> list[str]:
    """Returns the code that a kernel would run."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(cells: Sequence[str], folder: Path, wanted: str) -> Any:
    """Returns the value of the expression `wanted` after all cells have run, in one namespace."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SPARKLOG_")},
        "SPARKLOG_ROOT": str(folder / "root"),
        "PYSPARK_PYTHON": sys.executable,
        # The notebook is at home where sparklog is installed, or beside it.
        "PYTHONPATH": str(FOLDER.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps([cells, wanted]),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_results(notebook: Path) -> None:
    """Notebooks have no output and no counts, so that diffs show edits only."""
    content = json.loads(notebook.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert notebook.stat().st_size < 20_000


@pytest.mark.timeout(RUN_SECONDS + 30)
def test_flights_are_explored(tmp_path: Path) -> None:
    """Every look finds the flights that were sent: 5,000, and 100 that came after the stream."""
    found = run(
        code_cells(FOLDER / "explore_flights.ipynb"),
        tmp_path,
        "dict(read=len(records), delays=delays.toPandas().flights.sum().item(),"
        " streamed=spark.table('departures').count(), worst=worst.count(), lag=sum(lag.values()),"
        " table=per_partition.toPandas().records.sum().item(), partitions=per_partition.count(),"
        " expected=sample.dep_delay.max(), longest=worst.first().dep_delay,"
        " snapshot=spark.conf.get('spark.databricks.delta.snapshotPartitions'))",
    )
    assert found.pop("snapshot") == "2"  # Delta's default of 50 tasks takes most of the run
    assert found.pop("expected") == found.pop("longest")
    assert found == {
        "read": 5_000,
        "delays": 5_000,
        "streamed": 5_000,
        "worst": 10,
        "lag": 100,
        "table": 5_100,
        "partitions": 4,
    }
