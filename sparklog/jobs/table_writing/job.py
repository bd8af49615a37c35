"""A run of the job `to_table`, which plans windows of a topic and writes each of them once.

A window is planned in the checkpoint, with its columns, before it is written. Its rows are one
commit to the table, which carries the window's number as its `txn`. Then its records without a row
are one write to the dead-letter topic, under the same number. A run that follows a killed one
checks for the last window's commit. If the table has it, only the dead letters may be missing. If
not, the window is written with the same offsets, but this run's columns, so that arguments that
could not be written do not persist.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from sparklog import errors
from sparklog.display import counted
from sparklog.formats.values.inference import Kind, find_fields, merged_fields
from sparklog.jobs.ranges import EARLIEST, LATEST, Range, Source, fair_shares, range_of
from sparklog.jobs.running import echo, progress, spark_error_kinds
from sparklog.jobs.table_writing.rows import BAD, INTERNAL, ORIGIN, Shape, dead_letters
from sparklog.jobs.table_writing.schemas import (
    check_fits,
    check_names,
    check_readable,
    other_case,
    with_fields_of,
)
from sparklog.jobs.table_writing.table import Table
from sparklog.jobs.targets import Target
from sparklog.jobs.windows import Checkpoint, Head, Window
from sparklog.sources.json_inference import with_new_fields
from sparklog.sources.values import json_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.types import DataType, StructType

    from sparklog.client.log import Log
    from sparklog.formats.flight_messages import TopicInfo

WINDOW_RECORDS = 5_000_000  # maximum in one commit to the table

_REFUSED: Final = "sparklog: a record without a row"
_OBSERVED_SECONDS: Final = 10.0
_CASE_RECORDS: Final = 1_000
"""Number of records of a new checkpoint whose fields are compared with those of --schema."""


class Job:
    """One run."""

    def __init__(
        self,
        log: Log,
        spark: SparkSession,
        source: Source,
        table: Table,
        dead_letters: Target | None,
        *,
        upsert: str | None,
        has_origin: bool,
        adds_fields: bool,
    ) -> None:
        self._log = log
        self._spark = spark
        self._source = source
        self._table = table
        self._dead_letters = dead_letters
        self._upsert = upsert
        self._has_origin = has_origin
        self._adds_fields = adds_fields
        self._fields: StructType
        self._key_type: DataType | None = None
        self._number = 0
        """The number of the next window."""
        self._at: Mapping[int, int] = {}
        """Each partition's first offset that is in no window; if absent, its log start."""
        self.starts: Mapping[int, int] | None = None
        """The offsets that `--start` resolves to; None if it does not apply."""
        self._earlier: Window | None = None
        """An earlier run's plan of the window being written, with different columns, if any.

        Its commit may still be in flight, in which case ours is skipped.
        """
        self._looked: Mapping[int, int] = {}
        """The offsets up to which no object has a field."""
        self._left_out: set[str] = set()
        self.count = 0
        self.rejected = 0

    # -------------------------------------------------------------------------- before

    def prepare(
        self, given: str | None, last: Window | None, start: str, noted: Head | None = None
    ) -> None:
        """Checks columns and offsets, and shows them.

        `noted`: the notes of earlier runs. A `--start` that they resolved is not resolved again.

        Raises `WrongSchema`, `BadRequest` and `BadOption`, and Spark's errors.
        """
        from pyspark.sql.types import StructType

        wanted = self._spark.createDataFrame([], given).schema if given else StructType([])
        found = self._table.schema(self._spark, is_new=last is None)
        self._check_names(wanted)
        check_names(wanted, found or StructType([]))
        if self._upsert is not None:
            self._key_type = self._type_of_key(self._upsert, wanted, found or StructType([]))
        taken = self._taken()
        self._fields = StructType([each for each in wanted if each.name.lower() not in taken])
        if self._adds_fields and found is not None:
            own = StructType([each for each in found if each.name.lower() not in taken])
            self._fields = with_fields_of(self._fields, own)
        if self._fields.fields:
            check_readable(self._fields)
        shape = self._shape(self._fields)
        if found is not None:
            check_fits(found, shape.columns)
            self._table.check_takes(self._spark, shape.columns)
        info = self._source.describe(self._log)
        # Not read again: another run may have planned windows since then.
        if last is not None:  # the start may no longer resolve, and does not apply
            self._number, self._at = last.number + 1, last.ends
        else:
            if noted is not None and noted.starts is not None and noted.start == start:
                self.starts = noted.starts
            elif start == EARLIEST:
                self.starts = {}
            else:
                self.starts = range_of(self._log, info, start, LATEST).starts
            self._number, self._at = 0, self.starts
        is_new = "" if found is not None else ", to be created"
        waiting = counted(self._waiting(info).count, "record")
        echo(f"from {self._source.topic}, at most {waiting}")
        echo(f"to   {self._table}{is_new}")
        for field in shape.columns:
            echo(f"     {field.name}: {field.dataType.simpleString()}")
        if self._adds_fields:
            echo("     and new fields of the objects")

    def _check_names(self, wanted: StructType) -> None:
        for field in wanted:
            if field.name.lower() in (INTERNAL | (ORIGIN.keys() if self._has_origin else set())):
                raise errors.WrongSchema(
                    reason=f"The field {field.name} has the name of a column that the job creates."
                    " Remove it from --schema."
                )

    def _taken(self) -> set[str]:
        """Returns the column names that fields cannot have, in lower case."""
        return {
            *INTERNAL,
            *(ORIGIN if self._has_origin else ()),
            *([self._upsert.lower()] if self._upsert else ()),
        }

    @staticmethod
    def _type_of_key(name: str, *schemas: StructType) -> DataType:
        from pyspark.sql.types import StringType

        for schema in schemas:
            for field in schema:
                if field.name.lower() == name.lower():
                    return field.dataType
        return StringType()

    def _shape(self, fields: StructType) -> Shape:
        return Shape(
            fields=fields, key=self._upsert, key_type=self._key_type, has_origin=self._has_origin
        )

    # -------------------------------------------------------------------------- windows

    def run(
        self,
        kept: Checkpoint,
        name: str,
        unfinished: Window | None,
        *,
        max_records: int,
        every_seconds: float | None,
    ) -> None:
        """Writes the pending windows, and later ones if `every_seconds` is given.

        Raises `TopicChanged` if the topic is re-created meanwhile.
        """
        if unfinished is not None:
            self._finish(kept, unfinished, name)
        is_told = False
        while True:
            waiting = self.waiting()
            while (part := _part(waiting, max_records)).count:
                if not self._find_fields(part, waiting):
                    if every_seconds is None:
                        raise errors.BadRequest(
                            reason=f"No field was found in {counted(waiting.count, 'record')}. Pass"
                            " the fields with --schema."
                        )
                    if not is_told:
                        echo("no record has fields yet; waiting for one, or pass --schema")
                        is_told = True
                    break
                if not self._number:
                    self._check_case(part)
                self._check_writable(part)
                plan = kept.plan(self._number, part, self._fields.json())
                self._write(kept, plan, name)
                self._number += 1
                self._at = part.ends
                waiting = Range(starts=part.ends, ends=waiting.ends)
            if every_seconds is None:
                return
            time.sleep(every_seconds)

    def waiting(self) -> Range:
        """Returns the records in no window yet. Raises `DataLoss` if some of them are gone."""
        info = self._source.describe(self._log)
        found = self._waiting(info)
        found.check_exists(info, "a new --checkpoint")
        return found

    def _waiting(self, info: TopicInfo) -> Range:
        """Returns the records in no window yet."""
        starts = {
            each.partition: self._at.get(each.partition, each.start) for each in info.partitions
        }
        return Range(starts=starts, ends={each.partition: each.end for each in info.partitions})

    def _find_fields(self, part: Range, waiting: Range) -> bool:
        """Adds columns for fields of the objects. Returns whether there are any columns.

        The first ones may come from later pending records: a topic may begin with tombstones, or
        with bad values.
        """
        if self._adds_fields:
            with progress(self._spark, f"columns of {self._source.topic}"):
                looked = None
                while not self._fields.fields:
                    self._looked = {**waiting.starts, **self._looked}
                    looked = _part(waiting.between(self._looked, waiting.ends), WINDOW_RECORDS)
                    if not looked.count:
                        return False
                    self._add_fields(looked)
                    self._looked = looked.ends
                if looked != part:
                    self._add_fields(part)
        return bool(self._fields.fields)

    def _add_fields(self, part: Range) -> None:
        found = merged_fields(self._found(part))
        if self._upsert is not None:
            found.pop(self._upsert, None)
        self._fields, left_out = with_new_fields(self._fields, found, self._taken())
        for each in sorted({*left_out} - self._left_out):
            self._left_out.add(each)
            echo(f"the field {each!r} is left out: no column can have its name")

    def _found(self, part: Range) -> Iterator[dict[str, Kind]]:
        """Yields the fields of the objects, from each task that has read some of them."""
        known = json_type(self._fields) if self._fields.fields else pa.struct([])
        texts = self._source.frame(
            self._spark, part, columns="value", valueFormat="string"
        ).mapInArrow(functools.partial(find_fields, known), "found STRING")
        for row in texts.collect():
            yield json.loads(row["found"])

    def _check_case(self, part: Range) -> None:
        """Raises `WrongSchema` if a field of the first objects differs in case only.

        Its column would be null in each row. If new fields are added, such a field is reported.
        """
        if self._adds_fields:
            return
        for found in self._found(_part(part, _CASE_RECORDS)):
            other = other_case(self._fields, found)
            if other is not None:
                field, name = other
                raise errors.WrongSchema(
                    reason=f"The objects have the field {name!r}, and --schema names {field!r}:"
                    " names in JSON are case-sensitive. Correct --schema, or leave the field out."
                )

    def _check_writable(self, part: Range) -> None:
        """Raises the errors of a window that can be detected before it is planned.

        They are `WrongSchema` if another program has given a column a different type, and
        `BadValue`. The latter is checked only before the first commit, which leaves a folder that
        is not a table if it fails. Later ones leave nothing, and their values are decoded once.
        """
        shape = self._shape(self._fields)
        has_columns = self._table.has(self._spark, shape.columns)
        if has_columns or self._dead_letters is not None:
            return
        is_new = self._table.schema(self._spark) is None
        if is_new and _counted(shape.rows(self._source, self._spark, part)).bad:
            raise self._refusal(shape, part)

    def _finish(self, kept: Checkpoint, plan: Window, name: str) -> None:
        """Writes the missing parts of a window that an earlier run has planned.

        Raises `DataLoss` if its records are gone. If only their rows were written, the next run
        continues.
        """
        info = self._source.describe(self._log)
        if not self._table.is_written(self._spark, name, plan.number):
            plan.part.check_exists(info, "a new --checkpoint")
            ends = {each.partition: each.end for each in info.partitions}
            waiting = Range(starts=plan.starts, ends={n: ends[n] for n in plan.starts})
            if self._find_fields(plan.part, waiting):
                if not plan.number:
                    self._check_case(plan.part)
                self._check_writable(plan.part)
                self._earlier = plan if plan.schema != self._fields.json() else None
                plan = kept.replan(plan, self._fields.json())
            self._write(kept, plan, name)
            self._earlier = None
            return
        gone, dead = plan.part.gone(info), self._dead_letters
        newest = None if gone is None or dead is None else dead.newest(name)
        starts = {each.partition: each.start for each in info.partitions}
        rest, counts = plan.part.between(starts, plan.ends), _Counts(0, 0)
        if rest.count:
            shape = self._shape(_fields_of(plan))
            counts = _counted(shape.rows(self._source, self._spark, rest))
            self._write_dead_letters(shape, rest, plan, name, counts)
        self._end(kept, plan, counts)
        # Without a dead-letter topic, a record without a row would have ended the run.
        if gone is not None and dead is not None and (newest is None or newest < plan.number):
            partition, start, end = gone
            raise errors.DataLoss(
                topic=info.topic,
                partition=partition,
                start=start,
                end=end,
                reason="their rows are in the table, but records without a row are not in topic"
                f" {dead.topic!r}. The next run continues",
            )

    def _write(self, kept: Checkpoint, plan: Window, name: str) -> None:
        shape = self._shape(_fields_of(plan))
        rows = shape.rows(self._source, self._spark, plan.part)
        with progress(self._spark, f"window {plan.number}"):
            if self._upsert is not None:
                counts = self._merge(rows, self._upsert, shape, plan, name)
            else:
                counts = self._append(kept, rows, shape, plan, name)
            self._write_dead_letters(shape, plan.part, plan, name, counts)
        self._end(kept, plan, counts)

    def _write_dead_letters(
        self, shape: Shape, part: Range, plan: Window, name: str, counts: _Counts
    ) -> None:
        if counts.bad and self._dead_letters is not None:
            letters = dead_letters(shape.rejected(self._source, self._spark, part))
            app = self._dead_letters.name_of(name)
            self._dead_letters.writer(letters, txnAppId=app, txnVersion=str(plan.number)).save()

    def _end(self, kept: Checkpoint, plan: Window, counts: _Counts) -> None:
        kept.finish(plan.number)
        self.count += counts.good
        self.rejected += counts.bad
        echo(f"window {plan.number}: {counted(counts.good, 'record')}")

    def _append(
        self, kept: Checkpoint, rows: DataFrame, shape: Shape, plan: Window, name: str
    ) -> _Counts:
        """Decodes the records once, and counts them as they are written."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        self._table.has(self._spark, shape.columns)
        observed = Observation()
        is_good = ~f.col(BAD)
        if self._dead_letters is None:
            refused = f.raise_error(f.lit(_REFUSED)).cast("boolean")
            is_good = f.when(f.col(BAD), refused).otherwise(f.lit(True))
        good = rows.observe(observed, *_count_columns()).where(is_good).drop(BAD)
        try:
            self._table.append(good, name, plan.number)
        except spark_error_kinds() as error:
            if _REFUSED in str(error):
                raise self._refusal(shape, plan.part) from None
            raise
        # Nothing is observed in a commit that Delta skips because the table has its number.
        counts = _observed(observed)
        if counts is None and self._earlier is not None:
            kept.replan(self._earlier, self._earlier.schema)
            raise errors.BadRequest(
                reason=f"An earlier run has since written window {plan.number}, with its own"
                " columns. Run this again: it continues after that window."
            )
        return counts or _counted(rows)

    def _merge(self, rows: DataFrame, key: str, shape: Shape, plan: Window, name: str) -> _Counts:
        """Merges the rows, persisted for that time because MERGE reads them twice."""
        rows = rows.persist()
        try:
            counts = _counted(rows)
            if counts.bad and self._dead_letters is None:
                raise self._refusal(shape, plan.part)
            self._table.widen(self._spark, shape.columns)
            self._table.merge(rows.where(f"NOT {BAD}"), key, name, plan.number)
        finally:
            rows.unpersist()
        return counts

    def _refusal(self, shape: Shape, part: Range) -> errors.BadValue:
        rejected = shape.rejected(self._source, self._spark, part)
        first = rejected.select("partition", "offset", "reason").first()
        assert first is not None
        error = errors.BadValue(
            topic=self._source.topic, partition=first[0], offset=first[1], reason=first[2]
        )
        error.add_note(
            "To write such records to a topic, pass --dead-letters TOPIC. If the columns are wrong,"
            " run again with a different --schema."
        )
        return error


class _Counts(NamedTuple):
    """Records of a window, with and without a row."""

    good: int
    bad: int


def _count_columns() -> list[Column]:
    from pyspark.sql import functions as f

    bad = f.count_if(BAD)
    return [(f.count(f.lit(1)) - bad).alias("good"), bad.alias("bad")]


def _counted(rows: DataFrame) -> _Counts:
    return _Counts(*rows.agg(*_count_columns()).collect()[0])


def _observed(observation: Observation) -> _Counts | None:
    """Returns the counts of a query; None if it counted nothing, since Spark would then block."""
    found: list[_Counts] = []

    def wait() -> None:
        found.append(_Counts(**observation.get))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(_OBSERVED_SECONDS)
    return found[0] if found else None


def _fields_of(plan: Window) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(plan.schema))


def _part(waiting: Range, most: int) -> Range:
    """Returns the first records of each partition, about `most` in total."""
    sizes = [waiting.ends[each] - start for each, start in waiting.starts.items()]
    shares = fair_shares(sizes, most)
    ends = {
        each: start + share
        for (each, start), share in zip(waiting.starts.items(), shares, strict=True)
    }
    return Range(starts=waiting.starts, ends=ends)
