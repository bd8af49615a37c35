"""A query in real-time mode from topic `t` to topic `u`, through Spark's Kafka connector.

Arguments: addresses of the broker's listeners, Flight's and Kafka's, the file of the CA, a user and
its password, a folder for the checkpoint, and the connector's jars, separated by commas.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import sparklog
from sparklog.client.log import Log
from tests.support.waiting import wait_until

BATCH_SECONDS: Final = 300
"""Far longer than the test, so a record that arrives has not waited for a micro-batch to end."""

RECORDS: Final = 20


Options = dict[str, str]
"""Options of the connector's Kafka client."""


def real_time(frame: DataFrame, kafka: Options, checkpoint: str) -> StreamingQuery:
    """Starts the query, from `frame` to `u`."""
    trigger: Any = {"realTime": f"{BATCH_SECONDS} seconds"}  # pyspark's types lack it
    return (
        frame.selectExpr("key", "upper(cast(value as string)) as value")
        .writeStream.format("kafka")
        .options(**kafka)
        .option("topic", "u")
        .option("checkpointLocation", checkpoint)
        .outputMode("update")
        .trigger(**trigger)
        .start()
    )


def refusal(frame: DataFrame, kafka: Options, checkpoint: str) -> str:
    """Returns the error of a real-time query from `frame`."""
    query = None
    try:
        query = real_time(frame, kafka, checkpoint)
        query.awaitTermination(60)
    except PySparkException as error:
        return str(error)
    finally:
        if query is not None:
            query.stop()
    return ""


def delays(log: Log, query: StreamingQuery) -> list[float]:
    """Sends one record at a time, and returns the seconds until each is in `u`."""
    found = []
    with log.producer() as producer, log.consumer("u") as consumer:
        records = iter(consumer)
        for number in range(RECORDS):
            began = time.monotonic()
            producer.send("t", b"v%d" % number, key=b"k").result()
            record = next(records)
            assert (record.key, record.value) == (b"k", b"V%d" % number)
            found.append(time.monotonic() - began)
            assert query.isActive
    return found


def main(
    flight: str, address: str, ca: str, user: str, password: str, checkpoint: str, jars: str
) -> dict[str, Any]:
    """Returns the results of both sources."""
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars)
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    ours = spark.readStream.format("sparklog").options(bootstrap=flight, subscribe="t").load()
    kafka = {
        "kafka.bootstrap.servers": address,
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule"
        f' required username="{user}" password="{password}";',
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": ca,
    }
    refused = refusal(ours, kafka, f"{checkpoint}/ours")
    given = kafka | {"subscribe": "t", "startingOffsets": "earliest"}
    theirs = spark.readStream.format("kafka").options(**given).load()
    query = real_time(theirs, kafka, f"{checkpoint}/kafka")
    try:
        wait_until(lambda: query.status["isTriggerActive"], "the query runs")
        with sparklog.connect(flight) as log:
            found = delays(log, query)
    finally:
        query.stop()
        spark.stop()
    return {"refused": refused, "delays": found}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
