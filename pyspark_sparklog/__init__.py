"""Registers `format("sparklog")`: Spark imports packages `pyspark_*` that have a `DefaultSource`.

It imports all of them, and one that fails to import hides the others. So only Spark's own base
class is imported here; other missing packages are reported when the format is used.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

with contextlib.suppress(ImportError):  # a Spark without Python sources
    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):
        """`spark.read`, `readStream`, `write` and `writeStream` with `format("sparklog")`."""

        @classmethod
        def name(cls) -> str:
            return "sparklog"

        def schema(self) -> str:
            from sparklog.sources.datasource import schema

            return schema(self.options)

        def reader(self, schema: StructType) -> DataSourceReader:
            from sparklog.sources.datasource import batch_reader

            return batch_reader(self.options, schema)

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
            from sparklog.sources.datasource import stream_reader

            return stream_reader(self.options, schema)

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            from sparklog.sinks.datasink import batch_writer

            return batch_writer(self.options, schema, overwrite=overwrite)

        def streamWriter(  # noqa: N802
            self, schema: StructType, overwrite: bool
        ) -> DataSourceStreamWriter:
            from sparklog.sinks.datasink import stream_writer

            del overwrite  # complete mode: each micro-batch appends the whole result, as in Kafka
            return stream_writer(self.options, schema)
