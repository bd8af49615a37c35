"""Options, results and display of measurements."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A rate of records, and the brokers that take them."""

    topics: int
    partitions: int = 4
    """The number of partitions of each topic."""
    records_per_second: float = 10.0
    """The rate of each topic."""
    record_bytes: int = 100
    brokers: int = 1

    @property
    def bytes_per_second(self) -> float:
        """The rate of all topics together."""
        return self.topics * self.records_per_second * self.record_bytes

    def __str__(self) -> str:
        rate = self.records_per_second
        records = f"{rate:,.0f}" if rate >= 10 or rate == int(rate) else f"{rate:g}"
        text = f"{self.topics:,} × {self.partitions} partitions, {records} records/s"
        text += " each" if self.topics > 1 else ""
        text += f" of {self.record_bytes:,} bytes" if self.record_bytes != 100 else ""
        return text + (f", {self.brokers} brokers" if self.brokers > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Lower values shorten a run, for a quick check; figures to quote use the defaults."""

    folder: Path
    """Folder for roots, on the disk to measure."""
    seconds: float = 10.0
    rows: int = 20_000_000
    versions: int = 5_000
    workload: Workload | None = None
    """The workload of the measure `cost`; None: the documented cases."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings of the brokers of `cost` that are not the defaults, by dotted name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the report: `target` is the expected value, `met` whether it was reached."""

    name: str
    value: str
    target: str = ""
    met: bool | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of one run, as stored in a file."""

    machine: str
    command: str
    figures: tuple[Measurement, ...]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Report:
        return _report_decoder.decode(data)


_report_decoder = msgspec.json.Decoder(Report)


@dataclass(slots=True)
class Times:
    """Durations in seconds, shown as milliseconds."""

    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def ms(self, percentile: float) -> float:
        """The percentile in milliseconds."""
        return float(np.percentile(np.array(self.seconds), percentile)) * 1e3

    def __str__(self) -> str:
        return f"p50 {self.ms(50):.2f}, p99 {self.ms(99):.2f}, max {self.ms(100):.1f} ms"


def machine() -> str:
    """This machine in one line; figures mean nothing without it."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} × {_processor()}, {memory_gib:.0f} GiB, {platform.system()}"
        f" {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def markdown(figures: Iterable[Measurement]) -> str:
    """The report as a Markdown table for the docs."""
    rows = ["| what | at least | measured | |", "|---|---|---|---|"]
    for each in figures:
        mark = {True: "✓", False: "✗", None: ""}[each.met]
        detail = f" ({each.detail})" if each.detail else ""
        rows.append(f"| {each.name} | {each.target} | {each.value}{detail} | {mark} |")
    return "\n".join(rows)


def percent(part: Sequence[float], whole: float) -> str:
    """The sum of `part` as a percentage of `whole`, for display."""
    return f"{100 * sum(part) / whole:.1f} %"
