"""Real-time mode, which takes Spark's Kafka connector and no Python source."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import sparklog
from benchmarks import jars
from sparklog.settings import KafkaSettings, TlsSettings
from sparklog.storage.objects import open_store
from tests.support import spark_programs
from tests.support.certificates import Authority
from tests.support.kafkas import broker
from tests.support.users import PASSWORD, add_alice

pytestmark = [
    pytest.mark.spark,
    pytest.mark.spark_program,
    pytest.mark.soak(mode="clients"),
    pytest.mark.timeout(400),
]


def test_real_time_mode_reads_and_writes_by_the_kafka_listener(tmp_path: Path) -> None:
    """Records pass one by one, long before the batch ends; `format("sparklog")` is refused.

    The connector logs in over TLS, with the properties in docs/security.md.
    """
    found = jars.find()
    assert found.connector, found.missing
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker")
    tls = TlsSettings(certificate=certificate, key=key)
    kafka = KafkaSettings(listen="SASL_SSL://127.0.0.1:0")
    add_alice(open_store(str(tmp_path / "root"), {}))
    with broker(tmp_path / "root", kafka=kafka, tls=tls) as agent:
        with sparklog.connect(agent.address) as log:
            for topic in ("t", "u"):
                log.create_topic(topic, partitions=1)
        addresses = (agent.address, agent.kafka_address, authority.path, "alice", PASSWORD)
        result = spark_programs.run(
            "real_time",
            *(*addresses, str(tmp_path / "checkpoint"), ",".join(found.connector)),
            timeout_seconds=300.0,
        )
    assert "STREAMING_REAL_TIME_MODE" in result["refused"]
    assert statistics.median(result["delays"]) < 5
