"""The package by which Spark finds the format: it must never be the one that fails to import."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    """Returns the output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize("missing", ["pyspark", "pyspark.sql.datasource"])
def test_without_spark_there_is_no_source(missing: str) -> None:
    """If Spark, or its support for Python sources, is missing, the import still works."""
    program = f"""
import sys
sys.modules[{missing!r}] = None
import pyspark_sparklog
print(hasattr(pyspark_sparklog, "DefaultSource"))
"""
    assert run(program) == "False"


@pytest.mark.parametrize("missing", ["pyarrow", "msgspec", "numpy", "sparklog"])
def test_what_is_missing_is_told_when_the_format_is_used(missing: str) -> None:
    """Other Python sources of the session are still found; this one names what it lacks."""
    program = f"""
import sys
sys.modules[{missing!r}] = None
from pyspark_sparklog import DefaultSource
from pyspark.sql.datasource import DataSource
assert issubclass(DefaultSource, DataSource) and DefaultSource.name() == "sparklog"
try:
    DefaultSource({{"subscribe": "t"}}).schema()
except ImportError as error:
    print(error.name)
"""
    assert run(program).partition(".")[0] == missing


def test_the_lookup_loads_nothing_of_ours() -> None:
    """Every session of Spark looks the sources up, so that must cost nothing."""
    program = """
import sys
import pyspark_sparklog
print(sorted(name for name in sys.modules if name.startswith(("sparklog", "pyarrow", "obstore"))))
"""
    assert run(program) == "[]"


def test_an_earlier_spark_is_served_with_what_it_has() -> None:
    """Without the names of 4.1 and 4.2 the source works, and refuses limits by name."""
    program = """
import sys
import pyspark.sql.datasource as known
sys.modules["pyspark.sql.streaming.datasource"] = None  # since 4.2
for name in ("Filter", "EqualTo", "In", "LessThan", "DataSourceStreamArrowWriter"):  # since 4.1
    delattr(known, name)
from pyspark.sql.types import StructType
from sparklog.sources.datasource import stream_reader
from sparklog.sources.stream import EarlierStreamReader
options = {"root": "memory://earlier", "subscribe": "t"}
assert isinstance(stream_reader(options, StructType()), EarlierStreamReader)
try:
    stream_reader(options | {"maxOffsetsPerTrigger": "5"}, StructType()).latestOffset()
except ValueError as error:
    print(error)
"""
    assert run(program) == (
        "Invalid option maxOffsetsPerTrigger = 'set': limits of a stream need pyspark 4.2 or later."
    )
