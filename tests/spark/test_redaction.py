"""Secret options in the plans that Spark shows, with Spark's own patterns."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import sparklog
from tests.support.s3 import s3_server

pytestmark = pytest.mark.spark


def test_names_that_spark_redacts(spark: SparkSession) -> None:
    """An option of the store is hidden as storage.secret.*, and works as under its own name."""
    with s3_server("redacted") as storage:
        storage |= {"aws_access_key_id": "hush", "aws_secret_access_key": "hush"}
        options = {f"storage.secret.{name}": value for name, value in storage.items()}
        options |= {"root": "s3://redacted/log", "subscribe": "t"}
        with sparklog.connect("s3://redacted/log", storage_options=storage) as log:
            log.create_topic("t")
            with log.producer() as producer:
                producer.send("t", b"a").result()
            batch = spark.read.format("sparklog").options(**options).load()
            assert batch.count() == 1
            stream = spark.readStream.format("sparklog").options(**options).load()
    listed = ", ".join(f"'{name}' '{value}'" for name, value in options.items())
    view = f"CREATE TEMPORARY VIEW v USING sparklog OPTIONS ({listed})"
    (row,) = spark.sql(f"EXPLAIN EXTENDED {view}").collect()
    plans = [frame._jdf.queryExecution().toString() for frame in (batch, stream)]
    for plan in (*plans, row[0]):
        assert "hush" not in plan
    for plan in (plans[1], row[0]):
        assert "storage.secret.aws_access_key_id" in plan
