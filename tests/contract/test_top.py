"""`sparklog top`: pictures of brokers at work, and its exit codes."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import sparklog
from sparklog import errors, limits
from sparklog import status as statuses
from sparklog.cli import app
from sparklog.cli.top_picture import Member, picture
from sparklog.formats.flight_messages import (
    BrokerDescription,
    BrokerFigures,
    BrokerInfo,
    ClusterDescription,
    GroupLag,
    MemoryBudget,
    TopicFigures,
)
from sparklog.formats.store_bill import StoreBill, StoreRates
from sparklog.terminal.commands import ExitCode
from tests.support.standing import standing
from tests.support.waiting import wait_until


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


def shown(before: BrokerFigures, now: BrokerFigures, rows: int = 10, width: int = 200) -> list[str]:
    """The lines of a picture of one broker."""
    return shown_all({3: before}, [Member(broker=3, state="up", figures=now)], rows, width)


def shown_all(
    before: Mapping[int, BrokerFigures], now: Sequence[Member], rows: int = 10, width: int = 200
) -> list[str]:
    """The lines of a picture."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture(before, now, rows=rows))
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


def test_the_bill_of_a_bucket_is_shown() -> None:
    """It is that of one broker or of all; a local root has none."""
    rates = StoreRates(purpose="log", puts=4.1, dollars_per_month=54.0)
    bill = StoreBill(prices="S3 Standard", seconds=60.0, rates=[rates])
    words = "about 54 dollars a month at the prices of S3 Standard"
    assert not any("dollars" in line for line in shown(figures(10.0, 0), figures(12.0, 0)))
    text = shown(figures(10.0, 0), figures(12.0, 0, bill=bill))
    assert f"4.1 puts/s, 0.0 listings/s, 0.0 reads/s: {words}" in text[3]
    both = [
        Member(broker=number, state="up", figures=figures(12.0, 0, bill=bill)) for number in (3, 4)
    ]
    assert any("8.2 puts/s" in line and "108 dollars" in line for line in shown_all({}, both))


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


def member(broker: int, records: int, *, epoch: int = 1, name: str = "orders") -> BrokerFigures:
    """Figures of a broker that leads 4 partitions of a topic, and has one topic of its own."""
    return figures(
        12.0 if records else 10.0,
        records,
        broker=BrokerInfo(broker=broker, epoch=epoch, address=f"host:{broker}", kind="standing"),
        partition_count=5,
        connections=7,
        groups=[GroupLag(group=f"g-{broker}", state="Stable", lag=broker)],
        topics=[
            TopicFigures(topic=name, partitions=4, records_in=records, lag_records=10 * broker,
                         lag_seconds=broker, files=3, held_back=broker == 2),
            TopicFigures(topic=f"only-{broker}", partitions=1),
        ],
    )  # fmt: skip


def cells(lines: Sequence[str], name: str) -> list[str]:
    """The words of the line that begins with a name, below the lines with sums."""
    *_, line = [each for each in lines if each.startswith(f"{name} ")]
    return line.split()


def test_a_cluster_is_shown_as_a_whole() -> None:
    """Rates and figures of topics are those of all leaders, groups those of all coordinators.

    Each broker has a line; one that does not answer is shown, with the reason, and counts nowhere.
    """
    before = {broker: member(broker, 0) for broker in (1, 2)}
    now = [
        Member(broker=1, state="up", address="host:1", leads=5, figures=member(1, 20_000)),
        Member(broker=2, state="draining", address="host:2", leads=5, figures=member(2, 40_000)),
        Member(broker=3, state="up", address="host:3", leads=4, silence="it timed out"),
        Member(broker=4, state="dead", address="host:4"),
    ]
    lines = shown_all(before, now)
    assert "2 of 4 brokers answer" in lines[0]
    assert "2 topics, 10 partitions" in lines[0]
    assert "14 Kafka clients" in lines[0]
    assert "in 30,000 records/s" in lines[1]
    assert "storage 300 operations/s" in lines[1]
    assert cells(lines, "1")[:4] == ["1", "up", "5", "10,000"]
    assert cells(lines, "2")[:4] == ["2", "draining", "5", "20,000"]
    assert cells(lines, "2")[-1] == "host:2"
    assert cells(lines, "3")[:5] == ["3", "no", "answer", "4", "-"]
    assert cells(lines, "4")[:4] == ["4", "dead", "0", "-"]
    assert "broker 3 does not answer: it timed out" in lines
    assert cells(lines, "orders")[:3] == ["orders", "8", "30,000"]
    for cell in ("30", "2.0", "6", "held"):
        assert cell in cells(lines, "orders")
    assert [each.split()[0] for each in lines if each.startswith("g-")] == ["g-2", "g-1"]


def test_a_broker_in_a_new_epoch_has_no_rates_yet() -> None:
    """Its counts began again, and a partition that has moved to it brought none of its records."""
    now = [
        Member(broker=1, state="up", figures=member(1, 20_000)),
        Member(broker=2, state="up", figures=member(2, 40_000, epoch=2)),
        Member(broker=3, state="up", figures=member(3, 60_000)),
    ]
    lines = shown_all({broker: member(broker, 0) for broker in (1, 2)}, now)
    assert "in 10,000 records/s" in lines[1]
    assert cells(lines, "orders")[2] == "10,000"


