"""The files in jobs/, run by spark-submit with conf/spark-defaults.conf."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pyspark
import pytest

import sparklog
from tests.support import spark_programs

pytestmark = [pytest.mark.spark, pytest.mark.spark_program]

_REPOSITORY = Path(__file__).parents[2]
_SETTINGS = _REPOSITORY / "conf" / "spark-defaults.conf"
_SPARK_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
_INSTALLED = {"delta-spark": "delta-spark", "spark-sql-kafka-0-10": "pyspark"}


@pytest.mark.delta
@pytest.mark.since("4.2")
def test_jars_are_those_of_the_installed_packages() -> None:
    """A jar of another version fails only where a job first uses it."""
    named = re.findall(r"([a-z0-9-]+)(?:_[\d.]+)*:(\d+\.\d+\.\d+)", _SETTINGS.read_text())
    versions = {jar.removesuffix("_2"): version for jar, version in named}
    assert versions == {
        jar: importlib.metadata.version(package) for jar, package in _INSTALLED.items()
    }


@pytest.mark.delta
@pytest.mark.since("4.2")
def test_a_job_of_spark_submit_writes_a_delta_table_into_a_topic(tmp_path: Path) -> None:
    """Delta's jar comes from the settings, and the root from the environment."""
    import deltalake
    import pyarrow as pa

    root = tmp_path / "root"
    deltalake.write_deltalake(tmp_path / "table", pa.table({"value": ["a", "b", "c"]}))
    command = [str(_SPARK_SUBMIT), "--master", "local[2]", "--properties-file", str(_SETTINGS)]
    command += [str(_REPOSITORY / "jobs" / "produce.py"), "--topic", "t", "--partitions", "2"]
    command += ["--format", "delta", str(tmp_path / "table")]
    env = spark_programs.environment(SPARKLOG_ROOT=str(root))
    try:
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("t: 3 records in ")
        with sparklog.connect(root) as log:
            found = log.read("t").column("value").to_pylist()
            assert sorted(found) == [b"a", b"b", b"c"]
    finally:
        spark_programs.end_detached_brokers(root)
