"""The Delta table that a job writes: its schema, and writes that carry a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sparklog import errors
from sparklog.formats.values.ddl import quoted
from sparklog.jobs.running import spark_error_kinds
from sparklog.jobs.table_writing.rows import BAD, DELETED, INTERNAL, ORDER
from sparklog.jobs.table_writing.schemas import check_fits, has_fields
from sparklog.sources.json_inference import ddl_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_NO_TABLE: Final = ("TABLE_OR_VIEW_NOT_FOUND", "PATH_NOT_FOUND", "DELTA_PATH_DOES_NOT_EXIST")
_ONLY_FOLDER: Final = "DELTA_TABLE_NOT_FOUND"
_NOT_SKIPPED: Final = "sparklog: a write that must fail"
_TXN: Final = "spark.databricks.delta.write.txn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A Delta table: a path, or a name in the catalog."""

    path: str | None
    name: str | None

    def __str__(self) -> str:
        return self.path or self.name or ""

    @property
    def _identifier(self) -> str:
        return f"delta.{quoted(self.path)}" if self.path else self.name or ""

    def schema(self, spark: SparkSession, *, is_new: bool = False) -> StructType | None:
        """Returns its columns, all of them nullable; None if there is no table.

        Objects may lack any field, and Delta checks the rows. Raises `BadRequest` for the table of
        a topic and, with `is_new`, for a folder that is not a table. A killed first write leaves
        such a folder behind.
        """
        from pyspark.errors import AnalysisException

        try:
            found = spark.read.table(self._identifier).schema
            properties = spark.sql(f"SHOW TBLPROPERTIES {self._identifier}").collect()
        except AnalysisException as error:
            if error.getCondition() == _ONLY_FOLDER and is_new:
                raise errors.BadRequest(
                    reason=f"{self} is a folder, but not a Delta table. Name a table, or a folder"
                    " that does not exist. If a run of this job was stopped in its first commit,"
                    " pass its --checkpoint, or remove the folder."
                ) from None
            if error.getCondition() in (*_NO_TABLE, _ONLY_FOLDER):
                return None
            raise
        if any(row["key"].startswith("sparklog.") for row in properties):
            raise errors.BadRequest(
                reason=f"{self} is the table of a topic, which only brokers write. Name a different"
                " one."
            )
        return spark.createDataFrame([], ddl_of(found)).schema

    def has(self, spark: SparkSession, columns: StructType) -> bool:
        """Returns whether it has the columns. Raises `WrongSchema` if one has a different type."""
        found = self.schema(spark)
        if found is None:
            return False
        check_fits(found, columns)
        return has_fields(found, columns)

    def check_takes(self, spark: SparkSession, columns: StructType) -> None:
        """Raises Spark's error if Delta rejects columns that the table lacks.

        For a catalog table only the write itself detects them: the optimizer runs the row first.
        """
        if (found := self.schema(spark)) is not None and not has_fields(found, columns):
            # Not attempted for a new table, whose folder would remain.
            self._is_skipped(spark.sql("VALUES (1)"), columns)

    def is_written(self, spark: SparkSession, name: str, number: int) -> bool:
        """Returns whether it has the write of this name with this number or a later one."""
        from pyspark.errors import AnalysisException

        columns = self.schema(spark)
        if columns is None:
            return False
        options = {"txnAppId": name, "txnVersion": str(number)}
        try:
            # The optimizer would run a literal row before Delta checks the number.
            return self._is_skipped(spark.range(1, numPartitions=1), columns, **options)
        except AnalysisException:  # not skipped; rejected due to another program's change
            return False

    def _is_skipped(self, row: DataFrame, columns: StructType, **options: str) -> bool:
        """Returns whether Delta skips a write of the columns, which otherwise fails.

        SQL cannot query a `txn`, but Delta checks it before it runs a write. It checks the columns
        before that, too.
        """
        from pyspark.sql import functions as f

        fails = f.raise_error(f.lit(_NOT_SKIPPED))
        rows = row.select(*(fails.cast(each.dataType).alias(each.name) for each in columns))
        try:
            self._save(rows, **options)
        except spark_error_kinds() as error:
            if _NOT_SKIPPED in str(error):
                return False
            raise
        return True

    def widen(self, spark: SparkSession, columns: StructType) -> None:
        """Creates the table if there is none, and adds the columns that it lacks."""
        if not self.has(spark, columns):
            self._save(spark.createDataFrame([], columns))

    def append(self, rows: DataFrame, name: str, number: int) -> None:
        """Adds rows and columns, unless a write of this name and this or a later number did."""
        self._save(rows, txnAppId=name, txnVersion=str(number))

    def _save(self, rows: DataFrame, **options: str) -> None:
        writer = rows.write.format("delta").mode("append").options(mergeSchema="true", **options)
        if self.path is not None:
            writer.save(self.path)
        else:
            writer.saveAsTable(self.name or "")

    def merge(self, rows: DataFrame, key: str, name: str, number: int) -> None:
        """Replaces or deletes each key's row by its newest record, only once, as `append` does."""
        from pyspark.sql import Window as Over
        from pyspark.sql import functions as f

        newest = Over.partitionBy(quoted(key)).orderBy(f.desc(ORDER))
        columns = [each for each in rows.columns if each not in INTERNAL]
        latest = rows.withColumn(ORDER, f.row_number().over(newest)).where(f"{ORDER} = 1")
        view = f"sparklog_to_table_{name}"
        latest.drop(BAD, ORDER).createOrReplaceTempView(view)
        names = [quoted(each) for each in columns]
        session = rows.sparkSession
        session.conf.set(f"{_TXN}AppId", name)
        session.conf.set(f"{_TXN}Version", str(number))
        try:
            session.sql(
                # Schema evolution allows a struct to lack fields of the struct in the table.
                f"MERGE WITH SCHEMA EVOLUTION INTO {self._identifier} t USING {view} s"
                f" ON t.{quoted(key)} = s.{quoted(key)}"
                f" WHEN MATCHED AND s.{DELETED} THEN DELETE"
                f" WHEN MATCHED THEN UPDATE SET {', '.join(f't.{n} = s.{n}' for n in names)}"
                f" WHEN NOT MATCHED AND NOT s.{DELETED} THEN INSERT ({', '.join(names)})"
                f" VALUES ({', '.join(f's.{n}' for n in names)})"
            )
        finally:
            session.conf.unset(f"{_TXN}AppId")
            session.conf.unset(f"{_TXN}Version")
            session.catalog.dropTempView(view)
