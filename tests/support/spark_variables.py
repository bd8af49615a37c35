"""Environment variables for all Spark sessions of the tests, to save CPU time."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.support import preloaded
from tests.support.jvms import SHORT_LIVED

_BUILD: Final = Path(__file__).parents[2] / "build"
_QUIET: Final = ("-Xlog:disable", "-Xlog:all=error:stderr")
"""Flags of a JVM that does not warn of an archive that it cannot use."""
_SETTINGS: Final = {
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    "spark.ui.enabled": "false",
}
"""Defaults for little data, two cores, and no network.

Compiling generated code pays off only in longer queries: it takes a fifth of the CPU time of the
Delta tests.
"""


def class_archive(home: Path) -> Path:
    """Returns the file with Spark's classes as a JVM has loaded them, which others map.

    It takes three of the seven CPU seconds from the start of a session. A JVM that cannot use it,
    or finds none, loads the classes as usual.
    """
    return home / "classes.jsa"


def spark_variables() -> dict[str, str]:
    """Returns `PYSPARK_PYTHON`, `SPARK_HOME` and more, for this process and programs of tests."""
    settings = [f"-D{name}={value}" for name, value in _SETTINGS.items()]
    home = _home()
    archive = f"-XX:SharedArchiveFile={class_archive(home)}"
    python = preloaded.launcher(home / "python")
    return {
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,  # data sources use this one, too
        "SPARK_HOME": str(home),
        "SPARK_SUBMIT_OPTS": " ".join([*SHORT_LIVED, archive, *_QUIET, *settings]),
    }


def _home() -> Path:
    """Returns a Spark home without a second copy of pyspark.

    The installed one contains another pyspark, in a zip file, which Spark's Python processes import
    first. They compile it each time, which takes half a second.
    """
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home = _BUILD / f"spark-{importlib.metadata.version('pyspark')}"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars"):
        link, installed = home / name, Path(spec.origin).parent / name
        with suppress(FileExistsError):  # another pytest worker has just made the link
            if not link.is_symlink() or link.readlink() != installed:
                link.unlink(missing_ok=True)
                link.symlink_to(installed)
    return home
