"""What a read was asked for: the options of Spark's Kafka source under their own names, and ours.

| option | default | meaning |
|---|---|---|
| `bootstrap` | | the address of a broker, `host:port`, where the root is out of reach |
| `subscribe` | | topics, separated by commas |
| `subscribePattern` | | a regular expression that the whole name of a topic matches |
| `assign` | | JSON of partitions: `{"flights": [0, 1]}` |
| `startingOffsets` | `latest`; batch: `earliest` | where a *new* query begins: `earliest`, `latest`, `group`, or JSON: `{"flights": {"0": 23, "1": -2}}`, where -2 is earliest and -1 latest |
| `group.id` | | with `startingOffsets` = `group`: the consumer group that has committed where to begin |
| `groupOffsetReset` | `earliest` | where it has committed nothing: `earliest`, `latest`, or `error` |
| `startingOffsetsByTimestamp` | | the same by time, in ms since 1970 UTC; goes before `startingOffsets` |
| `startingTimestamp` | | one time for all partitions; goes before both |
| `startingOffsetsByTimestampStrategy` | `error` | where no record is that late: `error`, or `latest` |
| `endingOffsets`, `endingOffsetsByTimestamp`, `endingTimestamp` | `latest` | where a batch ends, in the same forms |
| `maxOffsetsPerTrigger` | | most records in one micro-batch, shared among partitions by what waits |
| `minOffsetsPerTrigger` | | as many must wait before a micro-batch begins |
| `maxTriggerDelay` | `15m` | after so long it begins with fewer |
| `minPartitions` | by size | least number of tasks; where it is more than the partitions of a stream, these are cut |
| `maxRecordsPerPartition` | | most records of one task |
| `failOnDataLoss` | `true` | whether records that are gone end the query |
| `pollInterval` | object store, broker: `500ms`; folder: none | a stream looks no oftener for what is new |
| `commitToGroup` | | a stream commits its progress to this consumer group, so that its lag shows |
| `includeHeaders` | `false` | adds the column `headers` |
| `columns` | all but `headers` | only these columns: Spark never tells a Python source what it needs |
| `valueFormat` | `binary` | what `value` is: `binary`, `string`, or `json`, read as `valueSchema` says |
| `valueSchema` | | of the JSON objects, as DDL: `carrier STRING, delay INT` |
| `badValues` | `null` | what a value that cannot be read becomes: `null`; `column`, its bytes in `_corrupt`; or `error` |
"""  # noqa: E501 (a table)

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sparklog import errors, limits
from sparklog.options import BOOTSTRAP_VARIABLE, ROOT_VARIABLE, Options, check_bootstrap
from sparklog.sources import bounds, selection
from sparklog.sources.bounds import Bound, Start
from sparklog.sources.selection import Selection

CORRUPT: Final = "_corrupt"
COLUMNS: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "headers",
    CORRUPT,
)
"""Of a row, in the order of Spark's Kafka source."""

PARALLELISM_VARIABLE: Final = "SPARKLOG_PARALLELISM"
"""How many tasks the cluster runs at the same time, as `spark.executorEnv.SPARKLOG_PARALLELISM`."""

_WHERE: Final = 'the source format("sparklog")'
_ENDING: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_TRIGGERS: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_KNOWN: Final = (
    "bootstrap",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "group.id",
    "groupOffsetReset",
    "startingOffsetsByTimestamp",
    "startingTimestamp",
    "startingOffsetsByTimestampStrategy",
    *_ENDING,
    *_TRIGGERS,
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "pollInterval",
    "commitToGroup",
    "includeHeaders",
    "columns",
    "valueFormat",
    "valueSchema",
    "badValues",
)
_OF_KAFKA: Final = (
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "useDeprecatedOffsetFetching",
)
"""Options of Spark's Kafka source about its Kafka client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the log is: a root and the options of its store, or a broker's address."""

    root: str | None = None
    storage: tuple[tuple[str, str], ...] = ()
    bootstrap: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of one read, checked. What was not given, and has no default, is None."""

    place: Place
    selection: Selection
    starting: Start | None
    ending: Bound | None
    late_start_is_latest: bool
    """A start by time that no record reaches: whether it means the end, or is refused."""
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_seconds: float
    parallelism: int
    """How many tasks Spark runs at the same time, as far as anybody told."""
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    poll_interval_seconds: float | None
    commit_to_group: str | None
    columns: tuple[str, ...]
    value_format: str
    value_schema: str | None
    bad_values: str
    of_stream: tuple[str, ...]
    """Options given that only a stream heeds."""
    of_batch: tuple[str, ...]
    """Options given that only a batch may have."""
    moved: str | None
    """What to tell a query that came from Spark's Kafka source."""

    def check_batch(self) -> None:
        """Raises `BadOption` for a range that cannot hold a record, and what only a stream does."""
        bounds.check_start_of_batch(self.starting)
        bounds.check_end_of_batch(self.ending)
        if self.commit_to_group is not None:
            reason = "a batch is read as often as it is evaluated, and never done; a stream commits"
            raise _bad("commitToGroup", self.commit_to_group, reason)

    def check_stream(self, *, has_limits: bool = True) -> None:
        """Raises `BadOption` for what only a batch has, and for limits where Spark knows none."""
        for option in self.of_batch:
            reason = "a stream has no end; to read what there is, trigger(availableNow=True)"
            raise _bad(option, "set", reason)
        if self.of_stream and not has_limits:
            raise _bad(self.of_stream[0], "set", "a Python source has limits since pyspark 4.2")

    def batch_notes(self) -> list[str]:
        """What a batch's user should be told, a line each."""
        notes = [] if self.moved is None else [self.moved]
        if self.of_stream:
            notes.append(f"a batch has no triggers: {', '.join(self.of_stream)} has no effect")
        return notes

    def stream_notes(self) -> list[str]:
        """What a stream's user should be told, a line each."""
        return [] if self.moved is None else [self.moved]


