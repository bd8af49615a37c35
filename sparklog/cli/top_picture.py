"""The display of `sparklog top`: brokers' metrics as tables, with rates between two points in time.

A single broker is shown in detail. Several have one line each, and topics and groups cover all of
them: a topic is led by several brokers, so its counts are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from sparklog import bill_words
from sparklog.display import counted
from sparklog.formats.store_bill import joint_bill

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult

    from sparklog.formats.flight_messages import BrokerFigures
    from sparklog.formats.store_bill import StoreBill

_BETWEEN: Final = 2
"""The spaces between two columns."""
_LESS_IMPORTANT: Final = ("small", "size", "files", "partitions", "out/s", "in/s", "age")
"""Topic columns that a narrow terminal omits, in this order."""
_LESS_IMPORTANT_OF_BROKERS: Final = (
    "Flight", "unpublished", "loop p99", "flush p99", "leads", "out/s", "in/s", "clients",
)  # fmt: skip
_SILENT_SHOWN: Final = 4
_NONE: Final = "-"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A broker to show, and its answer."""

    broker: int
    state: str
    """As in `BrokerDescription`."""
    address: str = ""
    leads: int = 0
    """The partitions that it leads."""
    figures: BrokerFigures | None = None
    """None if it does not answer."""
    silence: str = ""
    """The reason why a broker that should answer does not."""


class _Run(NamedTuple):
    """Metrics of one run of a broker at two points in time. Each run counts from zero."""

    before: BrokerFigures
    now: BrokerFigures

    @property
    def seconds(self) -> float:
        return max((self.now.at_us - self.before.at_us) / 1e6, 1e-3)

    def rate(self, count: Callable[[BrokerFigures], int]) -> float:
        return _rate(count(self.before), count(self.now), self.seconds)


class _Topic:
    """A topic's rates and metrics, over all its leaders."""

    def __init__(self) -> None:
        self.partitions = 0
        self.records = self.bytes_in = self.bytes_out = 0.0
        self.lag_records = 0
        self.lag_seconds = 0.0
        self.files = self.small_files = self.table_bytes = 0
        self.is_held_back = False


def picture(
    before: Mapping[int, BrokerFigures], now: Sequence[Member], *, rows: int
) -> RenderableType:
    """Returns the metrics as tables, with at most `rows` topics and groups.

    `before` maps broker ids to earlier metrics; a broker that it lacks has no rates yet.
    """
    from rich.console import Group

    runs = {
        each.broker: _Run(_of_run(before.get(each.broker), each.figures), each.figures)
        for each in now
        if each.figures is not None
    }
    parts = [_summary(*runs.values())] if len(now) == len(runs) == 1 else _cluster(runs, now)
    parts.append(_topics([*runs.values()], rows))
    if any(run.now.groups for run in runs.values()):
        parts.append(_groups([*runs.values()], rows))
    return Group(*parts)


def _of_run(before: BrokerFigures | None, now: BrokerFigures) -> BrokerFigures:
    """Returns the earlier metrics if they are from the same run of the broker, else `now`."""
    if before is None or before.broker.epoch != now.broker.epoch:
        return now
    return before


def _rate(before: int, now: int, seconds: float) -> float:
    """Returns the rate of a count; a count that fell was reset by a broker restart."""
    return (now - before if now >= before else now) / seconds


# ------------------------------------------------------------------------------ brokers


