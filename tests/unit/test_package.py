"""What `import sparklog` costs and does not load, and that its documents say what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparklog
from sparklog.sinks import options as sink
from sparklog.sources import options as source

DOCUMENT = Path(__file__).parents[2] / "docs" / "spark.md"
HEAVY = (
    "deltalake",
    "numba",
    "pandas",
    "pyarrow",
    "pyspark",
    "sparklog.broker",
    "sparklog.storage",
)
LIGHT_SECONDS = 0.3

MEASURE = """
import json, sys, time
started = time.perf_counter()
import sparklog
print(json.dumps({"seconds": time.perf_counter() - started, "modules": list(sys.modules)}))
"""


def test_import_loads_nothing_heavy() -> None:
    """`import sparklog` loads no Spark, Arrow, broker or storage, and is not felt."""
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True
    )
    found = json.loads(answer.stdout)
    loaded = [name for name in found["modules"] if name.startswith(HEAVY)]
    assert "sparklog" in found["modules"]
    assert loaded == []
    assert found["seconds"] < LIGHT_SECONDS


def test_unknown_name_is_an_attribute_error() -> None:
    """The lazy `connect` does not make other names up."""
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = sparklog.conect


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Where the log is", ("root", "path", "storage.*")),
        ("Source", source._KNOWN),
        ("Sink", sink._KNOWN + sink._OF_SPARK),
    ],
)
def test_options_of_spark_are_documented(heading: str, known: tuple[str, ...]) -> None:
    """`docs/spark.md` has a row for every option that there is, with a default and a meaning."""
    section = DOCUMENT.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|([^|]*)\| ([^|]+) \|$", section, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(known)
