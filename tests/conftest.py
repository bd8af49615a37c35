"""Fixtures of all tests: a Spark session, with Delta if installed, and the profiles of Hypothesis.

Consumer groups check their invariant after each event here.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import hypothesis
import pytest
import structlog

from sparklog.broker.groups.group import Group
from tests.support import preloaded, spark_jars
from tests.support.logs import logging_restored
from tests.support.spark_variables import spark_variables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.certificates import Authority


Group.checks_itself = True
os.environ.update(spark_variables())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


SPARK: Final = _version(importlib.metadata.version("pyspark"))
_EXAMPLES: Final = int(os.environ.get("SPARKLOG_EXAMPLES", "1"))
# How long one example takes says more about the machine than about the code. `make test` always
# tries the same examples, and `make soak` new ones.
hypothesis.settings.register_profile("sparklog", deadline=None, derandomize=_EXAMPLES == 1)
hypothesis.settings.load_profile("sparklog")
HAS_DELTA: Final = importlib.util.find_spec("delta") is not None
"""The newest Spark has no delta-spark for some months."""


@pytest.fixture(autouse=True)
def _every_line() -> Iterator[None]:
    """Undoes what brokers of earlier tests have configured: an embedded one logs warnings only."""
    with logging_restored():
        structlog.reset_defaults()
        yield


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Prepares each test: whether it is skipped, its examples, and its group of xdist."""
    for item in items:
        _skip_without(item)
        _multiply_examples(item)
        if item.get_closest_marker("spark"):
            _group(item)


def pytest_collection_finish() -> None:
    """Leaves all that was imported and collected out of later collections of garbage."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Thaws it: at the end of a process, libraries complain about objects that are still there."""
    gc.unfreeze()


def _group(item: pytest.Item) -> None:
    """Gives a test that needs Spark to the worker that has what it needs.

    Each group runs in one worker, with one session: that of tests of Delta, whose classes take long
    to load, or that of the others. Tests that start programs are a group as well.
    """
    if item.get_closest_marker("spark_program"):
        item.add_marker(pytest.mark.xdist_group("spark-programs"))
        return
    has_delta = item.get_closest_marker("delta") is not None
    item.add_marker(pytest.mark.xdist_group("spark-delta" if has_delta else "spark"))
    if isinstance(item, pytest.Function):
        item.fixturenames.insert(0, "spark")  # some find it as the active session


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test that needs Spark, prepares what its sessions share.

    These are the jars, which two sessions must not download at once, and imported Python.
    """
    if item.get_closest_marker("spark"):
        spark_jars.prepare()
        os.environ.update(preloaded.variables("spark"))


def _multiply_examples(item: pytest.Item) -> None:
    """Gives a property test so many times its examples: see tools/soak.py."""
    test: Any = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)
    known = getattr(test, "_hypothesis_internal_use_settings", None)
    if _EXAMPLES > 1 and known is not None:
        more = hypothesis.settings(known, max_examples=_EXAMPLES * known.max_examples)
        test._hypothesis_internal_use_settings = more


def _skip_without(item: pytest.Item) -> None:
    """Leaves out what the installed Spark cannot do, so that the tests run with each version."""
    since = item.get_closest_marker("since")
    if since is not None and _version(*since.args) > SPARK:
        item.add_marker(pytest.mark.skip(reason=f"pyspark {since.args[0]} or newer can do this"))
    if item.get_closest_marker("delta") and not HAS_DELTA:
        item.add_marker(pytest.mark.skip(reason="delta-spark is not installed"))


@pytest.fixture(scope="session", autouse=True)
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Logs of brokers that tests start as processes of their own do not go to the user's folder."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(name="authority", scope="module")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A CA that signs certificates of brokers and clients."""
    from tests.support.certificates import Authority

    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One Spark session for the whole run: two local cores, UTC, nothing on the network.

    With Delta, if delta-spark is installed.
    The first use on a machine downloads Delta's jars through Ivy.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("sparklog-tests")
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.log.level": "ERROR",
    }
    if HAS_DELTA:
        from delta import configure_spark_with_delta_pip

        settings |= {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        }
        builder = configure_spark_with_delta_pip(builder)
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()