def _summary(run: _Run) -> RenderableType:
    """Returns the lines of one broker."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now, broker = run.now, run.now.broker
    budget, share = _fullest(now)
    flushes = f"flushes {run.rate(lambda each: each.flushes):,.0f}/s, p50"
    flushes += f" {now.flush_p50_seconds * 1e3:.1f} ms, p99 {now.flush_p99_seconds * 1e3:.1f} ms"
    delay = f"loop delay p99 {now.loop_delay_p99_seconds * 1e3:.1f} ms"
    table = Table.grid(padding=(0, 3))
    for row in (
        (
            f"broker {broker.broker} ({broker.kind}) at {broker.address}",
            f"up {now.uptime_seconds:,.0f} s",
            _counts((now.topic_count, "topic"), (now.partition_count, "partition")),
            _counts((now.connections, "Kafka client"), (now.streams, "stream")),
        ),
        (
            f"in {run.rate(lambda each: each.records_in):,.0f} records/s",
            f"{_bytes(run.rate(lambda each: each.bytes_in))}/s",
            f"out {_bytes(run.rate(lambda each: each.bytes_out))}/s",
            flushes,
        ),
        (
            f"unpublished {_bytes(now.unpublished_bytes)}",
            f"amplification {now.amplification:.1f}",
            f"storage {run.rate(_requests):,.0f} operations/s",
            f"{delay}; fullest budget {budget} {share:.0%}",
        ),
    ):
        table.add_row(*row)
    if now.bill is None:
        return table
    return Group(table, Text(_bill_line(now.bill)))


def _cluster(runs: Mapping[int, _Run], now: Sequence[Member]) -> list[RenderableType]:
    """Returns a cluster's totals, a line per broker, and the reasons that some are silent."""
    from rich.text import Text

    found = [each.now for each in runs.values()]

    def total(count: Callable[[BrokerFigures], int]) -> float:
        return sum(run.rate(count) for run in runs.values())

    topics = max((each.topic_count for each in found), default=0)
    partitions = sum(each.partition_count for each in found)
    clients = sum(each.connections for each in found)
    streams = sum(each.streams for each in found)
    lines = [
        (
            f"{len(runs)} of {len(now)} brokers answer",
            _counts((topics, "topic"), (partitions, "partition")),
            _counts((clients, "Kafka client"), (streams, "stream")),
        ),
        (
            f"in {total(lambda each: each.records_in):,.0f} records/s",
            f"{_bytes(total(lambda each: each.bytes_in))}/s",
            f"out {_bytes(total(lambda each: each.bytes_out))}/s",
            f"unpublished {_bytes(sum(each.unpublished_bytes for each in found))}",
            f"storage {total(_requests):,.0f} operations/s",
        ),
    ]
    if found:
        (budget, share), broker = max(
            ((_fullest(each), each.broker.broker) for each in found), key=lambda pair: pair[0][1]
        )
        lines.append((f"fullest budget {budget} {share:.0%} of broker {broker}",))
    bill = joint_bill([each.bill for each in found if each.bill is not None])
    if bill is not None:
        lines.append((_bill_line(bill),))
    parts: list[RenderableType] = [Text("   ".join(line)) for line in lines]
    parts.append(_brokers(runs, now))
    silent = [each for each in now if each.silence]
    parts += [
        Text(f"broker {each.broker} does not answer: {each.silence}")
        for each in silent[:_SILENT_SHOWN]
    ]
    if len(silent) > _SILENT_SHOWN:
        parts.append(Text(f"and {len(silent) - _SILENT_SHOWN} more do not"))
    return parts


def _brokers(runs: Mapping[int, _Run], now: Sequence[Member]) -> RenderableType:
    from sparklog.storage.metadata.overview import SERVING

    headings = (
        "broker", "state", "leads", "records/s", "in/s", "out/s", "clients", "not in table",
        "unpublished", "flush p99", "loop p99", "Flight",
    )  # fmt: skip
    table = []
    for each in now:
        run = runs.get(each.broker)
        cells = [_NONE] * 8
        if run is not None:
            cells = [
                f"{run.rate(lambda each: each.records_in):,.0f}",
                _bytes(run.rate(lambda each: each.bytes_in)),
                _bytes(run.rate(lambda each: each.bytes_out)),
                f"{run.now.connections + run.now.streams:,}",
                f"{sum(topic.lag_records for topic in run.now.topics):,}",
                _bytes(run.now.unpublished_bytes),
                f"{run.now.flush_p99_seconds * 1e3:.1f} ms",
                f"{run.now.loop_delay_p99_seconds * 1e3:.1f} ms",
            ]
        state = "no answer" if each.silence and each.state in SERVING else each.state
        table.append((str(each.broker), state, f"{each.leads:,}", *cells, each.address or _NONE))
    return _Columns(headings, table, less_important=_LESS_IMPORTANT_OF_BROKERS)


def _bill_line(bill: StoreBill) -> str:
    """Returns what the object store costs at the requests of the last minute."""
    return f"{bill_words.requests(bill)}: {bill_words.monthly(bill)}"


