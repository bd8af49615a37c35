"""Topics whose values are Avro with schemas of an outside registry, through a whole broker."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.cli import app
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LogSettings,
    PublisherSettings,
    RegistrySettings,
)
from tests.support.registry import FakeRegistry, double, framed, record, registry, text
from tests.support.waiting import wait_until

CONFIG = {"value.format": "avro"}
ORDER = record("Order", "customer:string", "amount:double")
GROWN = record("Order", "customer:string", "amount:double", "city:string")


KEEN: Final = JanitorSettings(interval_seconds=0.05)
"""A janitor that visits topics often."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses of the broker, except those of the table, become short."""
    monkeypatch.setattr("sparklog.broker.log.janitor.FILL_EVERY_SECONDS", 0.05)
    monkeypatch.setattr("sparklog.broker.log.janitor.UPKEEP_RETRY_SECONDS", 0.1)
    monkeypatch.setattr("sparklog.broker.log.schema_keeper._RETRY_FIRST_SECONDS", 0.05)
    monkeypatch.setattr("sparklog.broker.log.schema_keeper._RETRY_MOST_SECONDS", 0.1)
    monkeypatch.setattr("sparklog.broker.log.schema_keeper.UNKNOWN_SECONDS", 0.2)
    monkeypatch.setattr("sparklog.broker.log.schema_keeper.SCAN_SECONDS", 0.2)
    monkeypatch.setattr("sparklog.broker.loops.RETRY_SECONDS", 0.05)


@pytest.fixture
def known() -> Iterator[FakeRegistry]:
    """A registry with the first version of the subject `t-value`, under id 1."""
    with registry() as found:
        found.register("t-value", ORDER)
        yield found


def broker(root: Path, url: str, **changed: Any) -> Agent:
    """A broker that publishes when asked."""
    settings: dict[str, Any] = {
        "flight": FlightSettings(listen="127.0.0.1:0"),
        "kafka": KafkaSettings(listen=""),
        "publisher": PublisherSettings(interval_seconds=60),
        "janitor": JanitorSettings(enabled=False),
        "registry": RegistrySettings(url=url, timeout_seconds=1),
        "log": LogSettings(level="error"),
    }
    return Agent(BrokerSettings(root=str(root), id=1, **(settings | changed)))


def order(customer: str, amount: float, schema_id: int = 1) -> bytes:
    """A value of the first version."""
    return framed(schema_id, text(customer) + double(amount))


def send(log: sparklog.Log, *values: bytes | None) -> None:
    """Records of one partition, in one file of the table."""
    with log.producer() as producer:
        for value in values:
            producer.send("t", value, partition=0)
    log.flush_to_table()


def rows(root: Path, *names: str) -> list[tuple[Any, ...]]:
    """The columns as another engine reads them, in the order of the log."""
    found = DeltaTable(str(root / "topics" / "t")).to_pyarrow_table().sort_by("offset")
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


def names_of(root: Path) -> set[str]:
    """The columns of the table, whichever broker has added them."""
    return set(DeltaTable(str(root / "topics" / "t")).to_pyarrow_table().schema.names)


def test_values_become_columns_and_new_versions_add_some(
    tmp_path: Path, known: FakeRegistry
) -> None:
    """The columns of a new version are there before its first record, and the bytes stay."""
    values = [order("alice", 1.5), None, b"not framed"]
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, *values)
        assert rows(tmp_path, "customer", "amount") == [("alice", 1.5), (None, None), (None, None)]
        known.register("t-value", GROWN)
        values.append(framed(2, text("bob") + double(2) + text("Bern")))
        send(log, values[-1], order("carol", 3))
        assert rows(tmp_path, "customer", "amount", "city")[3:] == [
            ("bob", 2, "Bern"),
            ("carol", 3, None),
        ]
        assert [each for (each,) in rows(tmp_path, "value")][:4] == values
        reasons = [each for (each,) in rows(tmp_path, "_error")]
        assert [each is None for each in reasons] == [True, True, False, True, True]
        assert log.read("t", columns=["customer", "city"]).to_pydict() == {
            "customer": ["alice", None, None, "bob", "carol"],
            "city": [None, None, None, "Bern", None],
        }
        columns = [(each.name, each.type) for each in log.describe("t").columns]
        assert columns == [("customer", "STRING"), ("amount", "DOUBLE"), ("city", "STRING")]


def waits(root: Path) -> list[str | None]:
    """Why each record has no columns."""
    return [each for (each,) in rows(root, "_error")]


