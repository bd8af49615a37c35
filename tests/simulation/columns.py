"""Typed columns in a run: each commit to a typed table is judged as it is put.

- The table's schema is the columns of every topic and those of the set, at protocol (1, 2).
- A change of the set builds on the one before: its generation is the next, its columns stay, and a
  name keeps its field and its type. Only another engine's RESTORE sets the set back.
- A new file of ours has exactly the columns that its tag names, of sets that the table has, with
  the values of the model. `_error` is null if a value fits, or is null.
- A rewrite of files has all columns that they had.

In the end the set is that of the configuration, and after a backfill all files have all columns.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from sparklog import errors
from sparklog.formats.flight_messages import AlterTopic
from sparklog.formats.record import FILE_SCHEMA, ROW_SCHEMA
from sparklog.formats.topic_config import VALUE_FORMAT, VALUE_SCHEMA
from sparklog.formats.values.typed import typed_columns
from sparklog.storage.table import delta_log
from sparklog.storage.table.names import is_our_file
from sparklog.storage.table.topic_table import TopicTable
from tests.simulation import typed
from tests.simulation.history import ensure

if TYPE_CHECKING:
    from sparklog.broker.broker import Broker
    from tests.simulation.world import World

LIMITS: Final = {
    "sparklog.storage.maintenance.first_columns.ENOUGH_RECORDS": 8,
    "sparklog.storage.maintenance.first_columns.ENOUGH_SECONDS": 1.0,
}
_CHANGES: Final = 0.6
"""The share of an administrator's changes that are about columns."""
_RESTORES: Final = 0.6
"""The probability that another engine undoes a change when a file with new columns is put."""
_RESTORES_AT_ONCE: Final = 0.1
"""The probability that it does so when the change itself is put."""
_TAG: Final = "sparklog.columns"
"""The name of a file's tag, and of the table's property."""
_TOPIC_ID: Final = "sparklog.topicId"
_PARTITIONS: Final = "sparklog.partitions"
_ERROR: Final = "_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """A set of typed columns, as the table's property has it."""

    generation: int
    columns: tuple[typed.Column, ...]
    history: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> _Set | None:
        text = metadata["configuration"].get(_TAG)
        if text is None:
            return None
        found = msgspec.json.decode(text)
        return cls(
            generation=found["generation"],
            columns=tuple(
                typed.Column(each["name"], each["field"], each["type"], tuple(each["filled"]))
                for each in found["columns"]
            ),
            history=tuple((generation, crc) for generation, crc in found["history"]),
        )

    @property
    def filled(self) -> set[str]:
        return {each.name for each in self.columns if each.is_filled_at(self.generation)}

    def generations(self, tag: str | None) -> list[int] | None:
        """Returns the generations that a file's tag names; None if one is not of this set."""
        parts = [each.split(".") for each in (tag or "").split(",") if each]
        is_known = all((int(each[0]), each[1]) in self.history for each in parts)
        return [int(each[0]) for each in parts] if is_known else None

    def columns_of(self, tag: str | None) -> list[typed.Column] | None:
        """Returns the columns of a file with this tag; None: the tag is not of this set."""
        generations = self.generations(tag)
        if generations is None:
            return None
        return [each for each in self.columns if any(map(each.is_filled_at, generations))]


@dataclass(slots=True, kw_only=True)
class _Table:
    """A table at the last version that was judged."""

    version: int
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"configuration": {}})
    tags: dict[str, str | None] = field(default_factory=dict)
    """The tags of the active files, by path."""
    offsets: dict[str, frozenset[int]] = field(default_factory=dict)
    """The offsets in all files that were judged, by path; those of others are not known."""
    before: Mapping[str, Any] | None = None
    """The metadata before the newest commit, if that has changed the columns and no file."""

    @property
    def topic_id(self) -> str | None:
        found: str | None = self.metadata["configuration"].get(_TOPIC_ID)
        return found


