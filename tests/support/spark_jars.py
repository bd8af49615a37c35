"""The jars in Ivy's cache, and an archive of the classes, of Spark for all test sessions."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sparklog.jobs.mirroring.sides import kafka_connector
from tests.support.spark_variables import class_archive, spark_variables


@functools.cache
def prepare() -> None:
    """Downloads the jars of all tests and archives classes, once per checkout.

    Two sessions that download the same jar concurrently corrupt it for each other. If a download
    fails, the test sessions report the reason.
    """
    variables = spark_variables()
    home = Path(variables["SPARK_HOME"])
    done = home / "is-prepared"
    with (home / "prepared.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # against other pytest workers
        if done.exists():
            return
        submit = [str(home / "bin" / "spark-submit"), "--master", "local[1]", "--packages"]
        env = os.environ | variables
        # Each set has its own versions.
        program = str(Path(__file__).with_name("__init__.py"))  # which does nothing
        commands = [[*submit, ",".join(packages), program] for packages in _sets_of_packages()]
        codes = [subprocess.run(each, check=False, env=env).returncode for each in commands]
        _archive_classes(home, env)
        if not any(codes):
            done.touch()


def _archive_classes(home: Path, env: Mapping[str, str]) -> None:
    """Runs a session whose JVM archives the classes that it has loaded when it exits."""
    archive = class_archive(home)
    new = archive.with_suffix(".new")
    flags = env["SPARK_SUBMIT_OPTS"].replace(
        f"-XX:SharedArchiveFile={archive}", f"-XX:ArchiveClassesAtExit={new}"
    )
    program = str(Path(__file__).with_name("warm_session.py"))
    submit = str(home / "bin" / "spark-submit")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [submit, program, folder], check=False, env={**env, "SPARK_SUBMIT_OPTS": flags}
        )
    if new.exists():
        new.rename(archive)


def _sets_of_packages() -> Iterator[list[str]]:
    kafka = [kafka_connector()]
    yield kafka
    if importlib.util.find_spec("delta") is not None:
        from delta import configure_spark_with_delta_pip
        from pyspark.sql import SparkSession

        for extra in ([], kafka):
            builder = configure_spark_with_delta_pip(SparkSession.builder, extra_packages=extra)
            yield [builder._options["spark.jars.packages"]]
