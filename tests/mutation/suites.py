"""The tests that look after a module, in stages: the quick and near ones first.

A mutation is killed by the first stage that fails, so most cost a few seconds. Only a survivor pays
for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = "0-79"
"""Seeds of the simulation that a mutation of storage or broker has to survive."""
_MOST = 10
"""Unit tests of a module that many import, nearest by name, before those that come last."""

_CONTRACTS = (
    # The first prefix that fits counts.
    ("sparklog/storage/objects/", ("test_objects.py", "test_agent.py")),
    ("sparklog/storage/", ("test_table.py", "test_retention.py", "test_agent.py")),
    ("sparklog/broker/kafka", ("test_kafka_listener.py", "test_kafka_listener_limits.py")),
    (
        "sparklog/broker/log/batch_cache",
        ("test_kafka_listener.py", "test_kafka_listener_limits.py"),
    ),
    ("sparklog/broker/flight/grpc/", ("test_flight_listener.py",)),
    ("sparklog/broker/flight/", ("test_flight_listener.py", "test_group_members.py")),
    (
        "sparklog/broker/groups/",
        ("test_kafka_listener.py", "test_group_members.py", "test_agent.py"),
    ),
    ("sparklog/broker/", ("test_agent.py", "test_retention.py", "test_group_members.py")),
)
_ON_SPARK = (
    ("sparklog/sources/native", ("test_native.py",)),
    ("sparklog/formats/values/", ("test_values.py", "test_typed_values.py")),
    ("sparklog/sources/json", ("test_values.py",)),
    ("sparklog/sources/values", ("test_values.py",)),
    ("sparklog/sources/groups", ("test_groups.py",)),
    ("sparklog/sources/offsets", ("test_first_batch.py",)),
    ("sparklog/sources/stream", ("test_first_batch.py", "test_order.py")),
    ("sparklog/sources/tasks", ("test_order.py",)),
)
_NEIGHBOURS = (
    ("sparklog/storage/", ("publisher", "broker", "janitor", "wal_cleaner", "takeover", "follow")),
    ("sparklog/broker/agent", ()),
    ("sparklog/broker/serving_loops", ()),
    ("sparklog/broker/flight/", ()),
    ("sparklog/broker/groups/", ()),
    ("sparklog/broker/kafka", ("kafka_parts", "kafka_messages", "kafka_produce", "kafka_batches")),
    ("sparklog/broker/", ("broker", "writer", "publisher", "janitor", "wal_cleaner", "takeover")),
    (
        "sparklog/sources/",
        ("source", "source_reader", "source_plans", "source_groups", "source_options"),
    ),
)
_NEAR = {
    # Alongside those that import the module, or bear its name: they use it through a whole broker.
    "sparklog/broker/log/spark_batches.py": ("writer",),
    "sparklog/broker/log/hot_tail.py": ("broker", "kafka_readers"),
    "sparklog/broker/log/needed_objects.py": ("confirmer", "wal_cleaner", "handover"),
    "sparklog/broker/log/wal_references.py": ("wal_cleaner", "janitor"),
    "sparklog/broker/groups/offsets_topic.py": ("broker",),
    "sparklog/broker/log/led_partitions.py": ("takeover", "wal_cleaner", "publisher", "broker"),
    "sparklog/broker/log/readers.py": ("broker", "kafka_readers"),
    "sparklog/broker/log/run_writer.py": ("publisher", "publish_process", "confirmer"),
}
_UNSIMULATED = re.compile(
    r"/sources/|/config/|/flight/|/kafka/|/formats/kernel|log/(batch_cache|kafka_readers)|broker/ports"
)
"""Modules that no run of the simulation reaches."""
_LAST = (
    # Tests of a minute or two that cover code no other test does; all that match run.
    (r"broker/(agent|ports|serving_loops)", ("contract/test_status.py", "contract/test_knocks.py")),
    (r"broker/(agent|ports|serving_loops)", ("contract/test_standing.py",)),
    (r"broker/log/publish_(process|worker)", ("contract/test_publish_process.py",)),
    (r"broker/flight/\w+\.", ("contract/test_hostile_flight.py",)),
    (
        r"broker/kafka/(connection|listener|memory|messages|scheduler|socket_stream)",
        ("contract/test_hostile.py",),
    ),
    (r"formats/topic_config", ("interop/test_kafka_admin.py",)),
    (r"broker/(broker|described|kafka/resources)", ("interop/test_kafka_admin.py",)),
    (
        r"apis/(alter|api_versions|create|delete_t|describe|incremental|list_c|metadata|offset_for)",
        ("interop/test_kafka_admin.py",),
    ),
    (r"apis/delete_records", ("interop/test_kafka_retention.py",)),
    (r"apis/(delete_t|fetch|init_p|list_o|metadata|produce)", ("interop/test_kafka_clients.py",)),
    (r"apis/(\w+_(coordinator|group)|heartbeat)", ("interop/test_kafka_groups.py",)),
    (r"apis/offset_(commit|fetch|delete)", ("interop/test_kafka_groups.py",)),
    (r"broker/groups/(coordinator|group)\.", ("interop/test_kafka_groups.py",)),
)


@lru_cache
def _unit_tests() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "tests/unit").glob("test_*.py"))}


def _direct(module: str) -> list[Path]:
    """The unit tests that import the module, bear its name or are near it, those first.

    Where there are none: those of the modules that import it.
    """
    *_, package, stem = Path(module).with_suffix("").parts
    near = (f"{package}_{stem}", stem, *_NEAR.get(module, ()))
    own = [f"test_{name}.py" for name in near]
    imports = _imports(module)
    found = [path for path, text in _unit_tests().items() if path.name in own or imports(text)]
    if not found:
        users = [each for each, text in _sources().items() if imports(text) and each != module]
        found = list({path: None for user in users for path in _direct(user)})
    return sorted(
        found,
        key=lambda path: (path.name not in own, stem not in path.stem, package not in path.stem),
    )


def _imports(module: str) -> Callable[[str], bool]:
    """Returns true if a text imports the module."""
    *packages, stem = Path(module).with_suffix("").parts
    if stem == "__init__":
        stem = packages.pop()
    package = re.escape(".".join(packages))
    pattern = re.compile(
        rf"from {package}\.{stem} import|import {package}\.{stem}\b"
        rf"|from {package} import (\([^)]*\b{stem}\b|[^(\n]*\b{stem}\b)"
    )
    return lambda text: pattern.search(text) is not None


@lru_cache
def _sources() -> dict[str, str]:
    paths = sorted((ROOT / "sparklog").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def _first(table: tuple[tuple[str, tuple[str, ...]], ...], module: str) -> tuple[str, ...]:
    return next((names for prefix, names in table if module.startswith(prefix)), ())


def stages(module: str) -> list[list[str]]:
    """Arguments for Python, a list a stage: each a run of pytest, or of the simulation."""
    direct = [str(path.relative_to(ROOT)) for path in _direct(module)]
    found = [_pytest(direct[:3]), _pytest(direct[3:_MOST])]
    if not _UNSIMULATED.search(module):
        found.append(["-m", "tests.simulation", "--seed", SEEDS])
    found.append(_pytest(direct[_MOST:]))
    neighbours = [f"tests/unit/test_{name}.py" for name in _first(_NEIGHBOURS, module)]
    found.append(
        _pytest([each for each in neighbours if each not in direct and (ROOT / each).exists()])
    )
    found.append(_pytest([f"tests/contract/{name}" for name in _first(_CONTRACTS, module)]))
    if module.startswith("sparklog/sources/"):
        on_spark = (*_first(_ON_SPARK, module), "test_read.py", "test_choices.py")
        found.append(_pytest([f"tests/spark/{name}" for name in on_spark]))
    for fits, names in _LAST:
        if re.search(fits, module):
            found.append(_pytest([f"tests/{name}" for name in names]))
    return [each for each in found if each]


def _pytest(paths: list[str]) -> list[str]:
    if not paths:
        return []
    options = ["-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    # A busy machine takes its time to start Spark, which is not a mistake of the program.
    seconds = 300 if any(path.startswith("tests/spark/") for path in paths) else 60
    return ["-m", "pytest", *options, f"--timeout={seconds}", *paths]
