"""The notebooks run from top to bottom, and are kept with the results of such a run.

Most run in the process of the tests, in the Spark session that is there, as they do on Databricks;
`make soak` runs all in kernels of their own, as Jupyter does.
"""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from pyspark.sql import SparkSession

from tools import notebooks

NAMES = ("explore", "groups", "kafka", "streaming")
PLOTS = {"explore": 3, "groups": 1, "kafka": 0, "streaming": 1}
_HOME = re.compile(r"/(?:home|root|Users)/|site-packages")


def read(name: str) -> Any:
    """Returns a notebook of the project."""
    return nbformat.read(notebooks.FOLDER / f"{name}.ipynb", as_version=4)


class Jupyter:
    """Runs notebooks in kernels of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def results(self, name: str, wanted: str) -> Any:
        """Runs the notebook, and returns the value of the expression `wanted` at its end."""
        notebook = read(name)
        code = f"import json\nprint(json.dumps({wanted}))"
        notebook.cells.append(nbformat.v4.new_code_cell(code))
        notebooks.run(notebook, self._folder)
        return json.loads(notebook.cells[-1].outputs[0].text)


class Databricks:
    """Runs notebooks here, with a Spark session that is there already."""

    def __init__(self, spark: SparkSession) -> None:
        self._names: dict[str, Any] = {"spark": spark}

    def results(self, name: str, wanted: str) -> Any:
        """Runs the notebook, and returns the value of the expression `wanted` at its end."""
        shell: Any = InteractiveShell.instance(user_ns=self._names, history_load_length=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, which a reader sees once
            for cell in read(name).cells:
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()
            found = json.dumps(eval(wanted, self._names))
            self._names.clear()
            gc.collect()  # kafka-python leaves sockets of attempts open
        return json.loads(found)


Runner = Jupyter | Databricks
_KERNELS = pytest.param("jupyter", marks=[pytest.mark.spark_program, pytest.mark.soak(mode="jobs")])


@pytest.fixture(name="runner", params=["databricks", _KERNELS])
def _runner(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runner]:
    if request.param == "jupyter":
        yield Jupyter(tmp_path)
        return
    monkeypatch.setenv("SPARKLOG_ROOT", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)
    yield Databricks(request.getfixturevalue("spark"))
    InteractiveShell.clear_instance()
    plt.close("all")


def test_all_of_them_are_tested() -> None:
    """A notebook that is added needs a test of what it finds."""
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_with_its_results(name: str) -> None:
    """Cells were run in their order, without an error, and show nothing of the machine."""
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert not _HOME.search(json.dumps(outputs))
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PLOTS[name]
    assert (notebooks.FOLDER / f"{name}.ipynb").stat().st_size < 200_000


@pytest.mark.timeout(notebooks.RUN_SECONDS + 30)
def test_a_group_is_watched(tmp_path: Path) -> None:
    """Three members share six partitions; their positions are set back by 50 records each."""
    found = Jupyter(tmp_path).results(
        "groups",
        "dict(partitions=lag.shape[1], members=len(members), commits=len(commits) > 6,"
        " back=[positions[each] - again[each] for each in positions])",
    )
    assert found == {"partitions": 6, "members": 3, "commits": True, "back": [50] * 6}


@pytest.mark.spark
@pytest.mark.delta
@pytest.mark.timeout(notebooks.RUN_SECONDS + 30)
def test_a_topic_is_explored(runner: Runner) -> None:
    """Every way to read finds the flights that were sent; versions of the table differ."""
    found = runner.results(
        "explore",
        "dict(read=table.num_rows, spark=delays.agg({'flights': 'sum'}).first()[0],"
        " table=per_partition.toPandas().records.sum().item(), holiday=holiday.num_rows,"
        " offsets=first['offset'].to_pylist(), travelled=travelled, most=max(lags), last=lags[-1],"
        " fourth=int((records.timestamp.dt.strftime('%m-%d') == '07-04').sum()))",
    )
    assert found["read"] == found["spark"] == 20_000
    assert found["table"] == 20_000
    assert found["holiday"] == found["fourth"]
    assert found["offsets"] == [100, 101, 102]
    assert found["travelled"] == {"before": 20_000, "now": 20_300}
    assert found["last"] < found["most"]


@pytest.mark.spark
@pytest.mark.delta
@pytest.mark.timeout(notebooks.RUN_SECONDS + 30)
def test_kafka_programs_and_tables_see_the_same(runner: Runner) -> None:
    """kafka-python, Spark and DuckDB find the same orders, and the group has no lag."""
    found = runner.results(
        "kafka",
        "dict(seen=len(seen), price=sum(order['price'] for order in seen), lag=lag.total,"
        " spark=total.agg({'total': 'sum', 'orders': 'sum'}).first().asDict(),"
        " duckdb=by_partition[['orders', 'total']].sum().tolist())",
    )
    price = sum(1 + number % 17 for number in range(5_000))
    assert found == {
        "seen": 5_000,
        "price": price,
        "lag": 0,
        "spark": {"sum(total)": price, "sum(orders)": 5_000},
        "duckdb": [5_000, price],
    }


@pytest.mark.spark
@pytest.mark.since("4.2")
@pytest.mark.delta
@pytest.mark.timeout(notebooks.RUN_SECONDS + 30)
def test_a_stream_is_watched_and_killed(runner: Runner) -> None:
    """All days but the last are complete, and each record is copied once."""
    found = runner.results("streaming", "dict(complete=complete, records=len(records)) | outcome")
    assert found["complete"] == 31
    assert found["copied"] == found["records"] == 5_297
    assert found["each one once"] is True
