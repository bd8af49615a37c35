"""Another engine that works on the topics' tables: it rewrites files as OPTIMIZE does.

It knows Delta and nothing of sparklog: its files have other names, their rows are in no order, and
they come with statistics or without. It syncs nothing, and in some runs the power fails soon after
its commit. A commit that loses the race for a version is given up. Its VACUUM has no retention.
Some VACUUMs run right after a put of a file or a commit; others take a moment between listing the
table and removing files, and are given up if they are delayed longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog import errors
from sparklog.formats.record import FILE_SCHEMA
from sparklog.storage.objects import ObjectExists, ObjectMissing, PutUnresolved, SyncFailed
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import delta_log
from sparklog.storage.table.names import data_path, table_folder
from sparklog.storage.table.topic_table import TopicTable
from tests.simulation.faults import Disk, Rewritten
from tests.simulation.history import ensure
from tests.support.engines import kept_by_vacuum

if TYPE_CHECKING:
    from tests.simulation.world import World

_VACUUM_SECONDS = 0.03
"""Less than the grace of removed files, by whatever process's clock."""
_PUTS_VACUUMED = 0.2
NAME = "part-"
"""Prefix of the names of its files."""


class Engine:
    """One job that merges files of some topic's table, again and again, until it dies."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._chance = world.chance
        self._machine = world.machine(name)
        self.process = self._machine.process
        if world.profile.has_vacuum:
            world.disk.watchers.append(self._on_put)
        world.scheduler.spawn(self.process, "engine", self._run)

    def _run(self) -> None:
        gone_wrong = (errors.Retriable, errors.UnknownTopic, PutUnresolved, SyncFailed)
        lost = (ObjectExists, ObjectMissing)
        while True:
            is_hasty = self._world.profile.cut_rate > 0
            self._machine.clock.sleep(self._chance.uniform(0.05, 0.3 if is_hasty else 1.5))
            topic = self._chance.choice(self._world.topic_names)
            try:
                if self._world.profile.has_vacuum:
                    # Each takes a large batch that is written just then, so they must end.
                    if self._world.faults.active or not self._world.profile.has_large_batches:
                        self._vacuum(topic)
                else:
                    self._rewrite(topic)
            except (*gone_wrong, *lost) as error:
                self._world.disk.note("gives up", repr(error))
            except errors.Corrupt as error:
                ensure(self._world.explains(error), repr(error))

    def _on_put(self, path: str) -> None:
        """Sometimes a whole VACUUM comes between this put and the next step."""
        if not self._world.faults.active:
            return  # a large batch must come to an end
        folder, topic, *_ = path.split("/")
        if folder != "topics" or not self.process.alive or self._chance.random() > _PUTS_VACUUMED:
            return
        table = TopicTable(self._world.disk.base, topic, clock=self._machine.clock)
        with contextlib.suppress(errors.Corrupt, errors.Retriable):
            self._remove(topic, kept_by_vacuum(table))

    def _vacuum(self, topic: str) -> None:
        """Removes whatever the table does not name, as VACUUM does with no retention."""
        clock = self._machine.clock
        began = clock.monotonic()
        kept = kept_by_vacuum(TopicTable(self._machine.store, topic, clock=clock))
        clock.sleep(self._chance.uniform(0.0, _VACUUM_SECONDS))
        if clock.monotonic() - began <= 2 * _VACUUM_SECONDS:
            self._remove(topic, kept)

    def _remove(self, topic: str, kept: set[str]) -> None:
        base = self._world.disk.base
        for stat in base.walk(table_folder(topic)):
            if stat.name.endswith(".parquet") and "_delta_log" not in stat.name:
                path = f"{table_folder(topic)}/{stat.name}"
                if stat.name not in kept:
                    self._world.disk.note("vacuum", path)
                    base.delete([path])

    def _rewrite(self, topic: str) -> None:
        store = self._machine.store
        table = TopicTable(store, topic, clock=self._machine.clock)
        snapshot = table.refresh()
        candidates = [files for files in snapshot.files if len(files) > 1]
        if not candidates:
            return
        files = self._chance.sample(self._chance.choice(candidates), 2)
        rows = pa.concat_tables([self._read(data_path(topic, file)) for file in files])
        order = list(range(rows.num_rows))
        self._chance.shuffle(order)
        sink = pa.BufferOutputStream()
        pq.write_table(rows.take(pa.array(order)), sink)
        name = f"partition={files[0].partition}/{NAME}{self._world.nonce():05d}.parquet"
        data = sink.getvalue()
        path, version = f"{table.folder}/{name}", delta_log.commit_name(snapshot.version + 1)
        self._world.disk.foreign[path] = Rewritten(
            topic=topic,
            path=path,
            commit=f"{table.log_folder}/{version}",
            size_bytes=data.size,
            replaced=tuple(files),
        )
        store.put_unflushed(path, data)
        commit = delta_log.encode_commit(
            self._info(), self._actions(files, name, data.size, rows.column("offset"))
        )
        store.put_unflushed(f"{table.log_folder}/{version}", commit)
        self._world.cut_soon()

    def _read(self, path: str) -> pa.Table:
        """Raises `CorruptObject`."""
        try:
            return pq.read_table(self._machine.store.open(path), schema=FILE_SCHEMA)
        except (pa.ArrowException, OSError) as error:
            raise errors.CorruptObject(path=path, check=str(error)) from error

    def _actions(
        self, files: Sequence[TableFile], name: str, size_bytes: int, offsets: pa.ChunkedArray
    ) -> delta_log.Actions:
        now_ms = self._machine.clock.now_us() // 1_000
        bounds = pc.min_max(offsets)
        merged = TableFile(
            path=name,
            partition=files[0].partition,
            size_bytes=size_bytes,
            rows=len(offsets),
            first=bounds["min"].as_py(),
            last=bounds["max"].as_py(),
            modified_us=now_ms * 1_000,
        )
        add = delta_log.add_of(merged, data_change=False)
        if self._chance.random() < 0.5:
            add = delta_log.Add(
                path=add.path,
                partition_values=add.partition_values,
                size=add.size,
                modification_time=add.modification_time,
                data_change=False,
            )
        removes = [_remove(file, now_ms) for file in files]
        return delta_log.Actions(adds=[add], removes=removes)

    def _info(self) -> delta_log.CommitInfo:
        return _info(self._world, "OPTIMIZE")


def _remove(file: TableFile, now_ms: int) -> delta_log.Remove:
    return delta_log.Remove(
        path=file.path,
        deletion_timestamp=now_ms,
        data_change=False,
        extended_file_metadata=True,
        partition_values=delta_log.add_of(file, data_change=False).partition_values,
        size=file.size_bytes,
    )


def _info(world: World, operation: str) -> delta_log.CommitInfo:
    return delta_log.CommitInfo(
        timestamp=world.scheduler.clock.now_us() // 1_000,
        operation=operation,
        operation_parameters={},
        is_blind_append=False,
        engine_info="another",
        txn_id=str(world.nonce()),
    )


# ------------------------------------------------------------------------------ after a power cut


def restore(world: World) -> None:
    """Restores the files that damaged ones have replaced, as an operator does after a report."""
    disk, clock = world.disk, world.scheduler.clock
    for topic in sorted({disk.foreign[path].topic for path in disk.damaged}):
        table = TopicTable(disk.base, topic, clock=clock)
        snapshot = table.refresh()
        removes, adds = [], []
        for file in [file for files in snapshot.files for file in files]:
            path = data_path(topic, file)
            if path in disk.damaged:
                removes.append(_remove(file, clock.now_us() // 1_000))
                adds += [delta_log.add_of(each, data_change=False) for each in _sources(disk, path)]
        disk.damaged -= {path for path in disk.damaged if disk.foreign[path].topic == topic}
        if removes:
            disk.note("restored", topic, len(removes))
            table.sync()
            name = delta_log.commit_name(snapshot.version + 1)
            actions = delta_log.Actions(adds=adds, removes=removes)
            commit = delta_log.encode_commit(_info(world, "RESTORE"), actions)
            disk.base.put_new(f"{table.log_folder}/{name}", commit)


def _sources(disk: Disk, path: str) -> list[TableFile]:
    """The files that have the rows of a damaged one, all of which must still exist."""
    found = []
    rewritten = disk.foreign[path]
    for file in rewritten.replaced:
        source = data_path(rewritten.topic, file)
        if source in disk.foreign and not disk.is_whole(source):
            found += _sources(disk, source)
        else:
            ensure(source in disk.base._objects, f"{source} went, and {path} is damaged")
            found.append(file)
    return found
