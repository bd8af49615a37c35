"""What `import sparklog` costs, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import sparklog

HEAVY = ("deltalake", "pandas", "pyarrow", "pyspark", "sparklog.broker", "sparklog.storage")
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
