"""Topics with typed columns, through a whole broker, as other engines see their tables."""

from __future__ import annotations

import contextlib
import datetime as dt
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

import sparklog
from sparklog import errors, limits
from sparklog.broker import agent as agent_module
from sparklog.broker.agent import Agent
from sparklog.cli import app
from sparklog.formats.values import derive
from sparklog.settings import (
    BrokerSettings,
    FlightSettings,
    JanitorSettings,
    KafkaSettings,
    LogSettings,
    PublisherSettings,
)
from tests.support.waiting import wait_until

SCHEMA = "customer STRING, amount DOUBLE"
CONFIG = {"value.format": "json", "value.schema": SCHEMA}
ODD = (
    b'{"customer": "a", "amount": 1.5}',
    b'{"customer": "b", "amount": "n/a", "unknown": [1]}',
    b"not JSON",
    None,
    b'{"amount": 2}',
    b"\xff",
)
FOUND = [("a", 1.5), ("b", None), (None, None), (None, None), (None, 2.0), (None, None)]


def broker(root: Path, **changed: Any) -> Agent:
    """A broker that publishes when asked, and merges only then."""
    known: dict[str, Any] = {
        "flight": FlightSettings(listen="127.0.0.1:0"),
        "kafka": KafkaSettings(listen=""),
        "publisher": PublisherSettings(interval_seconds=60),
        "janitor": JanitorSettings(enabled=False),
        "log": LogSettings(level="error"),
    }
    return Agent(BrokerSettings(root=str(root), id=1, **(known | changed)))


def send(log: sparklog.Log, *values: bytes | None, key: bytes | None = None) -> None:
    """Records of one partition, in one file of the table."""
    with log.producer() as producer:
        for value in values:
            producer.send("t", value, key=key, partition=0)
    log.flush_to_table()


def table(root: Path) -> DeltaTable:
    """The topic's table, as another engine opens it."""
    return DeltaTable(str(root / "topics" / "t"))


def rows(root: Path, *names: str) -> list[tuple[Any, ...]]:
    """The columns as another engine reads them, in the order of the log."""
    found = table(root).to_pyarrow_table().sort_by("offset")
    return list(zip(*(found[name].to_pylist() for name in names), strict=True))


def bounds(root: Path, name: str) -> list[tuple[Any, Any]]:
    """The minimum and maximum of a column in each file, according to the log."""
    found = pa.table(table(root).get_add_actions(flatten=True)).sort_by("min.offset")
    return list(zip(*(found[f"{each}.{name}"].to_pylist() for each in ("min", "max")), strict=True))


def test_values_become_columns(tmp_path: Path) -> None:
    """Field by field; what does not fit is null, with the reason, and the bytes stay."""
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, *ODD)
        assert rows(tmp_path, "customer", "amount") == FOUND
        reasons = [each for (each,) in rows(tmp_path, "_error")]
        assert reasons[0] is reasons[3] is reasons[4] is None
        assert [reasons[number].split(":")[0] for number in (1, 2, 5)] == ["value"] * 3
        assert "amount" in reasons[1]
        assert [each for (each,) in rows(tmp_path, "value")] == list(ODD)
        found = log.read("t")
        assert found["value"].to_pylist() == list(ODD)
        assert found.schema.names[-3:] == ["_error", "customer", "amount"]
        assert found["_error"].to_pylist() == reasons
        assert log.read("t", columns=["amount"]).to_pydict() == {"amount": [a for _, a in FOUND]}
        with pytest.raises(errors.WrongSchema, match="customer, amount"):
            log.read("t", columns=["nothing"])
        info = log.describe("t")
        assert [(each.name, each.type) for each in info.columns] == [
            ("customer", "STRING"),
            ("amount", "DOUBLE"),
        ]
        assert (info.misfits, info.unfilled_rows) == (3, 0)
    protocol = table(tmp_path).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)


