"""`sparklog status`: shows the broker of a log and the state of its topics."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog.display import counted
from sparklog.listeners import parse
from sparklog.options import check_bootstrap, storage_options
from sparklog.terminal.commands import ExitCode
from sparklog.terminal.options import BootstrapOption, JsonOption, RootOption, log_target

if TYPE_CHECKING:
    from sparklog.formats.flight_messages import HeldBack, KeptRecords
    from sparklog.status import StatusReport
    from sparklog.storage.metadata.liveness import Leader

_TOPICS_SHOWN: Final = 20
_WORDS: Final = {
    "served": "served",
    "silent": "a broker is alive but does not answer requests from here",
    "stopped": "no broker; the last one shut down cleanly",
    "died": "no broker; the last one crashed, and the next one recovers",
    "never": "no broker yet",
}


class Requirement(enum.StrEnum):
    KAFKA = "kafka"


def status(
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    require: Annotated[
        Requirement | None,
        typer.Option(
            metavar="kafka",
            help="Exit with 3 if no Kafka listener of the log answers, as when only a program's"
            " embedded broker serves it.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the brokers of a log and the state of its topics.

    The command starts no broker. Exits with 0 if the log is served and all topics can be published,
    with 3 if topics are held back, records remain that should be deleted, a broker refuses work or
    does not answer, or a requirement is not met, and with 4 if there is no broker. With --root it
    queries all brokers, with --bootstrap the one at that address. On an object store it also shows
    the requests of the last minute, and what they would cost in a month.

    Example: sparklog status --root ./data
    """
    import msgspec

    root, bootstrap = log_target(root, bootstrap)
    report = _report(root, bootstrap)
    if require is Requirement.KAFKA:
        from sparklog.status import requiring_kafka

        report = requiring_kafka(report)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        for name, words in _lines(report):
            typer.echo(f"{name:<12} {words}")
    raise typer.Exit(_exit_code(report))


def _report(root: str | None, bootstrap: str | None) -> StatusReport:
    from sparklog.clock import SystemClock
    from sparklog.status import of_address, of_root
    from sparklog.storage.metadata.liveness import describe
    from sparklog.storage.objects import open_store

    if bootstrap is not None:
        return of_address(check_bootstrap("bootstrap", bootstrap))
    assert root is not None
    clock = SystemClock()

    def waits(leader: Leader, seconds: float) -> None:
        broker = describe(leader, now_us=clock.now_us())
        waiting = f"waiting up to {seconds:g} s to see whether {broker} is alive"
        typer.echo(f"sparklog: {waiting}", err=True)

    return of_root(open_store(root, storage_options(root)), clock, waits=waits)


def _exit_code(report: StatusReport) -> ExitCode:
    if report.state == "served":
        troubles = (report.held_back, report.reason, report.refused, report.kept_records)
        return ExitCode.UNHEALTHY if any((*troubles, report.unmet)) else ExitCode.OK
    return ExitCode.UNHEALTHY if report.state == "silent" else ExitCode.NO_BROKER


def _lines(report: StatusReport) -> list[tuple[str, str]]:
    lines = [
        ("root", report.root),
        ("cluster", report.cluster_id),
        ("state", _state(report)),
    ]
    if report.brokers > 1:
        lines.append(("brokers", f"{report.brokers} answer"))
    broker = report.broker
    if broker is not None:
        about = f"{broker.broker} ({broker.kind}, epoch {broker.epoch})"
        lines += [
            ("broker", f"{about}, version {broker.version}" if broker.version else about),
            ("process", f"pid {broker.pid} on host {broker.host}" + _age(report)),
            ("Flight", broker.flight_listeners or broker.address),
            ("Kafka", broker.kafka_listeners or broker.kafka or "closed"),
            ("metrics", "".join(each.url for each in parse(broker.metrics)) or "closed"),
            ("log", broker.log or "standard error of the process"),
            ("WAL", broker.wal or "unknown"),
        ]
    if report.unmet:
        lines.append(("required", report.unmet))
    lines += [("refused", f"{each.work}: {each.reason}") for each in report.refused]
    lines.append(("topics", f"{report.topics}, of {report.partitions} partitions"))
    if report.unpublished_bytes is not None:
        lines.append(("unpublished", f"{report.unpublished_bytes:,} bytes"))
    lines += _of_registries(report)
    lines += _of_bill(report)
    lines += _of_topics("held back", "", report.held_back)
    lines += _of_topics("refused", "deletions of ", report.kept_records)
    return lines


def _of_registries(report: StatusReport) -> Iterator[tuple[str, str]]:
    from sparklog.client.times import utc

    waiting: dict[str, int] = {}
    for url in dict.fromkeys(each.url for each in report.registries):
        of_url = [each for each in report.registries if each.url == url]
        down = [each for each in of_url if each.down_since_us]
        if not down:
            yield "registry", url
        else:
            since = utc(min(each.down_since_us for each in down)).isoformat(timespec="seconds")
            yield "registry", f"{url} has given no answer since {since}: {down[0].reason}"
    for found in report.registries:
        waiting |= {topic.topic: topic.records for topic in found.waiting}
    for topic, records in waiting.items():
        yield "waiting", f"{topic}: {counted(records, 'record')} for a schema of the registry"
    for number in sorted({each for found in report.registries for each in found.conflicts}):
        yield "waiting", f"schema {number}: the registry has another text than the root"


def _of_bill(report: StatusReport) -> Iterator[tuple[str, str]]:
    """Yields the requests to an object store in the last minute, and what they cost."""
    from sparklog import bill_words
    from sparklog.formats.store_bill import joint_bill

    bill = joint_bill(report.bills)
    if bill is not None:
        yield "requests", bill_words.requests(bill)
        shares = bill_words.purposes(bill)
        yield "bill", bill_words.monthly(bill) + (f": {shares}" if shares else "")


def _of_topics(
    name: str, what: str, topics: Sequence[HeldBack | KeptRecords]
) -> Iterator[tuple[str, str]]:
    """Yields a line for each of the first topics, and one for the rest."""
    for each in topics[:_TOPICS_SHOWN]:
        yield name, f"{what}{each.topic}: {each.reason}"
    if len(topics) > _TOPICS_SHOWN:
        more = f"{len(topics) - _TOPICS_SHOWN} more topics"
        yield name, f"{what}{more}" if what else f"and {more}"


def _state(report: StatusReport) -> str:
    words = _WORDS[report.state]
    if not report.reason:
        return words
    joint = ", but not by" if report.state == "served" else ":"
    return f"{words}{joint} {report.reason}"


def _age(report: StatusReport) -> str:
    from sparklog.storage.metadata.liveness import age

    if report.uptime_seconds is None:
        return ""
    return f", started {age(round(report.uptime_seconds * 1e6))} ago"
