"""Old releases of clients that many programs still use, with a broker of ours.

They are installed in folders of their own, which takes a connection to a package registry.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

import sparklog
from benchmarks import jars
from sparklog.broker.agent import Agent
from sparklog.formats import record_batch
from sparklog.settings import GroupSettings
from tests.support.jvms import running
from tests.support.kafkarequests import batch, create, create_fields, fetch_fields, produce
from tests.support.kafkas import broker, frames

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(600)]

INSTALL_SECONDS: Final = 300.0
RUN_SECONDS: Final = 120.0
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""By their numbers in a batch."""
NEWEST: Final = ""
"""The release that the tests use anyway."""
OLD_LIBRDKAFKA: Final = ("2.0.2", "2.3.0", "2.6.1", "2.8.2", "2.10.1", "2.12.2")
OLD_KAFKA_PYTHON: Final = "2.0.2"
JAVA: Final = ("2.1.1", "2.4.1", "2.8.2", "3.0.2", "3.6.2", "3.9.1")
RELEASES: Final = str(Path(__file__).parent / "java" / "Releases.java")
Run = Callable[..., str]

PRODUCE: Final = """
import sys
import confluent_kafka
from confluent_kafka import Producer
print(confluent_kafka.__version__)
address, codec = sys.argv[1:]
producer = Producer({"bootstrap.servers": address, "compression.type": codec, "linger.ms": 50})
for number in range(100):
    producer.produce("of-" + codec, b"the same words " * 20)
assert producer.flush(60) == 0
"""
TRANSACT: Final = """
import sys
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": sys.argv[1], "transactional.id": "tx"})
try:
    producer.init_transactions(100)
except Exception as error:
    print(error)
"""
WORK: Final = """
import sys
import time
import confluent_kafka
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
print(confluent_kafka.__version__)
address = {"bootstrap.servers": sys.argv[1]}
admin = AdminClient(address)
admin.create_topics([NewTopic("t", 1, 1)])["t"].result()
admin.create_partitions([NewPartitions("t", 2)])["t"].result()
placed = []
for idempotent in (False, True):
    producer = Producer({**address, "enable.idempotence": idempotent, "linger.ms": 5})
    for number in range(500):
        producer.produce(
            "t", b"%d" % number, partition=number % 2, timestamp=1_700_000_000_000 + number,
            on_delivery=lambda error, sent: placed.append((error, sent.partition(), sent.offset())),
        )
    assert producer.flush(60) == 0
assert sorted(placed) == [(None, part, offset) for part in (0, 1) for offset in range(500)]
settings = {
    **address, "group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False,
    "session.timeout.ms": 10_000, "heartbeat.interval.ms": 500,
}
members, found, until = [Consumer(settings) for _ in range(2)], set(), time.monotonic() + 60
for member in members:
    member.subscribe(["t"])
while len(found) < 1_000 or [len(each.assignment()) for each in members] != [1, 1]:
    assert time.monotonic() < until, (len(found), [each.assignment() for each in members])
    for member in members:
        for each in member.consume(500, 0.1):
            assert each.error() is None, each.error()
            found.add((each.partition(), each.offset()))
for member in members:
    ends = [TopicPartition("t", each.partition, 500) for each in member.assignment()]
    member.commit(offsets=ends, asynchronous=False)
    member.close()
later = Consumer(settings)
places = [TopicPartition("t", number) for number in (0, 1)]
assert [each.offset for each in later.committed(places, 30)] == [500, 500]
assert later.get_watermark_offsets(places[0], 30) == (0, 500)
(at,) = later.offsets_for_times([TopicPartition("t", 1, 1_700_000_000_011)], 30)
assert at.offset == 5, at
later.assign([TopicPartition("t", 1, 498)])
assert [each.offset() for each in later.consume(2, 30)] == [498, 499]
later.close()
admin.delete_consumer_groups(["g"])["g"].result()
admin.delete_topics(["t"])["t"].result()
print("done")
"""
CONSUME: Final = """
import sys
import time
from kafka import KafkaConsumer, TopicPartition
consumer = KafkaConsumer(bootstrap_servers=sys.argv[1], fetch_max_wait_ms=100)
consumer.assign([TopicPartition("z", 0)])
consumer.seek_to_beginning()
found, until = [], time.monotonic() + 30
while len(found) < 10 and time.monotonic() < until:
    for records in consumer.poll(1_000).values():
        found += [record.value.decode() for record in records]
print(" ".join(found))
"""


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    with broker(tmp_path / "root") as agent:
        yield agent


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Run:
    """Runs a program with some packages of old releases, or none, in place of the newest ones."""

    def run(packages: Sequence[str], program: str, *arguments: str) -> str:
        folder = tmp_path / "packages"
        if packages and not folder.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
            subprocess.run([*pip, *packages], check=True, timeout=INSTALL_SECONDS)
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("version", [*OLD_LIBRDKAFKA, NEWEST])
def test_what_librdkafka_compresses_is_stored_so(agent: Agent, run: Run, version: str) -> None:
    """Releases up to 2.8 compress only for a broker that lists Produce from version 0."""
    packages = [f"confluent-kafka=={version}"] if version else []
    with frames(agent) as client:
        for number, codec in enumerate(CODECS):
            create(client, f"of-{codec}")
            used = run(packages, PRODUCE, agent.kafka_address, codec)
            assert used.strip() == version or not version
            reply = client.ask(1, 4, fetch_fields(f"of-{codec}", 0, 0))
            ((found,),) = (each.partitions for each in reply.responses)
            assert record_batch.read_header(found.records).codec == number, codec


@pytest.mark.parametrize("version", OLD_LIBRDKAFKA)
def test_librdkafka_of_each_age(agent: Agent, run: Run, version: str) -> None:
    """Administration, producers, a shared group, and consumers that look and seek."""
    said = run([f"confluent-kafka=={version}"], WORK, agent.kafka_address)
    assert said.split() == [version, "done"]


def test_a_transaction_ends_with_the_reason(agent: Agent, run: Run) -> None:
    """Long before the time that the program would wait."""
    said = run([], TRANSACT, agent.kafka_address)
    assert "this broker has no transactions" in said


@pytest.mark.parametrize("version", JAVA)
def test_java_clients_of_each_age(tmp_path: Path, version: str) -> None:
    """Administration, every codec, a shared group, seeking, and the end of a consumer."""
    try:
        found = jars.find_tools("kafka-clients", version)
    except RuntimeError as error:
        pytest.skip(str(error))
    path = [each for each in found if "log4j" not in each]  # which needs more than a client has
    groups = GroupSettings(initial_rebalance_delay_ms=200)
    with (
        broker(tmp_path / "root", groups=groups) as agent,
        running(path, RELEASES, agent.kafka_address, "t") as program,
    ):
        program.wait_for("done")
        assert program.wait() == 0


def test_an_old_client_reads_zstd(agent: Agent, run: Run) -> None:
    """One that asks in an old version of Fetch, and has the package for zstd."""
    with sparklog.connect(agent.address):
        with frames(agent) as client:
            configs = [{"name": "compression.type", "value": "zstd"}]
            client.ask(19, 7, create_fields("z", configs=configs))
            produce(client, "z", 0, batch([str(number).encode() for number in range(10)]))
        said = run(
            [f"kafka-python=={OLD_KAFKA_PYTHON}", "zstandard==0.25.0"], CONSUME, agent.kafka_address
        )
    assert said.split() == [str(number) for number in range(10)]
