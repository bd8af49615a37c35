"""Generates records at a given rate, to find out how large a broker has to be.

    python -m sparklog.jobs.load --bootstrap broker:8815 --topic load --partitions 8 --rate 20000 \\
        --size 200-2000 --keys 100000 --zipf 1.1 --seconds 300

It needs no Spark. Several processes, on several machines, can create a load that one cannot.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sparklog import limits
from sparklog.display import counted
from sparklog.jobs.running import echo, run
from sparklog.jobs.targets import PartitionsOption, TargetTopicOption
from sparklog.terminal.commands import ExitCode
from sparklog.terminal.options import BootstrapOption, JsonOption, RootOption, WaitOption, open_log

if TYPE_CHECKING:
    from sparklog import errors
    from sparklog.client.producer.batch import OnDelivery, RecordMetadata
    from sparklog.client.producer.producer import Producer

_SIZES: Final = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_BLOCK: Final = 8_192
"""Number of keys and sizes that are drawn at a time."""
_POOL_BYTES: Final = 2**22
_TICK_SECONDS: Final = 0.002
_SAMPLE_SECONDS: Final = 0.005
"""Minimum time between two records whose acks are timed."""
_AT_ONCE: Final = 1_000
_BAR_SECONDS: Final = 0.1
_LINE_SECONDS: Final = 10.0
_PATIENCE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Keys and values of the records."""

    sizes: tuple[int, int]
    """The smallest and the largest value, in bytes."""
    keys: int
    """The number of different keys; 0: the records have none."""
    zipf: float
    """The exponent of their distribution; 0: all are equally frequent."""


