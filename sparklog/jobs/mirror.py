"""Mirrors topics of a Kafka cluster, or of another log, into a log, with the same offsets.

    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0 jobs/mirror.py \\
        --from kafka://kafka:9092 --root s3://bucket/log --topics 'orders.*' --follow

A mirror contains the records of its source at their offsets, with the same gaps, and accepts no
others. The job keeps no state: its position is the target's end offsets. So it can be stopped at
any point, by any means, and the same command continues. `--verify` compares both sides, and
`--cutover` ends the mirror, so that producers and consumers can move.
"""

from __future__ import annotations

import contextlib
import enum
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors, limits
from sparklog.display import counted
from sparklog.formats import topic_config
from sparklog.jobs.mirroring.cutover import Cutover, Patience
from sparklog.jobs.mirroring.groups import GroupOffsets
from sparklog.jobs.mirroring.plan import Selection, named
from sparklog.jobs.mirroring.rounds import Mirror, Settings, SparkCopier
from sparklog.jobs.mirroring.sides import (
    KafkaSource,
    LateTimestamps,
    LogSource,
    Source,
    Target,
    kafka_connector,
)
from sparklog.jobs.mirroring.verify import verify
from sparklog.jobs.running import echo, run, spark_session
from sparklog.jobs.targets import in_seconds, root_for_spark
from sparklog.options import check_bootstrap, check_root
from sparklog.terminal.options import RootOption, config_pairs, root_metadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KAFKA: Final = "kafka://"
_SECRET: Final = re.compile(r"password|secret|jaas[.]config|keystore[.]key", re.IGNORECASE)
"""Options of Kafka's clients that belong in a file."""


class _Mode(enum.Enum):
    """The options that select an action; without one of them, a run copies once."""

    ONCE = ""
    FOLLOW = "--follow"
    DRY_RUN = "--dry-run"
    VERIFY = "--verify"
    CUTOVER = "--cutover"


SourceOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="SOURCE",
        help="The source: kafka://HOST:PORT,HOST:PORT, or the root of another log.",
        show_default=False,
    ),
]

TopicsOption = Annotated[
    str,
    typer.Option(
        metavar="REGEX",
        help="The topics: a regular expression that matches whole names, such as 'orders.*'.",
        show_default=False,
    ),
]

ExcludeOption = Annotated[
    str | None, typer.Option(metavar="REGEX", help="Topics to exclude.", show_default=False)
]

RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REGEX=NAME",
        help="The name of a topic here, with groups of the expression as \\1: '(.*)=eu.\\1'."
        " Repeat it for more; the first match counts.",
    ),
]

ConfigOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Configuration of the topics here, which overrides the source's, such as"
        " retention.ms=-1; repeat it for more.",
    ),
]

GroupsOption = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Copy the offsets of these consumer groups too. Default: none; for a cutover, all"
        " that have offsets in the topics.",
        show_default=False,
    ),
]

KafkaOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="An option of Kafka's Java clients, such as security.protocol=SASL_SSL; repeat it"
        " for more.",
    ),
]

KafkaPropertiesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="A file of such options, for secrets.",
        show_default=False,
    ),
]

FollowOption = Annotated[
    bool, typer.Option("--follow", help="Continue with new records, topics and partitions.")
]

VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="Compare count and hash of records on both sides, without copying."
    ),
]

CutoverOption = Annotated[
    bool,
    typer.Option(
        "--cutover", help="Copy the last records and the offsets of groups, and end the mirror."
    ),
]

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be copied, without copying.")
]

SkipDeletedOption = Annotated[
    bool,
    typer.Option(
        "--skip-deleted",
        help="Continue with a gap if the source has deleted records before they were copied.",
    ),
]

LateTimestampsOption = Annotated[
    LateTimestamps,
    typer.Option(
        metavar="refuse|clamp|skip",
        help="Kafka records with timestamps after the year 9999. refuse: name the first one,"
        " and skip its topic; clamp: write them with the last millisecond of that year;"
        " skip: leave a gap at their offsets.",
    ),
]

RoundRecordsOption = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="The maximum number of offsets that one write covers."),
]

RoundBytesOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="The target size of one write, estimated from those before it."
    ),
]

PatienceOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.0,
        help="How long to retry while a side does not answer; and how long a cutover waits"
        " for producers and consumers to stop.",
    ),
]

QuietOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.0,
        help="A cutover regards producers as stopped after this long without a new record.",
    ),
]


def mirror(
    source: SourceOption,
    topics: TopicsOption,
    root: RootOption = None,
    exclude: ExcludeOption = None,
    rename: RenameOption = None,
    config: ConfigOption = None,
    groups: GroupsOption = None,
    kafka_option: KafkaOption = None,
    kafka_properties: KafkaPropertiesOption = None,
    follow: FollowOption = False,
    do_verify: VerifyOption = False,
    cutover: CutoverOption = False,
    dry_run: DryRunOption = False,
    skip_deleted: SkipDeletedOption = False,
    late_timestamps: LateTimestampsOption = LateTimestamps.REFUSE,
    round_records: RoundRecordsOption = 2_000_000,
    round_bytes: RoundBytesOption = limits.GIB,
    patience: PatienceOption = 300.0,
    quiet: QuietOption = 2.0,
) -> None:
    """Mirrors topics of a Kafka cluster, or of another log, with the same offsets.

    Records keep offset, time, key, value and headers. A run copies what the source has when it
    starts; with --follow it continues. Run it again at any time: it starts where the topics end.

    Example: spark-submit jobs/mirror.py --from kafka://kafka:9092 --topics 'orders.*' --dry-run
    """
    mode = _mode(follow=follow, verify=do_verify, cutover=cutover, dry_run=dry_run)
    target_root = root_for_spark(root)
    settings = Settings(
        selection=Selection(
            topics=_expression("--topics", topics),
            exclude=None if exclude is None else _expression("--exclude", exclude),
            renames=[_rename(each) for each in rename or ()],
        ),
        config=topic_config.check(config_pairs(config or ())),
        round_records=round_records,
        round_bytes=round_bytes,
        patience_seconds=patience,
        skips_deleted=skip_deleted,
        cuts_over=mode is _Mode.CUTOVER,
    )
    pattern = _expression("--groups", groups or ".*")
    options = config_pairs(kafka_option or ())
    _warn_of_secrets(options)
    address = _kafka_address(source)
    root_metadata(target_root)
    spark = spark_session(
        "mirror", with_delta=False, packages=() if address is None else (kafka_connector(),)
    )
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(contextlib.closing(Target(target_root)))
        side: KafkaSource | LogSource = (
            LogSource(source)
            if address is None
            else KafkaSource(spark, address, options, kafka_properties, late_timestamps)
        )
        stack.enter_context(contextlib.closing(side))
        if side.cluster == f"sparklog:{target.cluster_id}":
            raise typer.BadParameter("a log cannot be mirrored into itself: change --from")
        group_offsets = GroupOffsets(side, target, pattern)
        copier = SparkCopier(spark, side, target)
        job = Mirror(copier, side, target, settings, groups=group_offsets if groups else None)
        if mode is _Mode.DRY_RUN:
            _show(job)
        elif mode is _Mode.VERIFY:
            ours = stack.enter_context(contextlib.closing(LogSource(target_root)))
            _verify(spark, side, ours, job, round_records)
        elif mode is _Mode.CUTOVER:
            waits = Patience(quiet_seconds=quiet, wait_seconds=patience)
            _cut_over(Cutover(job, side, target, group_offsets, waits), target)
        else:
            _copy(job, follow=mode is _Mode.FOLLOW)