def _requests(figures: BrokerFigures) -> int:
    return sum(figures.store_requests.values())


def _fullest(figures: BrokerFigures) -> tuple[str, float]:
    """Returns the memory budget with the highest share in use, and that share."""
    shares = {each.budget: each.held_bytes / max(each.limit_bytes, 1) for each in figures.memory}
    return max(shares.items(), key=lambda pair: pair[1])


# ------------------------------------------------------------------------------ topics, groups


def _topics(runs: Sequence[_Run], rows: int) -> RenderableType:
    topics: dict[str, _Topic] = {}
    for run in runs:
        earlier = {each.topic: each for each in run.before.topics}
        for each in run.now.topics:
            then = earlier.get(each.topic, each)
            topic = topics.setdefault(each.topic, _Topic())
            topic.partitions += each.partitions
            topic.records += _rate(then.records_in, each.records_in, run.seconds)
            topic.bytes_in += _rate(then.bytes_in, each.bytes_in, run.seconds)
            topic.bytes_out += _rate(then.bytes_out, each.bytes_out, run.seconds)
            topic.lag_records += each.lag_records
            topic.lag_seconds = max(topic.lag_seconds, each.lag_seconds)
            topic.files += each.files
            topic.small_files += each.small_files
            topic.table_bytes += each.table_bytes
            topic.is_held_back |= each.held_back
    shown = sorted(topics.items(), key=lambda pair: -pair[1].records)[:rows]
    headings = (
        "topic", "partitions", "records/s", "in/s", "out/s", "not in table", "age", "files",
        "small", "size", "",
    )  # fmt: skip
    table = [
        (
            name,
            f"{each.partitions:,}",
            f"{each.records:,.0f}",
            f"{_bytes(each.bytes_in)}",
            f"{_bytes(each.bytes_out)}",
            f"{each.lag_records:,}",
            f"{each.lag_seconds:.1f} s",
            f"{each.files:,}",
            f"{each.small_files:,}",
            _bytes(each.table_bytes),
            "held back" if each.is_held_back else "",
        )
        for name, each in shown
    ]
    return _Columns(headings, table, less_important=_LESS_IMPORTANT)


def _groups(runs: Sequence[_Run], rows: int) -> RenderableType:
    groups = sorted((each for run in runs for each in run.now.groups), key=lambda each: -each.lag)
    found = [
        (
            each.group,
            each.state,
            f"{each.members:,}",
            f"{each.lag:,}" if each.is_whole else f"at least {each.lag:,}",
            "" if each.lag_seconds is None else f"{each.lag_seconds:,.1f} s",
        )
        for each in groups[:rows]
    ]
    headings = ("group", "state", "members", "lag", "lag in seconds")
    return _Columns(headings, found, less_important=("members", "state", "lag in seconds"))


class _Columns:
    """A table that omits its less important columns if the terminal is too narrow.

    The first column, of names, is as wide as its longest text, or as the terminal allows.
    """

    def __init__(
        self,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        less_important: Sequence[str],
    ) -> None:
        """`less_important`: the headings to omit, in this order."""
        self._headings = headings
        self._rows = rows
        self._less_important = less_important

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len
        from rich.table import Table
        from rich.text import Text

        columns = [*zip(self._headings, *self._rows, strict=True)]
        kept = {column[0]: column for column in columns}
        widths = {column[0]: max(map(cell_len, column)) + _BETWEEN for column in columns}
        for heading in self._less_important:
            if sum(widths[each] for each in kept) <= options.max_width:
                break
            del kept[heading]
        table = Table(box=None, header_style="bold", padding=(0, _BETWEEN, 0, 0))
        for number, heading in enumerate(kept):
            is_name = number == 0
            justify: JustifyMethod = "left" if is_name else "right"
            table.add_column(heading, justify=justify, no_wrap=not is_name)
        for row in zip(*(column[1:] for column in kept.values()), strict=True):
            table.add_row(*map(Text, row))
        yield table


def _counts(*counts: tuple[int, str]) -> str:
    return ", ".join(counted(number, one) for number, one in counts)


def _bytes(size: float) -> str:
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError
