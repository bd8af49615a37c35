"""The measures of `python -m benchmarks` by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks import cluster, flight_tls
from benchmarks.avro_values import avro_values
from benchmarks.consumers import reads, tails
from benchmarks.jobs import jobs
from benchmarks.json_values import json_values
from benchmarks.kafka import measures as kafka
from benchmarks.kafka.acls import acls
from benchmarks.kafka.logins import logins
from benchmarks.kafka.quota import quota
from benchmarks.kafka.tls import tls
from benchmarks.mirror import mirror
from benchmarks.oauth import oauth
from benchmarks.spark import age, bucket, bulk, stream
from benchmarks.typed import typed
from benchmarks.wide import measures as wide
from sparklog.bench.command import Measure

MEASURES: Final[Mapping[str, Measure]] = {
    "kafka-produce": kafka.produce,
    "kafka-consume": kafka.consume,
    "kafka-python": kafka.python,
    "kafka-single": kafka.single,
    "kafka-start": kafka.start,
    "kafka-idle": kafka.idle,
    "kafka-rebalance": kafka.rebalance,
    "kafka-tls": tls,
    "kafka-logins": logins,
    "kafka-oauth": oauth,
    "kafka-acls": acls,
    "kafka-quota": quota,
    "kafka-tails": tails.kafka,
    "kafka-native-tails": tails.native,
    "kafka-large-records": reads.large,
    "kafka-many-partitions": reads.many,
    "spark-bulk": bulk.bulk,
    "spark-stream": stream.stream,
    "spark-bucket": bucket.bucket,
    "spark-age": age.age,
    "json-values": json_values,
    "typed": typed,
    "avro-values": avro_values,
    "flight-tls": flight_tls.tls,
    "flight-logins": flight_tls.logins,
    "jobs": jobs,
    "mirror": mirror,
    "wide-create": wide.create,
    "wide-idle": wide.idle,
    "wide-100": wide.busy_100,
    "wide-400": wide.busy_400,
    "wide-1000": wide.busy_1000,
    "wide-partitions": wide.partitions,
    "cluster-kill": cluster.kill,
    "cluster-hosts": cluster.hosts,
    "cluster-kafka": cluster.kafka,
    "cluster-rolling": cluster.rolling,
    "cluster-store": cluster.store,
    "cluster-wide": cluster.wide,
    "cluster-speed": cluster.speed,
}
"""In the order in which they run."""