def test_a_dead_registry_delays_nothing(tmp_path: Path, known: FakeRegistry, quick: None) -> None:
    """Records are rows at once, with the reason; once it answers, the same rows get columns."""
    known.answer = lambda _: (500, b"{}")
    with broker(tmp_path, known.url, janitor=KEEN) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, order("alice", 1.5))
        send(log, order("bob", 2))
        assert waits(tmp_path) == ["value: waiting: schema 1 is not known yet"] * 2
        found = log.read("t")
        assert found["value"].to_pylist() == [order("alice", 1.5), order("bob", 2)]
        info = agent.parts.broker.status().registry
        assert info is not None
        assert [(each.topic, each.records) for each in info.waiting] == [("t", 2)]
        assert (info.url, info.reason) == (known.url, "it answers 500; redirects are not followed")
        assert log.describe("t").waiting_rows == 2
        shown = CliRunner().invoke(app, ["status", "--bootstrap", agent.address])
        assert "has given no answer since" in shown.stdout
        assert "t: 2 records for a schema" in shown.stdout
        assert shown.exit_code == 0, shown.stdout  # it takes no broker out of service
        assert found.select(["_error", "value"]).num_rows == 2
        known.answer = lambda _: None
        wait_until(lambda: waits(tmp_path) == [None, None], "the change")
        assert rows(tmp_path, "customer", "amount") == [("alice", 1.5), ("bob", 2)]
        known.answer = lambda _: (500, b"{}")  # its text is in the root: no broker asks again
        send(log, order("carol", 3))
        assert rows(tmp_path, "customer", "amount")[2:] == [("carol", 3)]
        assert agent.parts.broker.status().registry.waiting == []  # type: ignore[union-attr]


def test_a_silent_registry_delays_the_table_once(
    tmp_path: Path, known: FakeRegistry, quick: None
) -> None:
    """By `value.wait.ms`; later records with the same schema do not wait again."""
    known.may_answer.clear()
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG | {"value.wait.ms": "300"})
        began = time.monotonic()
        send(log, order("alice", 1.5))
        first, began = time.monotonic() - began, time.monotonic()
        assert first >= 0.3
        send(log, order("bob", 2))
        assert time.monotonic() - began < first
        assert [each is None for each in waits(tmp_path)] == [False, False]


def test_unknown_ids_and_garbage_that_looks_framed(
    tmp_path: Path, known: FakeRegistry, quick: None
) -> None:
    """They wait, whatever their number, and hold up no other record; an id that is registered
    later is asked for again.
    """
    late = framed(7, text("dave") + double(4))
    garbage = [framed(1_000_000 + each, b"x") for each in range(50)]
    with broker(tmp_path, known.url, janitor=KEEN) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, order("alice", 1.5), late, *garbage)
        assert rows(tmp_path, "customer")[:2] == [("alice",), (None,)]
        assert all(each and "waiting" in each for each in waits(tmp_path)[1:])
        known.register("t-value", record("Order", "customer:string", "amount:double", doc="7"))
        known.schemas[7] = known.schemas[2]
        known.versions["t-value"].append(7)
        wait_until(lambda: rows(tmp_path, "customer")[1] == ("dave",), "the change")
        assert all(each and "waiting" in each for each in waits(tmp_path)[2:])
        log.compact("t")
        assert rows(tmp_path, "customer")[:2] == [("alice",), ("dave",)]


def test_another_text_under_a_known_id(tmp_path: Path, known: FakeRegistry, quick: None) -> None:
    """As of a registry that was created again: new records wait, and old ones keep columns."""
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, order("alice", 1.5))
    known.schemas[1] = {"schema": json.dumps(record("Order", "amount:double", "customer:string"))}
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        keeper = agent.parts.schemas
        assert keeper is not None
        send(log, order("bob", 2))  # by the text of the root: the broker has not compared it yet
        wait_until(lambda: keeper.state().conflicts == [1], "the change")
        send(log, order("carol", 3))
        assert rows(tmp_path, "customer") == [("alice",), ("bob",), (None,)]
        with pytest.raises(errors.SchemaLost, match="the schema 1"):
            log.compact("t")
        assert rows(tmp_path, "customer") == [("alice",), ("bob",), (None,)]
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        send(log, order("dave", 4))  # the mark is in the root
        assert rows(tmp_path, "customer") == [("alice",), ("bob",), (None,), (None,)]


def test_a_field_that_changes_its_type(tmp_path: Path, known: FakeRegistry) -> None:
    """It does not change the column; the record's other fields have their values."""
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, order("alice", 1.5))
        number = known.register("t-value", record("Order", "customer:string", "amount:string"))
        send(log, framed(number, text("bob") + text("much")))
        assert rows(tmp_path, "customer", "amount") == [("alice", 1.5), ("bob", None)]
        assert "amount" in (waits(tmp_path)[1] or "")
        assert [each.name for each in log.describe("t").columns] == ["customer", "amount"]