def test_slow_values_leave_turns_to_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded broker sets a pause too, in which acks do not wait for Python's decoder."""
    monkeypatch.setattr(derive, "_pause", None)
    with broker(tmp_path):
        assert derive._pause is not None
        began = time.perf_counter()
        derive._pause()
        assert time.perf_counter() - began >= agent_module._PAUSE_SECONDS > 0


def test_a_running_topic_gets_columns(tmp_path: Path) -> None:
    """From then on; older records are null there until a merge, which fills every column that a
    record's file ever had.
    """
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1)
        value = b'{"customer": "a", "amount": 1, "city": "Bern"}'
        send(log, value)
        log.alter("t", CONFIG)
        send(log, value)
        log.alter("t", {"value.schema": "amount DOUBLE, city STRING"})
        send(log, value)
        log.alter("t", {"value.format": None, "value.schema": None})
        send(log, value)
        names = ("customer", "amount", "city")
        one, two, three = ("a", 1.0, None), (None, 1.0, "Bern"), (None,) * 3
        assert rows(tmp_path, *names) == [three, one, two, three]
        with pytest.raises(errors.BadOption, match="never changes"):
            log.alter("t", {"value.format": "json", "value.schema": "amount STRING"})
        log.alter("t", {"value.format": "json", "value.schema": "amount DOUBLE"})
        assert log.describe("t").unfilled_rows == 2
        log.compact("t")
        assert rows(tmp_path, *names) == [("a", 1.0, "Bern")] * 4
        assert log.describe("t").unfilled_rows == 0
        assert log.read("t")["value"].to_pylist() == [value] * 4


def test_rewrites_keep_columns(tmp_path: Path) -> None:
    """Deletion of records and key compaction write the remaining rows to new files.

    Their statistics are those of the remaining rows.
    """
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, *(b'{"amount": %d}' % number for number in range(10)), key=b"k")
        log.delete_records("t", {0: 5})
        assert rows(tmp_path, "amount") == [(float(number),) for number in range(5, 10)]
        assert bounds(tmp_path, "amount") == [(5, 9)]
        log.alter("t", {"cleanup.policy": "compact"})
        log.compact("t")
        assert rows(tmp_path, "amount") == [(9.0,)]
        assert bounds(tmp_path, "amount") == [(9, 9)]


def test_other_engines_rewrite_and_restore(tmp_path: Path) -> None:
    """OPTIMIZE drops our tags, and RESTORE takes columns back that the next publication needs."""
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1)
        send(log, b'{"amount": 1}')
        before = table(tmp_path).version()
        log.alter("t", CONFIG)
        send(log, b'{"amount": 2}')
        table(tmp_path).optimize.compact()
        send(log, b'{"amount": 3}')
        log.compact("t")
        assert rows(tmp_path, "amount") == [(1.0,), (2.0,), (3.0,)]
        assert bounds(tmp_path, "amount") == [(1, 3)]
        table(tmp_path).restore(before)
        send(log, b'{"amount": 4}')  # its first file has a column that the table has no more
        assert rows(tmp_path, "value") == [(b'{"amount": 1}',), (b'{"amount": 4}',)]
        log.alter("t", CONFIG | {"value.schema": "amount STRING"})
        send(log, b'{"amount": 5}')
        assert rows(tmp_path, "amount") == [(None,), (None,), ("5",)]


def test_a_topic_of_the_same_name_starts_anew(tmp_path: Path) -> None:
    """Even with another type for the same column: the old topic's files are no longer active."""
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG)
        send(log, b'{"amount": 1}')
        log.delete_topic("t")
        log.create_topic("t", 1, CONFIG | {"value.schema": "amount STRING"})
        send(log, b'{"amount": 1}')
        found = table(tmp_path).to_pyarrow_table()
        assert found["amount"].to_pylist() == ["1"]
        assert found.schema.field("amount").type in (pa.string(), pa.string_view())
        assert "customer" not in found.schema.names


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"value.schema": SCHEMA}, "value.format=json"),
        ({"value.format": "json", "value.schema": "amount DUOBLE"}, "DUOBLE"),
        ({"value.format": "xml"}, "json"),
    ],
)
def test_refused_configurations_say_why(
    tmp_path: Path, config: dict[str, str], reason: str
) -> None:
    """New topics and existing ones are checked alike."""
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        with pytest.raises(errors.BadOption, match=reason):
            log.create_topic("t", 1, config)
        log.create_topic("t", 1)
        with pytest.raises(errors.BadOption, match=reason):
            log.alter("t", config)


