"""Plans of the Spark source over a table that others rewrite meanwhile, and how they are packed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparklog import limits
from sparklog.sources import tasks
from sparklog.sources.planner import Planner
from sparklog.storage.maintenance import file_compaction
from sparklog.storage.snapshot import Slice
from sparklog.storage.table.topic_table import TopicTable
from tests.support import engines
from tests.support.engines import Statistics
from tests.support.worlds import Row, World, position

Steps = list[tuple[Any, ...]]
"""Each: the name of a method of `Shared`, and what it is called with."""


class Shared(World):
    """A world whose table other engines, and our own janitor, work on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.deleted: dict[int, set[int]] = {0: set(), 1: set()}

    def take(self, steps: Iterable[tuple[Any, ...]]) -> None:
        for name, *values in steps:
            getattr(self, name)(*values)

    @property
    def table(self) -> TopicTable:
        table = TopicTable(self.root.store, "t", clock=self.root.clock)
        table.refresh()
        return table

    def publish(self) -> None:
        self.root.publish("t")

    def trim(self) -> None:
        self.root.trim()

    def checkpoint(self) -> None:
        self.table.checkpoint()

    def compact(self) -> None:
        """Our own janitor merges whatever can be merged."""
        table = self.table
        for group in file_compaction.choose(table.snapshot, everything=True):
            assert file_compaction.compact(table, [group])

    def vacuum(self) -> None:
        """Removes replaced files, which older plans name."""
        engines.vacuum(self.table)

    def rewrite(
        self, partition: int, first: int, step: int, into: int, statistics: Statistics
    ) -> None:
        """Up to three files, neighbours or with others between them, become so many."""
        table = self.table
        files = table.snapshot.files[partition][first::step][:3]
        if files:
            engines.rewrite(table, files, into=into, statistics=statistics)

    def delete(self, partition: int, first: int, count: int, statistics: Statistics) -> None:
        """A DELETE of so many offsets; those that are not in the table yet stay."""
        table = self.table
        wanted = set(range(first, first + count))
        for file in table.snapshot.files[partition]:
            found = wanted.intersection(engines.rows_in(table, file)["offset"].to_pylist())
            if found:
                engines.rewrite(table, [file], without=found, statistics=statistics)
                self.deleted[partition] |= found

    def left(self, partition: int, first: int, end: int) -> list[Row]:
        """Returns the records of the range that were not deleted."""
        gone = self.deleted[partition]
        return [row for row in self.rows(partition, first, end) if row[3] not in gone]

    def range(self, planner: Planner, partition: int, first: int, end: int) -> list[Slice]:
        """The plan of one partition's offsets."""
        ends = planner.latest()["t"].offsets
        topic_id = self.root.topic_id("t")
        bounds = [
            position(topic_id, *(at if number == partition else ends[number] for number in (0, 1)))
            for at in (first, end)
        ]
        return planner.slices(*bounds)


@pytest.fixture(autouse=True, scope="module")
def _small_bounds() -> Iterator[None]:
    """Row groups and runs of a few rows, so that small worlds have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "ROW_GROUP_ROWS", 4)
        patch.setattr(limits, "SCAN_BATCH_ROWS", 6)
        yield


_PARTITIONS = st.integers(0, 1)
_STATISTICS = st.sampled_from(get_args(Statistics))
STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.sampled_from(["publish", "trim", "compact", "vacuum", "checkpoint"])),
    st.tuples(
        st.just("rewrite"),
        _PARTITIONS,
        st.integers(0, 4),
        st.integers(1, 2),
        st.integers(1, 3),
        _STATISTICS,
    ),
    st.tuples(st.just("delete"), _PARTITIONS, st.integers(0, 40), st.integers(1, 12), _STATISTICS),
)


APPENDS = st.lists(st.tuples(st.just("append"), st.integers(1, 9), st.integers(0, 9)), max_size=3)


def steps(most: int) -> st.SearchStrategy[Steps]:
    """At most so many; records come in and are published often enough for the rest to matter."""
    published = APPENDS.map(lambda each: [*each, ("publish",)])
    trimmed = APPENDS.map(lambda each: [*each, ("publish",), ("trim",), ("vacuum",)])
    some = st.lists(st.one_of(published, trimmed, STEP.map(lambda each: [each])), max_size=most)
    return some.map(lambda each: list(itertools.chain.from_iterable(each)))


@settings(max_examples=150)
@given(
    before=st.tuples(steps(10), APPENDS).map(lambda each: each[0] + each[1]),
    unseen=steps(3),
    after=steps(8),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    cores=st.integers(1, 3),
    least=st.none() | st.integers(1, 9),
    most=st.none() | st.integers(1, 12),
)
def test_rewrites_change_no_row(
    before: Steps,
    unseen: Steps,
    after: Steps,
    cuts: list[int],
    cores: int,
    least: int | None,
    most: int | None,
) -> None:
    """Despite rewrites of the table before a look, before the plan and before the read,
    each offset that was not deleted comes once, in order, and in no task above its bound."""
    world = Shared()
    world.take(before)
    planner = world.planner()
    known = {number: frozenset(gone) for number, gone in world.deleted.items()}
    ends = dict(planner.latest()["t"].offsets)
    world.take(unseen)
    planned = []
    for partition, end in ends.items():
        bounds = [0, *sorted(cut for cut in cuts if cut < end), end]
        for first, last in itertools.pairwise(bounds):
            slices = world.range(planner, partition, first, last)
            packed = tasks.pack(
                slices,
                parallelism=cores,
                row_groups=planner.row_groups,
                least=least,
                most_records=most,
            )
            planned.append((partition, first, last, packed))
    to_come = iter(after)
    for partition, first, last, packed in planned:
        read = []
        for task in packed:
            world.take(itertools.islice(to_come, 4))
            rows = world.read(task)
            assert most is None or len(rows) <= most
            read += rows
        # Records deleted between plan and read may still be returned, as they were planned.
        there = [
            row for row in world.rows(partition, first, last) if row[3] not in known[partition]
        ]
        assert read == [row for row in there if row in read]
        assert [row for row in read if row[3] not in world.deleted[partition]] == world.left(
            partition, first, last
        )