class ColumnWatch:
    """Changes the columns of a world's typed topics, and judges what becomes of them."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._tables: dict[str, _Table] = {}
        self.wrong: list[str] = []
        """Violations; the code that puts would hide an exception."""
        if any(world.profile.typed):
            world.disk.watchers.append(self._note_put)

    def forget(self) -> None:
        """Forgets all tables, whose newest versions a power cut or a person may have taken."""
        self._tables.clear()

    # -------------------------------------------------------------------------- changes

    def config_of(self, name: str) -> dict[str, str]:
        """Returns the part of an initial topic's configuration that is about columns."""
        kinds = dict(zip(self._world.topic_names, self._world.profile.typed, strict=False))
        kind = kinds.get(name, "")
        if not kind:
            return {}
        return {VALUE_FORMAT: "json"} | ({} if kind == typed.FOUND else {VALUE_SCHEMA: kind})

    def draw_change(self, name: str) -> dict[str, str | None] | None:
        """Returns a change of the columns of a topic; None: something else is to be changed."""
        if not self.config_of(name) or self._chance.random() > _CHANGES:
            return None
        return self._draw_config()

    def _draw_config(self) -> dict[str, str | None]:
        schema = self._chance.choice([*typed.SCHEMAS, None])
        is_unset = schema is None and self._chance.random() < 0.5
        return {VALUE_FORMAT: None if is_unset else "json", VALUE_SCHEMA: schema}

    # -------------------------------------------------------------------------- commits

    def _note_put(self, path: str) -> None:
        if not path.startswith("topics/"):
            return
        topic = path.split("/")[1]
        with contextlib.suppress(errors.SparklogError):  # a torn log, until it is mended
            table = self._follow(topic)
            rate = _RESTORES if path.endswith(".parquet") else _RESTORES_AT_ONCE
            if self._world.profile.engines and table.before and self._chance.random() < rate:
                self._restore(topic, table.before)

    def _follow(self, topic: str) -> _Table:
        """Judges all commits since the last one that was judged."""
        objects, folder = self._world.disk.base._objects, f"topics/{topic}/_delta_log"
        table = self._tables.get(topic)
        if table is None:
            is_new = f"{folder}/{delta_log.commit_name(0)}" in objects
            table = self._tables[topic] = _Table(version=-1) if is_new else self._load(topic)
        while found := objects.get(f"{folder}/{delta_log.commit_name(table.version + 1)}"):
            lines = found.data.to_pybytes().splitlines()
            if not lines:
                break  # a power cut has torn it
            self._judge(topic, table, [msgspec.json.decode(each) for each in lines])
        return table

    def _load(self, topic: str) -> _Table:
        """Returns a table whose first commits are gone, unjudged."""
        found = TopicTable(self._world.disk.base, topic, clock=self._world.scheduler.clock)
        snapshot, metadata = found.refresh(), found._replay.metadata
        files = {unquote(each.path): each for files in snapshot.files for each in files}
        return _Table(
            version=snapshot.version,
            metadata=msgspec.to_builtins(metadata) if metadata else {"configuration": {}},
            tags={path: each.columns for path, each in files.items()},
        )

    def _judge(self, topic: str, table: _Table, actions: Sequence[Mapping[str, Any]]) -> None:
        table.version += 1
        info: Mapping[str, Any] = next(
            (each["commitInfo"] for each in actions if "commitInfo" in each), {}
        )
        is_ours = str(info.get("engineInfo", "")).startswith("sparklog/")
        known = _Set.of(table.metadata) if table.topic_id else None
        removed = [unquote(each["remove"]["path"]) for each in actions if "remove" in each]
        adds = [each["add"] for each in actions if "add" in each]
        where = f"{topic} at version {table.version}"
        try:
            gone = {each: table.tags.pop(each) for each in removed if each in table.tags}
            for add in adds:
                self._judge_add(where, topic, table, known, gone, add, is_ours=is_ours)
            self._judge_metadata(where, table, known, actions, is_ours=is_ours)
        except AssertionError as error:
            self.wrong.append(str(error))
        changed = next((each["metaData"] for each in actions if "metaData" in each), None)
        is_undoable = is_ours and known is not None and not (adds or removed)
        table.before = table.metadata if is_undoable and _differ(table.metadata, changed) else None
        table.metadata = changed or table.metadata

    def _judge_add(
        self,
        where: str,
        topic: str,
        table: _Table,
        known: _Set | None,
        gone: Mapping[str, str | None],
        add: Mapping[str, Any],
        *,
        is_ours: bool,
    ) -> None:
        path, tag = unquote(add["path"]), (add.get("tags") or {}).get(_TAG)
        table.tags[path] = tag
        if not (is_ours and is_our_file(path)) or path in table.offsets:
            return
        columns = known.columns_of(tag) if known else ([] if tag is None else None)
        ensure(columns is not None, f"{where}: {path} has the columns {tag} of {known}")
        assert columns is not None
        found = self._world.disk.base._objects.get(f"topics/{topic}/{path}")
        if found is None:
            return  # a VACUUM has removed it
        offsets = self._judge_file(f"{where}: {path}, {tag},", found.data, columns)
        table.offsets[path] = offsets
        for other, old in gone.items():
            is_rewritten = bool(offsets & table.offsets.get(other, frozenset()))
            is_near = other.partition("/")[0] == path.partition("/")[0]
            had = known.columns_of(old) if known and is_near and is_rewritten else None
            lost = {each.name for each in had or ()} - {each.name for each in columns}
            ensure(not lost, f"{where}: {path}, {tag}, has lost {lost} of {other}, {old}")

    def _judge_file(self, what: str, data: Any, columns: Sequence[typed.Column]) -> frozenset[int]:
        """Judges a file with these columns, and returns its offsets."""
        rows = pq.read_table(data, partitioning=None, use_threads=False).to_pydict()
        have = rows.keys() - FILE_SCHEMA.names
        allowed = {each.name for each in columns} | ({_ERROR} if columns else set())
        ensure(have <= allowed, f"{what} has {sorted(have)} of {sorted(allowed)}")
        count = len(rows["offset"])
        nulls = [None] * count
        for row, value in enumerate(rows.get("value", nulls)):
            wanted, fits = typed.cells(value, columns)
            cells = [rows.get(each.name, nulls)[row] for each in columns]
            ensure(cells == wanted, f"{what} has {cells} for {value!r}, not {wanted}")
            error = rows.get(_ERROR, nulls)[row]
            ensure(not columns or (error is None) == fits, f"{what} has {error} for {value!r}")
        return frozenset(rows["offset"])

    def _judge_metadata(
        self,
        where: str,
        table: _Table,
        known: _Set | None,
        actions: Sequence[Mapping[str, Any]],
        *,
        is_ours: bool,
    ) -> None:
        for each in actions:
            if "protocol" in each:
                found = each["protocol"]["minReaderVersion"], each["protocol"]["minWriterVersion"]
                ensure(found == (1, 2), f"{where}: its protocol is {found}")
        changed = next((each["metaData"] for each in actions if "metaData" in each), None)
        if changed is None or changed["configuration"].get(_TOPIC_ID) is None:
            return
        after = _Set.of(changed)
        fields = msgspec.json.decode(changed["schemaString"])["fields"]
        typed_fields = fields[len(ROW_SCHEMA) :]
        wanted = [(_ERROR, "string")] if after else []
        wanted += [(column.name, column.delta_type) for column in (after.columns if after else ())]
        found_fields = [(each["name"], each["type"]) for each in typed_fields]
        ensure(found_fields == wanted, f"{where}: its columns are {found_fields}, not {wanted}")
        names = [each["name"].lower() for each in fields]
        ensure(len({*names}) == len(names), f"{where}: it has a name twice: {names}")
        is_same = changed["configuration"][_TOPIC_ID] == table.topic_id
        if not is_same or not is_ours or known is None:
            return
        ensure(after is not None, f"{where}: {known} is gone")
        assert after is not None
        what = f"{where}: {known} becomes {after}"
        if after.generation == known.generation:
            ensure(after == known, what)
            return
        ensure(after.generation == known.generation + 1, what)
        ensure(after.history[:-1] == known.history, what)
        for old, new in zip(known.columns, after.columns, strict=False):
            ensure(old[:3] == new[:3] and new.filled[: len(old.filled)] == old.filled, what)
        ensure(len(after.columns) >= len(known.columns), what)

    # -------------------------------------------------------------------------- another engine

    def _restore(self, topic: str, before: Mapping[str, Any]) -> None:
        """Another engine undoes the newest commit, which has changed the columns."""
        if not self._world.faults.active:
            return
        version = self._tables[topic].version + 1
        info = {"operation": "RESTORE", "engineInfo": "another"}
        lines = [{"commitInfo": info}, {"metaData": before}]
        self._world.disk.note("restored columns", topic, version)
        path = f"topics/{topic}/_delta_log/{delta_log.commit_name(version)}"
        self._world.disk.base.put_new(path, b"\n".join(map(msgspec.json.encode, lines)))
        self._follow(topic)
        # Its user asks for other columns instead, before a broker repeats the change.
        broker, config = self._world.find_broker(), self._draw_config()
        if broker is not None:
            request = AlterTopic(topic=topic, config=config)
            broker.call(f"change {topic} instead", lambda core: core.topics.alter(request))

    # -------------------------------------------------------------------------- the end

    def topics(self) -> list[str]:
        """Returns the topics that exist and have typed columns."""
        if not any(self._world.profile.typed):
            return []
        return [name for name, _, table in self._world.topics() if table.columns is not None]

    def check(self, core: Broker) -> None:
        """Checks all tables, after a backfill and some quiet."""
        ensure(not self.wrong, "; ".join(self.wrong[:3]))
        for name in self.topics():
            table = self._follow(name)
            ensure(not self.wrong, "; ".join(self.wrong[:3]))
            known = _Set.of(table.metadata)
            assert known is not None
            config = self._world.metadata().topics[name].config
            schema = config.get(VALUE_SCHEMA, "") if config.get(VALUE_FORMAT) == "json" else ""
            fields = {each.field for each in known.columns if each.name in known.filled}
            ensure(fields == typed.fields_of(schema), f"{name} fills {fields} for {schema}")
            for path, tag in table.tags.items():
                columns = known.columns_of(tag)
                lacks = known.filled - {each.name for each in columns or ()}
                ensure(not lacks, f"{name}: {path}, {tag}, lacks {lacks} after the backfill")
            self._check_readers(core, name, known)

    def _check_readers(self, core: Broker, name: str, known: _Set) -> None:
        """Checks that what readers compute for all rows, wherever they are, is what files have."""
        info = core.topics.describe(name)
        if info.plan is None:
            return
        columns = [each for each in known.columns if each.name in known.filled]
        for each in info.partitions:
            log = self._world.history.log((info.topic_id, each.partition), each.start, each.end)
            values = [row.value for _, row in log]
            found = typed_columns(info.plan, pa.array(values, pa.binary())).columns[1:]
            wanted = [typed.cells(value, columns)[0] for value in values]
            cells = [list(row) for row in zip(*(c.to_pylist() for c in found), strict=True)]
            ensure(cells == wanted, f"{name} is read as {cells}, not {wanted}")


def _differ(before: Mapping[str, Any], after: Mapping[str, Any] | None) -> bool:
    """Returns whether two versions of a topic's table differ in their columns and nothing else."""
    if after is None:
        return False
    one, other = before["configuration"], after["configuration"]
    is_same = all(one.get(each) == other.get(each) for each in (_TOPIC_ID, _PARTITIONS))
    return is_same and one.get(_TAG) != other.get(_TAG)
