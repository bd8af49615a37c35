"""A declarative pipeline: a topic becomes a table, and some of its rows go to another topic.

`spark-pipelines run` runs it, with the root in `SPARKLOG_ROOT`.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table
def orders() -> DataFrame:
    """Returns the topic's JSON values as rows."""
    return (
        spark.readStream.format("sparklog")
        .options(subscribe="orders", startingOffsets="earliest")
        .options(valueFormat="json", valueSchema="customer STRING, delay INT")
        .load()
        .select("value.customer", "value.delay")
    )


dp.create_sink("late", "sparklog", {"topic": "late", "valueFormat": "json"})


@dp.append_flow(target="late")
def late_orders() -> DataFrame:
    """Returns the table's late rows, with a key for the topic."""
    late = spark.readStream.table("orders").where("delay > 15")
    return late.selectExpr("customer", "delay", "customer AS key")