def records(shape: Shape, seed: int) -> Iterator[tuple[bytes | None, bytes]]:
    """Yields keys and values endlessly, the same for the same seed.

    The key of rank r has a share proportional to 1 / r ** zipf. Values are random bytes, which do
    not compress.
    """
    chance = np.random.default_rng(seed)
    least, most = shape.sizes
    pool = chance.bytes(_POOL_BYTES + most)
    shares = np.arange(1, shape.keys + 1, dtype=np.float64) ** -shape.zipf
    borders = np.cumsum(shares / shares.sum()) if shape.keys else None
    while True:
        sizes = chance.integers(least, most, _BLOCK, endpoint=True).tolist()
        starts = chance.integers(0, _POOL_BYTES, _BLOCK).tolist()
        keys: list[bytes | None] = [None] * _BLOCK
        if borders is not None:
            ranks = np.searchsorted(borders, chance.random(_BLOCK)).tolist()
            keys = [b"key-%d" % min(rank, shape.keys - 1) for rank in ranks]
        for key, start, size in zip(keys, starts, sizes, strict=True):
            yield key, pool[start : start + size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of a run."""

    records: int
    """Records with an ack."""
    bytes: int
    failed: int
    seconds: float
    """From the first record until all were acked or had failed."""
    ack_ms: dict[str, float]
    """Times from `send` to the ack, of a sample: p50, p99 and max; empty if nothing was acked."""

    def __str__(self) -> str:
        text = (
            f"{counted(self.records, 'record')} in {self.seconds:.1f} s"
            f" ({self.records / self.seconds:,.0f} records/s,"
            f" {self.bytes / self.seconds / 1e6:,.1f} MB/s)"
        )
        if self.ack_ms:
            found = ", ".join(f"{name} {value:.2f}" for name, value in self.ack_ms.items())
            text += f", acks {found} ms"
        return text + (f"; {self.failed:,} failed" if self.failed else "")


class _AckTimes:
    """Ack times of a sample of the records, in seconds."""

    def __init__(self) -> None:
        self._seconds = array("d")

    def timer(self) -> OnDelivery:
        """Returns the callback for a record that is sent now."""
        sent = time.perf_counter()

        def acked(error: errors.SparklogError | None, _: RecordMetadata | None) -> None:
            if error is None:
                self._seconds.append(time.perf_counter() - sent)

        return acked

    def summary(self) -> dict[str, float]:
        if not self._seconds:
            return {}
        found = 1e3 * np.frombuffer(self._seconds)
        p50, p99 = np.percentile(found, [50, 99])
        return {"p50": float(p50), "p99": float(p99), "max": float(found.max())}


def drive(
    producer: Producer,
    topic: str,
    shape: Shape,
    *,
    rate: float | None,
    seconds: float,
    seed: int,
    on_tick: Callable[[float, int], None],
) -> Outcome:
    """Sends records for this many seconds, and waits until they are acked.

    Args:
        rate: records per second; None: as many as the broker accepts.
        on_tick: called often, with the seconds and the records since the start.

    Raises what `send` raises, and `StillSending` if the last acks do not arrive within a minute.
    """
    made = records(shape, seed)
    times = _AckTimes()
    sent, next_sample = 0, 0.0
    began = time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        on_tick(now, sent)
        due = _AT_ONCE if rate is None else int(now * rate) - sent
        for number, (key, value) in enumerate(itertools.islice(made, due)):
            if number == 0 and now >= next_sample:
                next_sample = now + _SAMPLE_SECONDS
                producer.send(topic, value, key=key, on_delivery=times.timer())
            else:
                producer.send(topic, value, key=key)
        sent += max(due, 0)
        if rate is not None:
            time.sleep(_TICK_SECONDS)
    producer.flush(_PATIENCE_SECONDS)
    found = producer.statistics()
    return Outcome(
        records=found.records,
        bytes=found.bytes,
        failed=found.errors,
        seconds=time.perf_counter() - began,
        ack_ms=times.summary(),
    )


# ------------------------------------------------------------------------------ the job


def load(
    topic: TargetTopicOption,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
    partitions: PartitionsOption = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="RECORDS",
            min=0.1,
            help="Records per second. Default: as many as the broker accepts.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to send.")
    ] = 10.0,
    size: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Size of a value: a number, or a range: 200-2000."),
    ] = "100",
    keys: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=10_000_000, help="Number of different keys; 0: none."),
    ] = 0,
    zipf: Annotated[
        float,
        typer.Option(
            metavar="EXPONENT",
            min=0.0,
            help="The key of rank r has a share proportional to 1 / r ** EXPONENT; with 0, all are"
            " equally frequent.",
        ),
    ] = 0.0,
    linger_ms: Annotated[
        float,
        typer.Option(metavar="MS", min=0.0, help="How long a record may wait for its batch."),
    ] = limits.PRODUCER_LINGER_MS,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of keys and values.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Sends generated records, and reports throughput and ack times.

    At most 200 acks per second are timed. With --rate, a broker that is too slow shows in the
    number of records per second.

    Example: python -m sparklog.jobs.load --topic load --partitions 4 --rate 1000
    """
    shape = Shape(sizes=_sizes(size), keys=keys, zipf=zipf)
    with open_log(root, bootstrap, wait, create=True) as log:
        if partitions is not None:
            log.create_topic(topic, partitions, if_absent=True)
        log.describe(topic)
        with log.producer(linger_ms=linger_ms) as producer, _shown(seconds) as on_tick:
            outcome = drive(
                producer, topic, shape, rate=rate, seconds=seconds, seed=seed, on_tick=on_tick
            )
    if as_json:
        typer.echo(msgspec.json.encode(outcome).decode())
    else:
        typer.echo(f"{topic}: {outcome}")
    if outcome.failed:
        raise typer.Exit(ExitCode.FAILED)


def _sizes(text: str) -> tuple[int, int]:
    found = _SIZES.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"expected a number of bytes, or a range: 200-2000, not {text!r}")
    least, most = int(found[1]), int(found[2] or found[1])
    if not least <= most <= limits.MAX_RECORD_BYTES:
        raise typer.BadParameter(
            f"a value is at most {limits.MAX_RECORD_BYTES:,} bytes; the smaller number comes first"
        )
    return least, most


@contextlib.contextmanager
def _shown(seconds: float) -> Iterator[Callable[[float, int], None]]:
    """Yields the function that shows progress: a bar on a terminal, otherwise occasional lines."""
    columns = (BarColumn(), TextColumn("{task.fields[sent]:,} records"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=seconds, sent=0)
        shown = 0.0

        def show(now: float, sent: int) -> None:
            nonlocal shown
            if console.is_terminal and now - shown >= _BAR_SECONDS:
                shown = now
                bar.update(task, completed=now, sent=sent)
            elif not console.is_terminal and now - shown >= _LINE_SECONDS:
                shown = now
                echo(f"{counted(sent, 'record')} in {now:.0f} s")

        yield show


def main() -> None:
    """The program."""
    run(load, "load", needs_spark=False)


if __name__ == "__main__":
    main()