def _mode(**given: bool) -> _Mode:
    chosen = [_Mode[name.upper()] for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise typer.BadParameter(f"pass {chosen[0].value} or {chosen[1].value}, not both")
    return chosen[0] if chosen else _Mode.ONCE


def _warn_of_secrets(options: Iterable[str]) -> None:
    if secrets := ", ".join(filter(_SECRET.search, options)):
        echo(
            "sparklog: process lists and Spark's event logs show the arguments of a program:"
            f" put {secrets} into the file of --kafka-properties"
        )


def _kafka_address(source: str) -> str | None:
    """Returns the address of the Kafka cluster to mirror; None if the source is a root.

    Raises `BadOption` for anything else, and what `root_metadata` raises.
    """
    if not source.startswith(_KAFKA):
        check_root("--from", source, f" Did you mean {_KAFKA}{source}?")
        root_metadata(source)
        return None
    address = source.removeprefix(_KAFKA)
    check_bootstrap("--from", address)
    return address


def _expression(option: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise errors.BadOption(option=option, value=text, reason=str(error)) from None


def _rename(text: str) -> tuple[re.Pattern[str], str]:
    pattern, equals, name = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--rename needs REGEX=NAME, not {text!r}")
    expression = _expression("--rename", pattern)
    try:
        expression.sub(name, "")
    except re.error as error:
        raise errors.BadOption(option="--rename", value=text, reason=str(error)) from None
    return expression, name


# ------------------------------------------------------------------------------ modes


def _copy(job: Mirror, *, follow: bool) -> None:
    began = time.perf_counter()
    try:
        if follow:
            job.follow()
        else:
            job.once()
    except KeyboardInterrupt:
        typer.echo(
            f"{counted(job.copied.records, 'record')}; stopped, the same command continues here"
        )
        raise
    seconds = time.perf_counter() - began
    if job.groups.ahead:
        echo(f"groups with offsets that are not here yet: {', '.join(job.groups.ahead)}")
    for name, why in job.groups.refused.items():
        echo(f"the offsets of group {name} were not copied: {why}")
    typer.echo(in_seconds(job.copied.records, seconds))
    _check(job)


def _check(job: Mirror) -> None:
    if job.faults:
        reason = f"not mirrored: {', '.join(job.faults)}; the reasons are above"
        raise errors.BadRequest(reason=reason)


def _show(job: Mirror) -> None:
    pairs = job.look()
    configs = job.configs(pairs)
    for pair in pairs:
        wanted, left = job.config_of(configs.get(pair.topic, {}))
        count = pair.source.count
        state = "to be created" if pair.target is None else "a mirror"
        if pair.target is not None and pair.target.origin is None:
            state = "to become a mirror"
        echo(
            f"{pair.topic} to {pair.name}, {state}, {counted(count, 'partition')}, lag {pair.lag:,}"
        )
        if wanted:
            echo(f"     {', '.join(f'{name}={value}' for name, value in wanted.items())}")
        if left:
            echo(f"     without {', '.join(left)}, which topics here do not support")
    lag = sum(pair.lag for pair in pairs)
    typer.echo(
        f"{counted(len(pairs), 'topic')}, {counted(lag, 'offset')} to copy; nothing was written,"
        " because of --dry-run"
    )
    _check(job)


def _verify(spark: SparkSession, source: Source, target: LogSource, job: Mirror, size: int) -> None:
    records, differ, unknown = 0, [], []
    for pair in job.pairs():
        if pair.source.leaderless:
            echo(f"{pair.topic}: {named(pair.source.leaderless)} no leader, and cannot be compared")
            unknown.append(pair.topic)
        if pair.target is None:
            echo(f"{pair.topic}: there is no topic {pair.name}")
            differ.append(pair.topic)
            continue
        found = verify(spark, source, target, pair, size)
        records += found.records
        for each in found.differences:
            echo(f"{pair.topic}: {each}")
        if found.differences:
            differ.append(pair.topic)
        else:
            same = f"{counted(found.records, 'record')} in {counted(found.ranges, 'range')}"
            echo(f"{pair.topic}: the same {same}, lag {pair.lag:,}")
    if differ:
        raise errors.BadRequest(reason=f"the two sides differ in {', '.join(differ)}")
    if unknown:
        reason = f"not all partitions were compared of {', '.join(unknown)}"
        raise errors.BadRequest(reason=reason)
    typer.echo(f"{counted(records, 'record is', 'records are')} the same on both sides")


def _cut_over(job: Cutover, target: Target) -> None:
    names = job.run()
    broker = target.log.status().broker
    address = broker.kafka or "(start a broker with --kafka HOST:PORT)"
    echo(f"5. switch clients of {', '.join(names)} to bootstrap.servers={address}")
    echo(f"   or, for native clients and Spark, to {target.root} or {broker.address}")
    typer.echo(f"{counted(len(names), 'topic was', 'topics were')} cut over")


def main() -> None:
    """The program."""
    run(mirror, "mirror")


if __name__ == "__main__":
    main()
