"""`python -m benchmarks.wide.load`: producers of many topics at a fixed rate, or a probe of acks.

Prints one line of JSON at the end. Exits on its own.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from confluent_kafka import Producer

_VALUE = b"x" * 100
_LATE_SECONDS = 30.0


def load(address: str, *, topics: int, partitions: int, rate: float, seconds: float) -> Any:
    """Sends `rate` records/s in total, each to a random partition of the next topic."""
    producer = Producer(
        {
            "bootstrap.servers": address,
            "linger.ms": 5,
            "acks": "all",
            "queue.buffering.max.messages": 1_000_000,
            "topic.metadata.refresh.interval.ms": -1,
        }
    )
    producer.list_topics(timeout=_LATE_SECONDS)
    chance = random.Random(1)
    acked = refused = sent = 0

    def done(error: object, _message: object) -> None:
        nonlocal acked, refused
        acked += error is None
        refused += error is not None

    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        while sent < now * rate:
            number = sent % topics
            producer.produce(
                f"wide-{number}",
                _VALUE,
                partition=chance.randrange(partitions),
                on_delivery=done,
            )
            sent += 1
        producer.poll(0.002)
    waiting = len(producer)
    late = time.monotonic()
    producer.flush(_LATE_SECONDS)
    return {
        "sent": sent,
        "acked": acked,
        "refused": refused,
        "waiting": waiting,
        "late_seconds": time.monotonic() - late,
    }


def probe(address: str, *, seconds: float) -> Any:
    """Sends one record at a time, each 20 ms after the previous ack."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 0, "acks": "all"})
    found = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        at = time.perf_counter()
        producer.produce("probe", _VALUE, partition=0)
        if producer.flush(_LATE_SECONDS):
            raise TimeoutError("a record of the probe was not acked")
        found.append(time.perf_counter() - at)
        time.sleep(0.02)
    return {"seconds": found}


def main() -> None:
    """Runs one load or one probe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--topics", type=int, default=0, help="0: the probe")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rate", type=float, default=0.0, help="records/s over all topics")
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    if asked.topics:
        found = load(
            asked.address,
            topics=asked.topics,
            partitions=asked.partitions,
            rate=asked.rate,
            seconds=asked.seconds,
        )
    else:
        found = probe(asked.address, seconds=asked.seconds)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