WIDE = "customer STRING, amount DECIMAL(30,2), at TIMESTAMP, day DATE, s STRUCT<a: INT>, ok BOOLEAN"
FILES = (
    (b'{"customer": "alice", "amount": 1, "ok": true}', b'{"s": {"a": 1}, "customer": null}'),
    (b'{"customer": "bob", "at": "2026-01-02T03:04:05.000001Z", "day": "2026-01-02"}', None, b"[]"),
    (
        b'{"customer": "b%s", "amount": 12345678901234567890.12}' % (b"z" * 40),
        b'{"s": {"a": 3}, "ok": false, "day": "2026-01-03"}',
    ),
    (b'{"customer": "carol", "amount": "n/a", "at": "2026-01-02T03:04:05.000002Z", "ok": 1}',),
)
"""The values of four files."""
COMPARED = (
    ("customer", "alice", [0]),
    ("customer", "b" + "z" * 40, [2]),
    ("amount", Decimal("12345678901234567890.12"), [2]),
    ("amount", Decimal(1), [0]),
    ("at", dt.datetime(2026, 1, 2, 3, 4, 5, 2, tzinfo=dt.UTC), [1, 3]),  # to the millisecond
    ("day", dt.date(2026, 1, 3), [2]),
    ("s.a", 3, [2]),
    ("ok", True, [0]),
)
"""A column, a value of it, and the files that a reader needs for the rows that have it."""


Compare: TypeAlias = Callable[[Any, Any], Any]


def is_null(column: Any, _: Any) -> Any:
    """The condition that a column has no value."""
    return column.is_null()


def with_arrow(root: Path, name: str, compare: Compare, value: Any = None) -> list[int]:
    """The offsets that delta-rs finds as an Arrow dataset."""
    wanted = compare(pc.field(*name.split(".")), value)
    found = table(root).to_pyarrow_dataset().to_table(columns=["offset"], filter=wanted)
    return sorted(found["offset"].to_pylist())


def with_polars(root: Path, name: str, compare: Compare, value: Any = None) -> list[int]:
    """The offsets that polars finds."""
    column, *inner = name.split(".")
    wanted = pl.col(column)
    for each in inner:
        wanted = wanted.struct.field(each)
    found = pl.scan_delta(str(root / "topics" / "t")).filter(compare(wanted, value)).collect()
    return sorted(found["offset"].to_list())


NOT_SKIPPED = ((with_arrow, "s.a"), (with_polars, "ok"))
"""Types of columns by which these readers do not skip files."""


@pytest.mark.parametrize("reader", [with_arrow, with_polars])
def test_readers_skip_files(tmp_path: Path, reader: Callable[..., list[int]]) -> None:
    """Those that cannot have a row that a filter wants, and no others; the rows stay the same."""
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, CONFIG | {"value.schema": WIDE})
        for values in FILES:
            send(log, *values)
    known = pl.DataFrame(table(tmp_path).to_pyarrow_table())
    for name, value, _ in COMPARED:
        column, *inner = name.split(".")
        plain = known.select(pl.col(column).struct.field(inner[0]) if inner else column)
        cells = list(zip(known["offset"], plain.to_series(), strict=True))
        for compare in (operator.eq, operator.ne, operator.lt, operator.ge):
            found = [at for at, cell in cells if cell is not None and compare(cell, value)]
            assert reader(tmp_path, name, compare, value) == sorted(found)
        nulls = [at for at, cell in cells if cell is None]
        assert reader(tmp_path, name, is_null) == sorted(nulls)
    assert reader(tmp_path, "_error", operator.ge, "value") == [4, 7]
    for name, value, needed in COMPARED:
        if (reader, name) in NOT_SKIPPED:
            continue
        expected = reader(tmp_path, name, operator.eq, value)
        with hidden_files(tmp_path, keep=needed):
            assert reader(tmp_path, name, operator.eq, value) == expected


@contextlib.contextmanager
def hidden_files(root: Path, *, keep: Sequence[int]) -> Iterator[None]:
    """Data files that no reader can open, except those with these numbers."""
    adds = pa.table(table(root).get_add_actions(flatten=True)).sort_by("min.offset")
    folder = root / "topics" / "t"
    hidden = [
        folder / path for number, path in enumerate(adds["path"].to_pylist()) if number not in keep
    ]
    assert hidden
    for each in hidden:
        each.rename(each.with_suffix(".hidden"))
    yield
    for each in hidden:
        each.with_suffix(".hidden").rename(each)


def test_one_command_turns_a_topic_into_a_typed_one(tmp_path: Path) -> None:
    """It finds the fields, adds their columns, and fills those of existing records."""

    def columns(*arguments: str) -> str:
        command = ["topics", "columns", "t", "--bootstrap", agent.address, *arguments]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return result.stdout

    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 2)
        send(log, b'{"customer": "a", "amount": 1, "nothing": [], "a b": 1}', b"[]", None)
        shown = columns()
        assert 'customer  STRING  1        "a"' in shown
        assert "Not possible as a column: nothing: its values are empty" in shown
        assert "Not possible as a column: a b: Delta does not accept the name" in shown
        assert log.describe("t").config == {}
        columns("--accept", "--backfill")
        assert rows(tmp_path, "customer", "amount") == [("a", 1), (None, None), (None, None)]
        send(log, b'{"customer": "b", "amount": 2, "city": "Bern"}')
        assert 'city   STRING  1        "Bern"' in columns()
        columns("--accept", "--drop", "customer")
        send(log, b'{"customer": "c", "amount": 3, "city": "Chur"}')
        assert rows(tmp_path, "customer", "amount", "city")[-2:] == [
            ("b", 2, None),
            (None, 3, "Chur"),
        ]
        assert "customer  STRING  customer  null" in columns()
        refused = CliRunner().invoke(
            app, ["topics", "columns", "t", "--bootstrap", agent.address, "--drop", "customer"]
        )
        assert refused.exit_code == 2
        columns("--drop", "amount", "--drop", "city")
        assert log.describe("t").config == {}


def test_the_first_records_determine_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there are enough of them; a change by a client afterwards stays."""
    monkeypatch.setattr("sparklog.storage.maintenance.first_columns.ENOUGH_SECONDS", 0.05)
    janitor = JanitorSettings(interval_seconds=0.05)
    with broker(tmp_path, janitor=janitor) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1, {"value.format": "json"})
        send(log, b"not yet")
        send(log, b'{"customer": "a", "amount": 1}')
        wait_until(lambda: log.describe("t").columns != [], "there are columns")
        assert log.describe("t").config["value.schema"] == "customer STRING, amount BIGINT"
        send(log, b'{"customer": "b", "amount": 2, "city": "Bern"}')
        assert rows(tmp_path, "customer", "amount")[-1] == ("b", 2)


def test_a_root_is_upgraded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases cannot open a table with other columns."""
    newest = limits.LEVEL
    monkeypatch.setattr(limits, "LEVEL", limits.TYPED_LEVEL - 1)
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        log.create_topic("t", 1)
    monkeypatch.setattr(limits, "LEVEL", newest)
    with broker(tmp_path) as agent, sparklog.connect(agent.address) as log:
        for change in (log.create_topic, log.alter):
            with pytest.raises(errors.NeedsFeatureLevel, match="typed columns needs"):
                change("t" if change == log.alter else "u", config=CONFIG)
        log.connection.action("cluster.upgrade")
        log.alter("t", CONFIG)
        send(log, *ODD)
        assert rows(tmp_path, "customer", "amount") == FOUND
