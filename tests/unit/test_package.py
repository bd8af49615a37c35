"""The package: its public names, the cost of `import sparklog`, its extras and its documents."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import sparklog
from sparklog import errors, sinks, sources
from sparklog.broker import listening
from sparklog.client.consumer.reading import Record
from sparklog.sinks import options as sink
from sparklog.sources import options as source

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "spark.md"
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

USE_ALL_NAMES = """
import sparklog
for name in dir(sparklog):
    getattr(sparklog, name)
    print(name)
"""

MEASURE = """
import json, sys, time
started = time.perf_counter()
import sparklog
print(json.dumps({"seconds": time.perf_counter() - started, "modules": list(sys.modules)}))
"""


def test_import_loads_nothing_heavy() -> None:
    """`import sparklog` takes under 0.3 s and loads no Spark, Arrow, broker or storage."""
    answer = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True
    )
    found = json.loads(answer.stdout)
    loaded = [name for name in found["modules"] if name.startswith(HEAVY)]
    assert "sparklog" in found["modules"]
    assert loaded == []
    assert found["seconds"] < LIGHT_SECONDS


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist raises AttributeError, and is offered no alternative object."""
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        getattr(sparklog, "conect")  # noqa: B009


def test_public_names_are_listed_and_exist() -> None:
    """`dir(sparklog)` lists the names of `__all__`, and each can be used after the import."""
    assert dir(sparklog) == sorted(sparklog.__all__)
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", USE_ALL_NAMES],
        check=True,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.split() == sorted(sparklog.__all__)


PUBLIC = (
    *(found for name in sparklog.__all__ if inspect.ismodule(found := getattr(sparklog, name))),
    sinks,
    sources,
)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_a_public_module_offers_its_own_names_only(module: ModuleType) -> None:
    """Completion after a public module, which asks `dir`, offers no names that it only imports."""
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_public_names_of_errors_are_all_errors() -> None:
    """Every class of an error is a public name, and no function is."""
    classes = errors.all_codes(errors.SparklogError).values()
    of_module = {each.__name__ for each in classes if each.__module__ == errors.__name__}
    assert set(dir(errors)) == of_module


def test_type_checkers_know_the_public_names() -> None:
    """Every name of `__all__` has an import that type checkers read."""
    tree = ast.parse(Path(sparklog.__file__).read_text("utf-8"))
    imported = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(sparklog.__all__) - {"__version__"} <= imported


def test_public_names_are_the_clients_own() -> None:
    """The names lead to the objects of the client."""
    assert sparklog.Record is Record
    assert sparklog.errors is errors
    assert issubclass(sparklog.errors.UnknownTopic, sparklog.SparklogError)


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Where the log is", ("root", "path", "storage.*", "storage.secret.*")),
        ("Source", source._KNOWN),
        ("Sink", sink._KNOWN + sink._OF_SPARK),
    ],
)
def test_options_of_spark_are_documented(heading: str, known: tuple[str, ...]) -> None:
    """`docs/spark.md` has a row for every option that there is, with a default and a meaning."""
    section = DOCUMENT.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|([^|]*)\| ([^|]+) \|$", section, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(known)


# ------------------------------------------------------------------------------ installed packages

OF_THE_KAFKA_LISTENER = ("cramjam", "kio", "numba", "uvloop")

WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
"""
"""Makes a process believe that packages are not installed."""

HYPOTHESIS_LOADED = """
import sys
import sparklog.broker.kafka.listener
print("hypothesis" in sys.modules)
"""

USE_A_ROOT = """
import sparklog
with sparklog.connect("./root") as log:
    log.create_topic("t")
    with log.producer() as producer:
        producer.send("t", b"hello").result()
    print([record.value for record in log.consumer("t", follow=False)])
"""

READ_A_KAFKA_BATCH = """
from sparklog.storage import wal
try:
    wal.decode_kafka([], [b""])
except Exception as error:
    print(type(error).__name__, error)
"""


def _run(code: str, cwd: Path, *missing: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing) + code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_broker_never_loads_hypothesis(tmp_path: Path) -> None:
    """The Kafka listener loads no hypothesis, which kio would, and leaves no folder of it."""
    found = _run(HYPOTHESIS_LOADED, tmp_path)
    assert (found.stdout, found.stderr) == ("False\n", "")
    assert list(tmp_path.iterdir()) == []


def test_client_needs_none_of_the_kafka_listeners_packages(tmp_path: Path) -> None:
    """An embedded broker and its clients work without numba, kio, uvloop and cramjam."""
    found = _run(USE_A_ROOT, tmp_path, *OF_THE_KAFKA_LISTENER)
    assert (found.stdout, found.stderr) == ("[b'hello']\n", "")


def test_broker_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    """`sparklog broker` names the missing packages and the extra in one line, takes no epoch."""
    code = 'from sparklog.cli import app; app(["broker", "--root", "./root"])'
    found = _run(code, tmp_path, "kio", "numba")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr == (
        "sparklog: Packages needed for the Kafka listener at 127.0.0.1:9092 are not installed"
        " (kio, numba): pip install 'sparklog[broker]', or start the broker without it:"
        " --kafka ''.\n"
    )
    assert not list(tmp_path.glob("root/meta/*"))


def test_kafka_batch_without_numba_says_what_to_install(tmp_path: Path) -> None:
    """Reading records that a Kafka client wrote names the packages that decode them."""
    found = _run(READ_A_KAFKA_BATCH, tmp_path, "numba")
    assert found.stdout == (
        "NotInstalled Packages needed for decoding records that Kafka clients wrote are not"
        " installed (numba): pip install 'sparklog[spark]', or 'sparklog[broker]' for a broker.\n"
    )


def test_extras_name_what_the_code_looks_for() -> None:
    """`sparklog[broker]` installs what a broker's ports need, and a base install none of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    base = {_package(each) for each in project["dependencies"]}
    extras = project["optional-dependencies"]
    assert base.isdisjoint(OF_THE_KAFKA_LISTENER)
    needed = {
        *listening.KAFKA_PACKAGES,
        *listening.METRICS_PACKAGES,
        *listening.TLS_PACKAGES,
        *listening.OAUTH_PACKAGES,
    }
    assert {_package(each).replace("-", "_") for each in extras["broker"]} == needed
    assert set(listening.KAFKA_PACKAGES) == set(OF_THE_KAFKA_LISTENER)
    assert {_package(each) for each in extras["spark"]} >= {"cramjam", "numba"}


def test_wheel_has_the_two_packages_only() -> None:
    """Comparisons, examples, jobs and tests are in the source distribution, not in the wheel."""
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    assert {Path(each.distribution_path).parts[0] for each in files} == {
        "pyspark_sparklog",
        "sparklog",
    }
    sources = SdistBuilder(str(ROOT)).recurse_included_files()
    folders = {Path(each.relative_path).parts[0] for each in sources}
    assert folders >= {"benchmarks", "examples", "jobs", "sparklog", "tests"}


def _package(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()
