"""The precision of a quota: three producers of one client id that send as fast as they can."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from benchmarks import jars
from benchmarks.kafka import clients
from benchmarks.kafka.sides import PARTITIONS, KafkaSetup, Ours, Side, Theirs, measure
from benchmarks.kafka_process import java
from sparklog.bench.report import Measurement

_QUOTA: Final = 1_000_000
"""Bytes in a second."""
_PRODUCERS: Final = 3
_VALUE_BYTES: Final = 1_000
_CLIENT_ID: Final = "limited"
_SETTLING_SECONDS: Final = 15.0
"""In which the window, which is empty at first, is filled."""
_MEASURED_SECONDS: Final = 60.0
_OTHER_SECONDS: Final = 0.05


@measure
def quota(setup: KafkaSetup) -> Iterator[Measurement]:
    """Measures the rate of producers with a quota, and the acks of one without."""
    if not jars.find().broker:
        return
    found = setup.each("three producers with a quota of 1 MB/s", _limited)
    (rate, other_ms), theirs = found[Ours.name], found.get(Theirs.name)
    compared = f"Kafka {theirs[0] / 1e6:.3f} MB/s" if theirs else "no Kafka to compare"
    yield Measurement(
        name=f"{_PRODUCERS} producers with a quota of 1 MB/s, {_MEASURED_SECONDS:.0f} s",
        value=f"{rate / 1e6:.3f} MB/s",
        target="1 MB/s ± 5 %",
        met=abs(rate - _QUOTA) <= _QUOTA / 20,
        detail=compared,
    )
    yield Measurement(
        name="a producer without a quota meanwhile, mean time of an ack",
        value=f"{other_ms:.2f} ms",
        detail=f"Kafka {theirs[1]:.2f} ms" if theirs else compared,
    )


def _limited(side: Side) -> tuple[float, float]:
    """Returns bytes per second of the limited producers, and ms per ack of the other one."""
    clients.create(side.address, PARTITIONS)
    _set_quota(side.address)
    delivered = [0] * _PRODUCERS
    is_over = threading.Event()
    threads = [
        threading.Thread(target=_produce, args=(side.address, number, delivered, is_over))
        for number in range(_PRODUCERS)
    ]
    for each in threads:
        each.start()
    try:
        _wait(side.address, _SETTLING_SECONDS)
        before, began = sum(delivered), time.perf_counter()
        other_ms = _wait(side.address, _MEASURED_SECONDS)
        return (sum(delivered) - before) / (time.perf_counter() - began), other_ms
    finally:
        is_over.set()
        for each in threads:
            each.join()


def _set_quota(address: str) -> None:
    entity = ("--entity-type", "clients", "--entity-name", _CLIENT_ID)
    subprocess.run(
        [
            *(java(), "-Xmx256m", "-cp", os.pathsep.join(jars.find().broker)),
            *("kafka.admin.ConfigCommand", "--bootstrap-server", address, "--alter", *entity),
            *("--add-config", f"producer_byte_rate={_QUOTA}"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )


def _produce(address: str, number: int, delivered: list[int], is_over: threading.Event) -> None:
    """Adds the bytes of acked values to `delivered[number]`."""
    import confluent_kafka

    def acked(error: Any, message: Any) -> None:
        if error is None:
            delivered[number] += len(message.value())

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "client.id": _CLIENT_ID,
            "queue.buffering.max.messages": 10_000,
        }
    )
    value = os.urandom(_VALUE_BYTES)
    while not is_over.is_set():
        try:
            producer.produce(clients.TOPIC, value, on_delivery=acked)
        except BufferError:
            producer.poll(0.01)
    producer.purge()
    producer.flush(1.0)


def _wait(address: str, seconds: float) -> float:
    """Returns the mean time of an ack in ms, of a producer without a quota, after that time."""
    import confluent_kafka

    producer = confluent_kafka.Producer({"bootstrap.servers": address, "linger.ms": 0})
    took, count, end = 0.0, 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        producer.produce(clients.TOPIC, b"other")
        producer.flush()
        took, count = took + time.perf_counter() - began, count + 1
        time.sleep(_OTHER_SECONDS)
    return took / count * 1e3
