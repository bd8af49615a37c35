"""Arrow values by way of buffers, and the tasks of Spark that they keep free of pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import arrow
from tests.support.roots import payload
from tests.support.worlds import World

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(values=st.lists(INT64), first=st.integers(0, 3))
def test_numbers_go_there_and_back(values: list[int], first: int) -> None:
    """Also from a slice and from several chunks."""
    array = arrow.numbers(np.array(values, np.int64), pa.int64())
    assert array.equals(pa.array(values, pa.int64()))
    assert arrow.as_numpy(array[first:]).tolist() == values[first:]
    assert arrow.as_numpy(pa.chunked_array([array[:first], array[first:]])).tolist() == values


@given(values=st.lists(st.booleans()), first=st.integers(0, 9))
def test_masks_go_there_and_back(values: list[bool], first: int) -> None:
    """A slice begins in the middle of a byte."""
    array = arrow.booleans(np.array(values, np.bool_))
    assert array.equals(pa.array(values, pa.bool_()))
    assert arrow.as_mask(array[first:]).tolist() == values[first:]


@given(values=st.lists(st.text()))
def test_strings_are_utf8(values: list[str]) -> None:
    """As `pa.array` makes them."""
    assert arrow.strings([each.encode() for each in values]).equals(pa.array(values, pa.string()))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (-1, pa.int32()),
        (2**62, pa.int64()),
        (-(10**15), pa.timestamp("us", "UTC")),
        ("ähm", pa.string()),
        ("", pa.string()),
    ],
    ids=str,
)
def test_one_value_many_times(value: int | str, kind: pa.DataType) -> None:
    """A constant column has the value in every row, for each type of constant column."""
    expected = pa.scalar(value, kind)
    assert arrow.repeated(value, 3, kind).equals(pa.array([expected.as_py()] * 3, kind))


def test_nulls_are_no_numbers() -> None:
    """They would become zeros otherwise."""
    with pytest.raises(AssertionError):
        arrow.as_numpy(pa.array([1, None]))


READ = """
from pyspark.sql.types import *
from sparklog.sources import datasource

options = {"root": sys.argv[1], "subscribe": "t", "includeHeaders": "true"}
datasource.schema(options)
header = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
columns = [
    StructField("value", BinaryType()),
    StructField("topic", StringType()),
    StructField("partition", IntegerType()),
    StructField("timestamp", TimestampType()),
    StructField("headers", ArrayType(header)),
]
reader = datasource.batch_reader(options, StructType(columns))
done = sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))
"""

FOLLOW = """
from pyspark.sql.types import *
from sparklog.sources import datasource

options = {"root": sys.argv[1], "subscribe": "t", "startingOffsets": "group", "group.id": "g"}
wanted = StructType([StructField("value", BinaryType())])
reader = datasource.stream_reader(options | {"commitToGroup": "g"}, wanted)
start = reader.initialOffset()
end = reader.latestOffset(start, reader.getDefaultReadLimit())
done = sum(b.num_rows for part in reader.partitions(start, end) for b in reader.read(part))
reader.commit(end)
reader.stop()
assert "sparklog.connecting" in sys.modules
"""

WRITE = """
import pyarrow as pa
from sparklog import arrow
from sparklog.sinks import datasink
from sparklog.storage.staging.manifest import Destination

values = arrow.strings([b"a", b"b", b"c"])
keyless = pa.nulls(3, pa.string())
topics = {"t": Destination("id", 2)}
target = datasink.WriteTarget(root=sys.argv[1], storage={}, topic="t", topics=topics)
for number, key in enumerate([values, keyless]):
    frame = pa.RecordBatch.from_arrays([key, values], names=["key", "value"])
    datasink._stage(target, "query", number, iter([frame]))
done = 3
"""


@pytest.mark.parametrize("task", [READ, FOLLOW, WRITE], ids=["read", "follow", "write"])
def test_tasks_load_nothing_heavy(tmp_path: Path, task: str) -> None:
    """Reading records, starting from a group, committing to it and staging rows load neither pandas
    nor numba."""
    world = World(uri=str(tmp_path))
    world.commit("g", {0: 0, 1: 0})
    world.append(2)
    world.root.publish("t")
    world.root.append(("t", 1, payload([b"x"], headers=[[{"key": "h", "value": b"1"}]])))
    program = f"import sys\n{task}\nprint(done, *({{'numba', 'pandas'}} & sys.modules.keys()))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["3"], done.stderr
