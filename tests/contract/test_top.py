"""`sparklog top`: pictures of a broker at work, and its exit codes."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import sparklog
from sparklog.cli import app
from sparklog.cli.shared import ExitCode
from sparklog.cli.top import picture
from sparklog.formats.flight_messages import (
    BrokerFigures,
    BrokerInfo,
    GroupLag,
    MemoryBudget,
    TopicFigures,
)
from tests.support.standing import standing


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the developer's environment variables."""
    for name in list(os.environ):
        if name.startswith("SPARKLOG_"):
            monkeypatch.delenv(name)


def top(*arguments: str) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "200"})


def figures(at_seconds: float, records: int, **more: object) -> BrokerFigures:
    """Figures of a broker with two topics; `records` are those of topic busy."""
    fields: dict[str, object] = {
        "at_us": round(at_seconds * 1e6),
        "broker": BrokerInfo(broker=3, epoch=1, address="host:1", kind="standing"),
        "uptime_seconds": 1234.5,
        "topic_count": 2,
        "partition_count": 8,
        "records_in": records,
        "bytes_in": records * 1024,
        "flushes": records // 10,
        "store_requests": {"put": records // 100},
        "memory": [
            MemoryBudget(budget="hot_tail", held_bytes=75, limit_bytes=100),
            MemoryBudget(budget="unpublished", held_bytes=1, limit_bytes=100),
        ],
        "topics": [
            TopicFigures(topic="quiet", partitions=4, held_back=True, records_in=10**6),
            TopicFigures(topic="busy", partitions=4, records_in=records, lag_records=1_500,
                         lag_seconds=0.75, files=12, small_files=3, table_bytes=5 << 20),
        ],
        "groups": [GroupLag(group="g", state="Stable", members=2, lag=4_000, lag_seconds=12.25)],
        **more,
    }  # fmt: skip
    return BrokerFigures(**fields)  # type: ignore[arg-type]


def shown(
    before: BrokerFigures, now: BrokerFigures, rows: int = 10, width: int = 200, **more: Any
) -> list[str]:
    """The lines of a picture."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(before, now, rows=rows, **more))
    return console.export_text().splitlines()


def test_rates_are_those_between_two_moments() -> None:
    """Records, bytes, flushes and operations per second; busy topics come first."""
    text = shown(figures(10.0, 1_000), figures(12.0, 21_000))
    assert "broker 3 (standing) at host:1" in text[0]
    assert "in 10,000 records/s" in text[1]
    assert "9.8 MiB/s" in text[1]
    assert "flushes 1,000/s" in text[1]
    assert "storage 100 operations/s" in text[2]
    assert "hot_tail 75%" in text[2]
    busy = next(number for number, line in enumerate(text) if line.startswith("busy"))
    quiet = next(number for number, line in enumerate(text) if line.startswith("quiet"))
    assert busy < quiet
    for cell in ("10,000", "1,500", "0.8 s", "12", "5.0 MiB"):
        assert cell in text[busy]
    assert "held back" in text[quiet]
    (group,) = [line for line in text if line.startswith("g ")]
    for cell in ("Stable", "2", "4,000", "12.2 s"):
        assert cell in group


def test_a_broker_that_started_again_counts_from_zero() -> None:
    """No rate is negative."""
    text = shown(figures(10.0, 50_000), figures(12.0, 2_000))
    assert "in 1,000 records/s" in text[1]


def test_only_some_topics_are_shown() -> None:
    """Those with the highest rates."""
    text = "\n".join(shown(figures(10.0, 1_000), figures(12.0, 21_000), rows=1))
    assert "busy" in text
    assert "quiet" not in text


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_keeps_names(width: int) -> None:
    """Less important columns are left out; names, rates and unpublished records stay."""
    name = "orders-of-the-northern-store"
    topic = TopicFigures(
        topic=name, partitions=4, records_in=123_456_789, lag_records=1_500, table_bytes=5 << 30
    )
    before = figures(10.0, 1_000, topics=[TopicFigures(topic=name, partitions=4)])
    lines = shown(before, figures(12.0, 21_000, topics=[topic]), width=width)
    (line,) = [each for each in lines if each.startswith(name + " ")]
    assert "61,728,394" in line
    assert "1,500" in line
    (heading,) = [each for each in lines if each.startswith("topic ")]
    assert "small" not in heading
    assert ("age" in heading) is (width == 80)
    assert max(map(len, lines)) <= width


def test_other_brokers_of_a_root_are_named() -> None:
    """A cluster has several: the picture says which are not in it, and how to look at them."""
    others = [
        BrokerInfo(broker=each, epoch=1, address=f"host:{each}", kind="standing") for each in (4, 5)
    ]
    text = " ".join("\n".join(shown(figures(10.0, 1), figures(12.0, 2), others=others)).split())
    assert "not shown: broker 4 at host:4, 5 at host:5 (--bootstrap HOST:PORT shows it)" in text


def test_a_broker_is_shown_by_root_and_by_address(tmp_path: Path) -> None:
    """Without a port for metrics; in text and as JSON."""
    with standing(tmp_path) as broker:
        with sparklog.connect(broker.flight) as log:
            log.create_topic("orders", partitions=3)
            with log.producer() as producer:
                producer.send("orders", value=b"v")
        for where in (("--root", str(tmp_path)), ("--bootstrap", broker.flight)):
            found = top(*where, "--once")
            assert found.exit_code == ExitCode.OK, found.output
            assert "orders" in found.stdout
            counts = json.loads(top(*where, "--json").stdout)
            (topic,) = [each for each in counts["topics"] if each["topic"] == "orders"]
            assert (topic["partitions"], topic["records_in"]) == (3, 1)


def test_no_broker_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """As `sparklog status` has, and none is started."""
    with standing(tmp_path):
        pass
    found = top("--root", str(tmp_path), "--once")
    assert found.exit_code == ExitCode.NO_BROKER
    assert "no broker serves" in found.stderr


def test_help_has_an_example() -> None:
    """One that can be copied."""
    assert "sparklog top --root ./data --once" in top("--help").stdout