def test_a_narrow_terminal_keeps_names_of_a_cluster() -> None:
    """At 80 columns the topic's name is whole, and no line is longer."""
    name = "orders-of-the-northern-store.v2"
    now = [
        Member(broker=1, state="up", address="host-1.example:8815", leads=500,
               figures=member(1, 123_456_789, name=name)),
        Member(broker=2, state="up", address="host-2.example:8815", leads=500, silence="late"),
    ]  # fmt: skip
    lines = shown_all({1: member(1, 0, name=name)}, now, width=80)
    assert cells(lines, name)[0] == name
    assert "61,728,394" in cells(lines, name)
    assert "61,728,394" in cells(lines, "1")
    assert cells(lines, "2")[:3] == ["2", "no", "answer"]
    assert max(map(len, lines)) <= 80


def test_a_cluster_with_a_broker_that_hangs_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All brokers are asked, by the root or by an address; one that hangs delays the others once.

    Topics of all that answer are summed; --broker shows one in detail.
    """
    monkeypatch.setattr(importlib.import_module("sparklog.cli.top"), "_FIRST_SECONDS", 0.05)
    with standing(tmp_path, "--id", "1") as one, standing(tmp_path, "--id", "2") as two:
        with sparklog.connect(one.flight) as log:
            log.create_topic("orders", partitions=4)
            with log.producer() as producer:
                for partition in range(4):
                    producer.send("orders", value=b"v", partition=partition)
        for where in (("--root", str(tmp_path)), ("--bootstrap", two.flight)):
            lines = top(*where, "--once").stdout.splitlines()
            assert "2 of 2 brokers answer" in lines[0], lines
            assert cells(lines, "orders")[:2] == ["orders", "4"]
        counts = [*map(json.loads, top(*where, "--json").stdout.splitlines())]
        assert [each["broker"]["broker"] for each in counts] == [1, 2]
        topics = [topic for each in counts for topic in each["topics"]]
        assert sum(each["records_in"] for each in topics if each["topic"] == "orders") == 4
        assert "broker 2 (standing) at" in top(*where, "--once", "--broker", "2").stdout
        found = top(*where, "--once", "--broker", "9")
        assert "there is no broker 9: the ids are 1, 2" in " ".join(found.stderr.split())
        monkeypatch.setattr(limits, "PROBE_TIMEOUT_SECONDS", 0.3)
        two.send(signal.SIGSTOP)
        lines = top("--root", str(tmp_path), "--once").stdout.splitlines()
        for each in (two, one):
            each.end(signal.SIGKILL)
        assert "1 of 2 brokers answer" in lines[0], lines
        assert cells(lines, "1")[1] == "up"
        assert cells(lines, "2")[1:3] == ["no", "answer"]
        assert any(line.startswith("broker 2 does not answer: silent for ") for line in lines)
        assert "orders" in cells(lines, "orders")


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


def test_a_silent_broker_delays_one_picture_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked alongside the others from then on, and shown again once it answers.

    A broker that has joined since is found, and one that has died stays in the picture.
    """
    calls, may_answer = Counter[str](), threading.Event()

    def figures_of(address: str, *, timeout_seconds: float, **_: object) -> BrokerFigures:
        calls[address] += 1
        if address == "host:2":
            if calls[address] == 1:
                raise errors.BrokerUnavailable(address=address, reason="silent")
            assert may_answer.wait(30.0)
        return member(int(address.removeprefix("host:")), 0)

    states = {1: "up", 2: "up"}

    class AView:
        credentials = None

        def describe(self, *, topics: bool = False) -> ClusterDescription:
            brokers = [
                BrokerDescription(broker=each, epoch=1, state=state, address=f"host:{each}")
                for each, state in states.items()
            ]
            return ClusterDescription(
                cluster_id="c", root="file:///root", controller=1, brokers=brokers, epochs=[],
                topics=0, partitions=0, lost_partitions=0, lost=[],
            )  # fmt: skip

    monkeypatch.setattr(statuses, "figures_of", figures_of)
    cluster = importlib.import_module("sparklog.cli.top")._Cluster(AView(), None)

    def seen() -> dict[int, str]:
        cluster.follow()
        return {
            each.broker: "answers" if each.figures is not None else each.silence or each.state
            for each in cluster.look()
        }

    assert seen() == {1: "answers", 2: "silent"}
    assert seen() == {1: "answers", 2: "silent"}  # the second call waits meanwhile
    states.update({1: "dead", 3: "up"})
    may_answer.set()
    wait_until(lambda: seen().get(2) == "answers", "it answers")  # it is no longer silent: a look
    wait_until(lambda: seen() == {1: "dead", 2: "answers", 3: "answers"}, "all are found")


def test_no_broker_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """As `sparklog status` has, and none is started."""
    with standing(tmp_path):
        pass
    found = top("--root", str(tmp_path), "--once")
    assert found.exit_code == ExitCode.NO_BROKER
    assert "no broker serves" in found.stderr
    found = top("--root", str(tmp_path), "--once", "--broker", "0")
    assert found.exit_code == ExitCode.NO_BROKER
    assert found.stderr == "sparklog: broker 0 is stopped\n"


def test_help_has_an_example() -> None:
    """One that can be copied."""
    assert "sparklog top --root ./data --once" in top("--help").stdout
