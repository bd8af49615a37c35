"""Commands start quickly, because they load only the modules that they need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparklog

_PROGRAM = """
import atexit, sys
from sparklog.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main()
"""

_PARTS = frozenset(
    {
        "sparklog.broker.agent",
        "sparklog.client.consumer.consumer",
        "sparklog.client.producer.producer",
    }
)
_LIBRARIES = frozenset(
    {"asyncio", "numba", "obstore", "pandas", "pyarrow.compute", "pyarrow.parquet", "rich"}
    | {"structlog"}
)
_HEAVY = _PARTS | _LIBRARIES


def modules_of(*words: str, stdin: str = "") -> set[str]:
    """Runs a command as a process, and returns the modules that it has loaded."""
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words],
        input=stdin,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if "SPARKLOG_" not in name},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A root with a live broker, a topic, a record in it and a group."""
    folder = str(tmp_path_factory.mktemp("root"))
    with sparklog.connect(folder) as log:
        log.create_topic("t")
        with log.producer() as producer:
            producer.send("t", value=b"1").result()
        log.commit_group_offsets("g", {("t", 0): 0})
        yield folder


@pytest.mark.parametrize(
    "words",
    [(), ("topics",), ("topics", "list"), ("groups", "describe"), ("produce",), ("consume",)],
    ids=" ".join,
)
def test_help_loads_no_library_of_data(words: tuple[str, ...]) -> None:
    """Help loads Typer and its own dependencies only."""
    loaded = modules_of(*words, "--help")
    assert "typer" in loaded
    assert not loaded & (_HEAVY | {"msgspec", "numpy", "pyarrow"})


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("topics", "list"), set()),
        (("topics", "describe", "t"), set()),
        (("topics", "create", "t", "--if-absent"), set()),
        (("groups", "list"), set()),
        (("groups", "describe", "g"), {"pyarrow.compute"}),
        (("status",), set()),
        (("produce", "t"), {"pyarrow.compute", "sparklog.client.producer.producer"}),
        (("consume", "t"), {"pyarrow.compute", "sparklog.client.consumer.consumer"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_command_loads_only_what_it_needs(
    root: str, words: tuple[str, ...], needed: set[str]
) -> None:
    """With a live broker, a command loads no broker, and of the client only the part it uses."""
    loaded = modules_of(*words, "--root", root, stdin="a\n")
    assert "sparklog.storage.metadata.model" in loaded
    assert loaded & _HEAVY == needed


def test_a_supervisor_is_small() -> None:
    """It runs alongside its brokers as long as they do, and loads none of what they need."""
    program = "import sys, sparklog.broker.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    of_structlog = {"asyncio", "rich", "structlog"}
    assert not set(done.stdout.split()) & ((_HEAVY - of_structlog) | {"pyarrow"})


def test_topics_are_listed_without_a_broker(tmp_path: Path) -> None:
    """`topics list --root` reads the metadata: it starts no broker, and loads none."""
    with sparklog.connect(tmp_path) as log:
        log.create_topic("t")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    loaded = modules_of("topics", "list", "--root", str(tmp_path))
    assert "sparklog.client" not in loaded
    assert not loaded & _HEAVY
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
