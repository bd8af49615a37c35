"""Copies a topic from a real Kafka to one of our brokers with MirrorMaker 2."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks import jars
from benchmarks.kafka_process import java
from sparklog import errors
from sparklog.bench.broker import BrokerProcess, FreshRoot
from sparklog.client.log import Log

_PROGRAM: Final = "org.apache.kafka.connect.mirror.MirrorMaker"
_JVM_FLAGS: Final = ("-Xms256m", "-Xmx2g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")
"""The heap and garbage collector settings of Kafka's own script."""
_PROPERTIES: Final = {
    "clusters": "kafka,ours",
    "kafka->ours.enabled": "true",
    "replication.factor": "1",
    **{
        f"{topic}.replication.factor": "1"
        for topic in ("checkpoints.topic", "heartbeats.topic", "offset-syncs.topic")
    },
    **{f"{kind}.storage.replication.factor": "1" for kind in ("offset", "status", "config")},
}
_LOOK_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 120.0
"""The longest wait for a new record."""


def copy_rate(
    folder: Path, address: str, topic: str, rows: int, settings: Mapping[str, str]
) -> float:
    """Copies `rows` records from Kafka into a fresh log; returns records/s since the first one.

    `settings`: MirrorMaker settings, in addition to the required ones.

    Raises RuntimeError if MirrorMaker cannot be downloaded, exits, or stops copying.
    """
    path = dict.fromkeys(jars.find_tools("connect-mirror") + jars.find_tools())
    with FreshRoot(folder) as work:
        broker = BrokerProcess(work / "root", kafka="127.0.0.1:0")
        with broker, broker.connect() as log, (work / "log").open("wb") as output:
            given = {**_PROPERTIES, "topics": topic, **settings}
            given["kafka.bootstrap.servers"] = address
            given["ours.bootstrap.servers"] = broker.kafka_address
            properties = work / "mirror.properties"
            lines = (f"{name}={value}\n" for name, value in given.items())
            properties.write_text("".join(lines), "utf-8")
            process = subprocess.Popen(
                [java(), *_JVM_FLAGS, "-cp", os.pathsep.join(path), _PROGRAM, str(properties)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                return _rate(log, f"kafka.{topic}", rows, process)
            finally:
                process.kill()
                process.wait()


def _rate(log: Log, topic: str, rows: int, process: subprocess.Popen[bytes]) -> float:
    first = count = 0
    began = moved = time.perf_counter()
    while count < rows:
        time.sleep(_LOOK_SECONDS)
        try:
            found = sum(each.end for each in log.describe(topic).partitions)
        except errors.UnknownTopic:
            found = 0
        now = time.perf_counter()
        if found > count:
            if not count:
                first, began = found, now
            count, moved = found, now
        if process.poll() is not None or now - moved > _PATIENCE_SECONDS:
            raise RuntimeError(f"MirrorMaker copied {count:,} of {rows:,} records")
    return (count - first) / (moved - began)