def parse(given: Mapping[str, str]) -> SourceOptions:
    """Raises `UnknownOption`, `BadOption`, `BadTopicName`."""
    options = Options(_WHERE, given, _KNOWN, kafka=_OF_KAFKA)
    most, least = options.count("maxOffsetsPerTrigger"), options.count("minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        reason = f"no micro-batch may have more than maxOffsetsPerTrigger = {most}"
        raise _bad("minOffsetsPerTrigger", least, reason)
    value_format, bad_values = _value(options)
    delay_seconds = options.seconds("maxTriggerDelay")
    strategy = options.one_of("startingOffsetsByTimestampStrategy", ("error", "latest"))
    return SourceOptions(
        place=_place(options),
        selection=selection.parse(options),
        starting=bounds.starting(options),
        ending=bounds.ending(options),
        late_start_is_latest=strategy == "latest",
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_seconds=(
            limits.MAX_TRIGGER_DELAY_SECONDS if delay_seconds is None else delay_seconds
        ),
        parallelism=_parallelism(),
        min_partitions=options.count("minPartitions"),
        max_records_per_partition=options.count("maxRecordsPerPartition"),
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        poll_interval_seconds=options.seconds("pollInterval"),
        commit_to_group=_group(options),
        columns=_columns(options, with_corrupt=bad_values == "column"),
        value_format=value_format,
        value_schema=options.get("valueSchema"),
        bad_values=bad_values,
        of_stream=tuple(name for name in _TRIGGERS if options.get(name) is not None),
        of_batch=tuple(name for name in _ENDING if options.get(name) is not None),
        moved=options.moved,
    )


def _place(options: Options) -> Place:
    """An option goes before the environment, and there a root before an address."""
    bootstrap, root = options.get("bootstrap"), options.named_root
    if bootstrap is not None:
        if root is not None or options.names_storage:
            raise _bad("bootstrap", bootstrap, "read by the root, or by a broker: set only one")
        return Place(bootstrap=check_bootstrap("bootstrap", bootstrap))
    if root is None and not os.environ.get(ROOT_VARIABLE):
        found = os.environ.get(BOOTSTRAP_VARIABLE)
        if found:
            return Place(bootstrap=check_bootstrap(BOOTSTRAP_VARIABLE, found))
    return Place(root=options.root, storage=tuple(sorted(options.storage.items())))


def _parallelism() -> int:
    """Spark tells a planner neither its executors nor its configuration, only its environment."""
    told = os.environ.get(PARALLELISM_VARIABLE)
    if told is None:
        return os.cpu_count() or 1
    if not told.isascii() or not told.isdecimal() or int(told) < 1:
        raise _bad(PARALLELISM_VARIABLE, told, "expected a number from 1 up")
    return int(told)


def _group(options: Options) -> str | None:
    group = options.get("commitToGroup")
    if group is not None and not group.strip():
        raise _bad("commitToGroup", group, "expected the name of a consumer group")
    return group


def _columns(options: Options, *, with_corrupt: bool) -> tuple[str, ...]:
    with_headers = options.flag("includeHeaders", default=False)
    extra = {"headers": with_headers, CORRUPT: with_corrupt}
    names = options.names("columns")
    if not names:
        return tuple(name for name in COLUMNS if extra.get(name, True))
    options.refuse("includeHeaders", "columns are named already; name headers among them")
    for name in names:
        if name not in COLUMNS or (name == CORRUPT and not with_corrupt):
            there = ", ".join(each for each in COLUMNS if each != CORRUPT or with_corrupt)
            raise _bad("columns", name, f"a row has {there}")
    if CORRUPT in names and "value" not in names:
        raise _bad("columns", CORRUPT, "name value too: these are the values that it could not be")
    return names


def _value(options: Options) -> tuple[str, str]:
    """Checked `valueFormat` and `badValues`."""
    kind = options.one_of("valueFormat", ("binary", "string", "json"))
    if kind == "json" and not options.get("valueSchema"):
        reason = "valueFormat = json needs the fields, such as 'carrier STRING, delay INT'"
        raise _bad("valueSchema", options.get("valueSchema"), reason)
    if kind != "json":
        options.refuse("valueSchema", "only valueFormat = json has one")
    if kind == "binary":
        options.refuse("badValues", "bytes are never bad; set valueFormat")
    return kind, options.one_of("badValues", ("null", "column", "error"))


def _bad(option: str, value: object, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
