"""Consumers that tail one topic at 100 records/s: delay, the broker's CPU time, acks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.consumers.clients import TOPIC, tails
from benchmarks.kafka import clients
from benchmarks.kafka.sides import KafkaSetup, Ours, Theirs, measure
from benchmarks.processes import cpu_seconds
from benchmarks.progress import doing
from sparklog.bench.report import Measurement, Times

_RATE: Final = 100
_PATIENCE_SECONDS: Final = 30.0
_MOST_MS: Final = {1: None, 20: 6.0, 100: 15.0, 200: 30.0}
_MOST_CORES: Final = {1: 0.10, 20: 0.40}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    delays: Times
    acks: Times
    cores: float
    late: float
    """Share of the records not yet received a second after the last one was sent."""

    def __str__(self) -> str:
        return (
            f"{self.delays}; broker {100 * self.cores:.0f} % of a core, acks p50"
            f" {self.acks.ms(50):.2f} ms"
            + (f", {100 * self.late:.0f} % of the records late" if self.late > 0 else "")
        )


@measure
def kafka(bed: KafkaSetup) -> Iterator[Measurement]:
    """Kafka's consumers."""
    yield from _measured(bed, "kafka", [Ours, Theirs])


@measure
def native(bed: KafkaSetup) -> Iterator[Measurement]:
    """sparklog's own consumers."""
    yield from _measured(bed, "native", [Ours])


def _measured(
    bed: KafkaSetup, client: str, kinds: list[type[Ours | Theirs]]
) -> Iterator[Measurement]:
    theirs: dict[int, str] = {}
    found: dict[int, _Figures] = {}
    for kind in kinds:
        if kind not in bed.sides:
            continue
        with bed.one(kind) as side:
            clients.create(side.address, 1, TOPIC)
            for count in (0, *_MOST_MS):
                with doing(f"{count} {client} tails, {side.name}"):
                    address = side.address
                    if client == "native":
                        assert isinstance(side, Ours)
                        address = side.flight_address
                    figures = _one(side.address, client, address, count, side.pid, bed)
                if isinstance(side, Ours):
                    found[count] = figures
                else:
                    theirs[count] = str(figures)
    alone = found[0].acks.ms(50)
    for count, most_ms in _MOST_MS.items():
        figures = found[count]
        most_cores = _MOST_CORES.get(count)
        ratio = alone / figures.acks.ms(50)
        targets = [f"p50 ≤ {most_ms:g} ms"] if most_ms else []
        targets += [f"≤ {100 * most_cores:g} % of a core"] if most_cores else []
        is_met = (
            not figures.late
            and (most_ms is None or figures.delays.ms(50) <= most_ms)
            and (most_cores is None or figures.cores <= most_cores)
        )
        beside = f"; Kafka {theirs[count]}" if count in theirs else ""
        yield Measurement(
            name=f"{count} {client} tails of 100 records/s: sent until received",
            value=str(figures),
            target=", ".join(targets),
            met=is_met,
            detail=f"acks {ratio:.2f} × as fast as without{beside}",
        )


def _one(
    producer_address: str, client: str, address: str, count: int, pid: int, bed: KafkaSetup
) -> _Figures:
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {"bootstrap.servers": producer_address, "acks": "all", "linger.ms": 0}
    )

    def send(value: bytes) -> None:
        producer.produce(TOPIC, value, partition=0)
        if producer.flush(_PATIENCE_SECONDS):
            raise RuntimeError("a record was not acked")

    with ExitStack() as ending:
        reading = ending.enter_context(tails(client, address, count)) if count else None
        if reading is not None:
            reading.wait_until_ready(send)
        time.sleep(1.0)
        before, began = cpu_seconds(pid)[pid], time.monotonic()
        acks = _send_steadily(send, bed.options.seconds)
        cores = (cpu_seconds(pid)[pid] - before) / (time.monotonic() - began)
        time.sleep(1.0)
        delays = Times(reading.delays_seconds() if reading is not None else [0.0])
    late = 1 - len(delays.seconds) / (count * len(acks.seconds)) if count else 0.0
    return _Figures(delays=delays, acks=acks, cores=cores, late=late)


def _send_steadily(send: Callable[[bytes], None], seconds: float) -> Times:
    acks = Times()
    began = time.monotonic()
    for number in range(round(seconds * _RATE)):
        due = began + number / _RATE
        time.sleep(max(due - time.monotonic(), 0.0))
        sent = time.monotonic_ns()
        send(str(sent).encode())
        acks.add((time.monotonic_ns() - sent) / 1e9)
    return acks
