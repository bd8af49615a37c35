"""The metadata of a large cluster: bytes and times, on a local root without any broker."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from sparklog.bench.broker import FreshRoot
from sparklog.bench.report import BenchOptions, Measurement
from sparklog.clock import SystemClock
from sparklog.storage.metadata import format as metadata_format
from sparklog.storage.metadata.leadership import failover
from sparklog.storage.metadata.model import (
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    TopicMetadata,
)
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import open_store

_BROKERS: Final = 1_000
_TOPICS: Final = 10_000
_PARTITIONS: Final = 100
"""Partitions of each topic."""
_RUNS: Final = 5


def large_cluster(options: BenchOptions) -> Iterator[Measurement]:
    """1,000 brokers that lead a million partitions, and the failover of one of them."""
    with FreshRoot(options.folder) as root:
        store = open_store(str(root))
        meta = MetadataStore(store, clock=SystemClock())
        meta.change(lambda _: _cluster())
        while not any(stat.name.endswith(".snapshot") for stat in store.list_after("meta")):
            meta.change(lambda before: msgspec.structs.replace(before, controller=1))
        size = max(stat.size_bytes for stat in store.list_after("meta") if "snap" in stat.name)
        yield Measurement(
            name=f"snapshot of {_TOPICS:,} topics with {_PARTITIONS} partitions each",
            value=f"{size / 1e6:.2f} MB",
            target="≤ 4 MB",
            met=size <= 4_000_000,
        )
        # A separate process, to measure its memory; spawned, since a fork would share ours.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            seconds, grown = pool.submit(_bootstrap, root).result()
        yield Measurement(
            name="the same, read by a process that starts",
            value=f"{seconds:.2f} s, {grown / 1e6:.0f} MB of memory",
            target="≤ 2 s, ≤ 200 MB",
            met=seconds <= 2.0 and grown <= 200_000_000,
        )
        before = meta.refresh()
    after = _failover(before, dead=7)
    delta = metadata_format.delta_of(before, after)
    moved = sum(each.leaders.count(7) for each in before.topics.values())
    data = metadata_format.encode_delta(delta)
    best = min(_seconds_to_apply(before, data) for _ in range(_RUNS))
    yield Measurement(
        name=f"the failover of a broker that leads {moved:,} of them",
        value=f"{len(data) / 1e3:.1f} kB, applied in {best * 1e3:.1f} ms",
        target="≤ 40 kB, ≤ 5 ms",
        met=len(data) <= 40_000 and best <= 0.005,
    )


def _cluster() -> ClusterMetadata:
    chance = random.Random(1)
    topics = {
        f"topic-{number:05d}": TopicMetadata(
            topic_id=f"{chance.getrandbits(64):016x}",
            leaders=tuple(chance.randrange(_BROKERS) for _ in range(_PARTITIONS)),
            leader_epochs=tuple(chance.randrange(20) for _ in range(_PARTITIONS)),
        )
        for number in range(_TOPICS)
    }
    brokers = {
        number: BrokerRegistration(epoch=3, flight=f"broker-{number}.example:8815")
        for number in range(_BROKERS)
    }
    open_epochs = tuple(Epoch(number, 3) for number in range(_BROKERS))
    return ClusterMetadata(brokers=brokers, open_epochs=open_epochs, topics=topics, controller=0)


def _bootstrap(root: Path) -> tuple[float, int]:
    """Returns the seconds that a first read takes, and by how many bytes its peak memory grew."""
    before = _memory_bytes("VmRSS")
    began = time.perf_counter()
    found = MetadataStore(open_store(str(root)), clock=SystemClock()).reload()
    seconds = time.perf_counter() - began
    assert len(found.topics) == _TOPICS
    return seconds, _memory_bytes("VmHWM") - before


def _memory_bytes(field: str) -> int:
    """Reads a field of this process's status; `getrusage` would include the parent's peak size."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _failover(before: ClusterMetadata, dead: int) -> ClusterMetadata:
    """Distributes the partitions of `dead` over ten other brokers."""
    successors = {
        (name, number): 10 + number % 10
        for name, topic in before.topics.items()
        for number, leader in enumerate(topic.leaders)
        if leader == dead
    }
    after = failover(before, dead, epoch=3, sealed={(dead, 3)}, successors=successors)
    assert after is not None
    return msgspec.structs.replace(after, version=before.version + 1, change_id="failover")


def _seconds_to_apply(before: ClusterMetadata, data: bytes) -> float:
    began = time.perf_counter()
    found = metadata_format.decode_version(before.version + 1, data)
    assert isinstance(found, metadata_format.Delta)
    metadata_format.apply(before, found)
    return time.perf_counter() - began
