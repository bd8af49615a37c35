"""The tests that look after a module, in stages: the quick and near ones first.

A mutation is killed by the first stage that fails, so most cost a few seconds. Only a survivor pays
for all of them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = "0-79"
"""Seeds of the simulation that a mutation of storage or broker has to survive."""

_CONTRACTS = (
    # The first prefix that fits counts.
    ("sparklog/storage/objects/", ("test_objects.py", "test_agent.py")),
    ("sparklog/storage/", ("test_table.py", "test_retention.py", "test_agent.py")),
    ("sparklog/broker/kafka", ("test_kafka_door.py", "test_kafka_room.py")),
    ("sparklog/broker/ahead", ("test_kafka_door.py", "test_kafka_room.py")),
    ("sparklog/broker/flight", ("test_flight_door.py", "test_group_members.py")),
    ("sparklog/broker/", ("test_agent.py", "test_retention.py", "test_group_members.py")),
)
_NEIGHBOURS = (
    ("sparklog/storage/", ("publisher", "core", "janitor", "walkeeper", "lease", "follow")),
    ("sparklog/broker/kafka", ("kafka_parts", "kafka_messages", "kafka_produce", "kafka_batches")),
    ("sparklog/broker/", ("core", "writer", "publisher", "janitor", "walkeeper", "lease")),
    ("sparklog/sources/", ("source", "source_reader", "source_plans", "source_groups")),
)


@lru_cache
def _unit_tests() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "tests/unit").glob("test_*.py"))}


def _direct(module: str) -> list[Path]:
    """Unit tests that import the module, those that bear its name first."""
    *packages, stem = Path(module).with_suffix("").parts
    package = ".".join(packages)
    imports = re.compile(
        rf"from {re.escape(package)}\.{stem} import|import {re.escape(package)}\.{stem}\b"
        rf"|from {re.escape(package)} import (\([^)]*\b{stem}\b|[^(\n]*\b{stem}\b)"
    )
    found = [path for path, text in _unit_tests().items() if imports.search(text)]
    return sorted(found, key=lambda path: stem not in path.stem)


def _first(table: tuple[tuple[str, tuple[str, ...]], ...], module: str) -> tuple[str, ...]:
    return next((names for prefix, names in table if module.startswith(prefix)), ())


def stages(module: str) -> list[list[str]]:
    """Arguments for Python, a list a stage: each a run of pytest, or of the simulation."""
    direct = [str(path.relative_to(ROOT)) for path in _direct(module)]
    found = [_pytest(direct[:3]), _pytest(direct[3:])]
    if not module.startswith("sparklog/sources/") and "/kafka/" not in module:
        found.append(["-m", "tests.simulation", "--seed", SEEDS])
    neighbours = [f"tests/unit/test_{name}.py" for name in _first(_NEIGHBOURS, module)]
    found.append(
        _pytest([each for each in neighbours if each not in direct and (ROOT / each).exists()])
    )
    found.append(_pytest([f"tests/contract/{name}" for name in _first(_CONTRACTS, module)]))
    if module.startswith("sparklog/sources/"):
        found.append(_pytest(["tests/spark/test_read.py", "tests/spark/test_choices.py"]))
    return [each for each in found if each]


def _pytest(paths: list[str]) -> list[str]:
    if not paths:
        return []
    options = ["-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider", "--timeout=60"]
    return ["-m", "pytest", *options, *paths]
