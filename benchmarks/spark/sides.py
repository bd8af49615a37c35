"""The two sides compared, as a Spark session sees them: sparklog at a root, and Kafka."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sparklog.client.log import Log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

PARTITIONS: Final = 4
"""Partitions of every topic, on both sides."""

_QUIET_SECONDS = 3.0
_SETTLE_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_BYTES = "org.apache.kafka.common.serialization.ByteArraySerializer"


class Sparklog:
    """Our side: `log` is connected to the broker of `root`."""

    def __init__(self, spark: SparkSession, root: str, log: Log) -> None:
        self._spark = spark
        self._root = root
        self.log = log

    def create_topic(self, topic: str) -> None:
        self.log.create_topic(topic, partitions=PARTITIONS)

    def write(self, frame: DataFrame, topic: str) -> None:
        sink = frame.write.format("sparklog").mode("append")
        sink.option("root", self._root).option("topic", topic).save()

    def read(self, topic: str, **options: str) -> DataFrame:
        """Reads a batch through `format("sparklog")`."""
        source = self._spark.read.format("sparklog").options(**options)
        return source.option("root", self._root).option("subscribe", topic).load()

    def stream(self, topic: str, starting: str) -> DataFrame:
        source = self._spark.readStream.format("sparklog").option("startingOffsets", starting)
        return source.option("root", self._root).option("subscribe", topic).load()

    def dataframe(self, topic: str) -> DataFrame:
        """Reads a batch by `sources.dataframe`: Delta's own scan, and our source for the tail."""
        from sparklog.sources import dataframe

        return dataframe(self._spark, self._root, topic)

    def foreach_dataframe(
        self, topic: str, function: Callable[[DataFrame, int], None]
    ) -> DataStreamWriter:
        """Streams from the beginning, with micro-batches read as by `dataframe`."""
        from sparklog.sources import foreach_dataframe

        return foreach_dataframe(
            self._spark, self._root, topic, function, startingOffsets="earliest"
        )

    def delta(self, topic: str) -> DataFrame:
        """The topic's table, as any Delta reader sees it."""
        return self._spark.read.format("delta").load(self._table(topic))

    def delta_stream(self, topic: str) -> DataFrame:
        """Returns a stream of new commits to the topic's table, through Delta's own source."""
        source = self._spark.readStream.format("delta").option("startingVersion", "latest")
        return source.load(self._table(topic))

    def _table(self, topic: str) -> str:
        return f"{self._root}/topics/{topic}"

    def wait_until_quiet(self, topic: str) -> None:
        """Waits until all is published and the janitor is done with the table, and syncs disks."""
        self.log.flush_to_table(topic, timeout_seconds=_SETTLE_SECONDS)
        deadline = time.monotonic() + _SETTLE_SECONDS
        version, since = -1, time.monotonic()
        while time.monotonic() < min(since + _QUIET_SECONDS, deadline):
            found = self.log.describe(topic).table_version
            if found != version:
                version, since = found, time.monotonic()
            time.sleep(_LOOK_SECONDS)
        os.sync()


class Kafka:
    """The other side: Spark's connector, and Kafka's own clients in Spark's JVM.

    The producer sends without linger, with acks=all.
    """

    def __init__(self, spark: SparkSession, address: str) -> None:
        self._spark = spark
        self.address = address
        self._clients: Any = spark._jvm.org.apache.kafka.clients  # type: ignore[union-attr]
        self._producer: Any = None

    def create_topic(self, topic: str) -> None:
        admin = self._clients.admin.AdminClient.create({"bootstrap.servers": self.address})
        try:
            replicas = {number: [1] for number in range(PARTITIONS)}
            admin.createTopics([self._clients.admin.NewTopic(topic, replicas)]).all().get()
        finally:
            admin.close()

    def write(self, frame: DataFrame, topic: str) -> None:
        sink = frame.write.format("kafka").option("kafka.bootstrap.servers", self.address)
        sink.option("topic", topic).save()

    def read(self, topic: str, **options: str) -> DataFrame:
        source = (
            self._spark.read.format("kafka")
            .options(**options)
            .option("kafka.bootstrap.servers", self.address)
        )
        return source.option("subscribe", topic).load()

    def stream(self, topic: str, starting: str) -> DataFrame:
        source = self._spark.readStream.format("kafka").option("startingOffsets", starting)
        source = source.option("kafka.bootstrap.servers", self.address)
        return source.option("subscribe", topic).load()

    def send(self, topic: str, value: bytes) -> None:
        """Sends a record without a key, and does not wait for its ack."""
        if self._producer is None:
            settings = {
                "bootstrap.servers": self.address,
                "acks": "all",
                "linger.ms": "0",
                "key.serializer": _BYTES,
                "value.serializer": _BYTES,
            }
            self._producer = self._clients.producer.KafkaProducer(settings)
            self._record = self._clients.producer.ProducerRecord  # each dot is a call to the JVM
        self._producer.send(self._record(topic, value))

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