def test_a_schema_of_another_subject(tmp_path: Path, known: FakeRegistry) -> None:
    """Fields that fit by name fill columns; its others add none, as with several record types."""
    number = known.register("other", record("Parcel", "customer:string", "weight:double"))
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, order("alice", 1.5), framed(number, text("bob") + double(9)))
        send(log, order("carol", 3))
        assert rows(tmp_path, "customer", "amount") == [
            ("alice", 1.5),
            ("bob", None),
            ("carol", 3),
        ]
        assert waits(tmp_path) == [None] * 3
        assert [each.name for each in log.describe("t").columns] == ["customer", "amount"]


def test_columns_that_are_given_or_only_proposed(
    tmp_path: Path, known: FakeRegistry, quick: None
) -> None:
    """With DDL, or with `value.evolve=propose`, no schema adds a column to those that are there."""
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG | {"value.schema": "amount DOUBLE"})
        send(log, order("alice", 1.5))
        assert rows(tmp_path, "amount") == [(1.5,)]
        log.alter("t", {"value.schema": "subject:t-value", "value.evolve": "propose"})
        known.register("t-value", GROWN)
        send(log, framed(2, text("bob") + double(2) + text("Bern")))
        assert [each.name for each in log.describe("t").columns] == ["amount"]
        proposal = log.propose_columns("t")
        found = [(each.field.name, each.type, each.records) for each in proposal.columns]
        assert found == [("customer", "STRING", 2), ("city", "STRING", 1)]
        command = ["topics", "columns", "t", "--accept", "--bootstrap", agent.address]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert log.describe("t").config["value.format"] == "avro"
        assert log.describe("t").config["value.schema"] == proposal.schema
        assert len(log.describe("t").columns) == 3
        log.alter("t", {"value.schema": "amount DOUBLE"})
        log.alter("t", {"value.evolve": None})
        log.alter("t", {"value.schema": None})
        send(log, framed(2, text("bob") + double(2) + text("Bern")))
        wait_until(lambda: all(each.is_filled for each in log.describe("t").columns), "the change")


def test_a_topic_of_json_that_becomes_one_of_avro(tmp_path: Path, known: FakeRegistry) -> None:
    """And back: a merge decodes each record as its own bytes say, so none loses its columns."""
    as_json = b'{"customer": "json", "amount": 9}'
    schema = "customer STRING, amount DOUBLE"
    with broker(tmp_path, known.url) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, {"value.format": "json", "value.schema": schema})
        send(log, as_json, order("early", 1))
        log.alter("t", CONFIG)
        send(log, as_json, order("alice", 1.5))
        log.alter("t", {"value.format": "json"})
        send(log, as_json, order("late", 1))
        log.compact("t")
        found = rows(tmp_path, "customer")
        assert [each for (each,) in found] == ["json", "early", "json", "alice", "json", "late"]


def test_a_root_that_refuses_schemas(tmp_path: Path, known: FakeRegistry, quick: None) -> None:
    """Records are rows all the same, and get their columns once the root accepts them."""
    with broker(tmp_path, known.url, janitor=KEEN) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        (tmp_path / "schemas").write_text("in the way")
        send(log, order("alice", 1.5))
        assert waits(tmp_path) != [None]
        (tmp_path / "schemas").unlink()
        wait_until(lambda: rows(tmp_path, "_error") == [(None,)], "the change")
        assert rows(tmp_path, "customer") == [("alice",)]


def test_two_brokers_add_columns_at_once(tmp_path: Path, known: FakeRegistry) -> None:
    """Both fields become columns, whichever broker was first."""
    two = record("Order", "customer:string", "amount:double", "zip:string")
    with (
        broker(tmp_path, known.url) as one,
        Agent(msgspec.structs.replace(one.settings, id=2)) as other,
        sparklog.connect(one.address) as log,
    ):
        log.create_topic("t", 2, CONFIG)
        wait_until(
            lambda: {each.leader for each in log.describe("t").partitions} == {1, 2}, "the leaders"
        )
        del other
        known.register("t-value", GROWN)
        known.register("t-value", two)
        with log.producer() as producer:
            producer.send("t", framed(2, text("a") + double(1) + text("Bern")), partition=0)
            producer.send("t", framed(3, text("b") + double(2) + text("3011")), partition=1)
        log.flush_to_table()
        wait_until(lambda: {"city", "zip"} <= names_of(tmp_path), "the columns")
        log.compact("t")
        found = set(rows(tmp_path, "customer", "city", "zip"))
        assert found == {("a", "Bern", None), ("b", None, "3011")}
