"""Another engine that works on the topics' tables: it rewrites files, as OPTIMIZE does.

It knows Delta and nothing of sparklog: its files have other names, their rows are in no order, and
they come with statistics or without. It flushes nothing. What loses the race for a version is given
up. Where it does VACUUM instead, the brokers merge no files: between the put of a merged file and
its commit nothing protects it, and its rows are in no write-ahead log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sparklog import errors
from sparklog.record import FILE_SCHEMA
from sparklog.storage import deltalog
from sparklog.storage.objects import ObjectExists, ObjectMissing, PutUnresolved, SyncFailed
from sparklog.storage.snapshot import TableFile
from sparklog.storage.table import Table, data_path
from tests.simulation.history import ensure

if TYPE_CHECKING:
    from tests.simulation.world import World

NAME = "part-"
"""How the names of its files begin."""


class Engine:
    """One job that merges files of some topic's table, again and again, until it dies."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._chance = world.chance
        self._machine = world.machine(name)
        self.process = self._machine.process
        world.scheduler.spawn(self.process, "engine", self._run)

    def _run(self) -> None:
        gone_wrong = (errors.Retriable, errors.UnknownTopic, PutUnresolved, SyncFailed)
        lost = (ObjectExists, ObjectMissing)
        while True:
            self._machine.clock.sleep(self._chance.uniform(0.2, 1.5))
            topic = self._chance.choice(self._world.topic_names)
            try:
                if self._world.profile.has_vacuum:
                    self._vacuum(topic)
                else:
                    self._rewrite(topic)
            except (*gone_wrong, *lost) as error:
                self._world.disk.note("gives up", repr(error))
            except errors.Corrupt as error:
                ensure(topic in self._world.torn, repr(error))

    def _vacuum(self, topic: str) -> None:
        """Removes at once whatever the table does not name, as VACUUM does with no retention."""
        table = Table(self._machine.store, topic, clock=self._machine.clock)
        snapshot = table.refresh()
        named = {data_path(topic, file) for files in snapshot.files for file in files}
        base = self._world.disk.base
        for stat in base.walk(table.folder):
            path = f"{table.folder}/{stat.name}"
            if path.endswith(".parquet") and "_delta_log" not in path and path not in named:
                self._world.disk.note("vacuum", path)
                base.delete([path])

    def _rewrite(self, topic: str) -> None:
        store = self._machine.store
        table = Table(store, topic, clock=self._machine.clock)
        snapshot = table.refresh()
        candidates = [files for files in snapshot.files if len(files) > 1]
        if not candidates:
            return
        files = self._chance.sample(self._chance.choice(candidates), 2)
        rows = pa.concat_tables(
            [
                pq.read_table(store.open(data_path(topic, file)), schema=FILE_SCHEMA)
                for file in files
            ]
        )
        order = list(range(rows.num_rows))
        self._chance.shuffle(order)
        sink = pa.BufferOutputStream()
        pq.write_table(rows.take(pa.array(order)), sink)
        name = f"partition={files[0].partition}/{NAME}{self._world.nonce():05d}.parquet"
        data = sink.getvalue()
        path, version = f"{table.folder}/{name}", deltalog.commit_name(snapshot.version + 1)
        self._world.disk.foreign[path] = f"{table.log_folder}/{version}"
        store.put_unflushed(path, data)
        commit = deltalog.encode_commit(
            self._info(), self._actions(files, name, data.size, rows.column("offset"))
        )
        store.put_unflushed(f"{table.log_folder}/{version}", commit)

    def _actions(
        self, files: Sequence[TableFile], name: str, size_bytes: int, offsets: pa.ChunkedArray
    ) -> deltalog.Actions:
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
        add = deltalog.add_of(merged, data_change=False)
        if self._chance.random() < 0.5:
            add = deltalog.Add(
                path=add.path,
                partition_values=add.partition_values,
                size=add.size,
                modification_time=add.modification_time,
                data_change=False,
            )
        removes = [
            deltalog.Remove(
                path=file.path,
                deletion_timestamp=now_ms,
                data_change=False,
                extended_file_metadata=True,
                partition_values=add.partition_values,
                size=file.size_bytes,
            )
            for file in files
        ]
        return deltalog.Actions(adds=[add], removes=removes)

    def _info(self) -> deltalog.CommitInfo:
        return deltalog.CommitInfo(
            timestamp=self._machine.clock.now_us() // 1_000,
            operation="OPTIMIZE",
            operation_parameters={},
            is_blind_append=False,
            engine_info="another",
            txn_id=str(self._world.nonce()),
        )
