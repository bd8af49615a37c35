"""Options of a read: those of Spark's Kafka source under the same names, and our own.

| option | default | meaning |
|---|---|---|
| `bootstrap` | | a broker's address, `host:port`, or `tls://host:port` if it uses TLS, if the root is out of reach |
| `ca` | `SPARKLOG_CLIENT_CA` | with `bootstrap`: a PEM file of the driver with the CA of the brokers; tasks get its content |
| `user` | `SPARKLOG_CLIENT_USER` | with `bootstrap`: the user that the driver logs in as; tasks get a token that only reads records |
| `passwordFile` | `SPARKLOG_CLIENT_PASSWORD_FILE` | a file of the driver with the user's password |
| `tokenFile` | `SPARKLOG_CLIENT_TOKEN_FILE` | instead of `user`: a file of the driver with a token of an OAuth issuer |
| `subscribe` | | topics, separated by commas |
| `subscribePattern` | | a regular expression that the whole name of a topic matches |
| `assign` | | JSON of partitions: `{"flights": [0, 1]}` |
| `startingOffsets` | `latest`; batch: `earliest` | where a *new* query begins: `earliest`, `latest`, `group`, `-100` for the last 100 offsets of each partition, or JSON: `{"flights": {"0": 23, "1": -2}}`, where -2 is earliest and -1 latest, or as in a query's checkpoint, `{"flights": {"id": "5f0c…", "offsets": {"0": 23, "1": 40}}}`, valid only for the topic with that id |
| `group.id` | | with `startingOffsets` = `group`: the consumer group whose committed offsets are the start |
| `groupOffsetReset` | `earliest` | the start of partitions without a committed offset: `earliest`, `latest`, or `error` |
| `startingOffsetsByTimestamp` | | the start by time: ms since 1970 UTC, ISO 8601, or `10 minutes ago`; takes precedence over `startingOffsets` |
| `startingTimestamp` | | one time for all partitions; takes precedence over both |
| `startingOffsetsByTimestampStrategy` | `error` | if no record is that late: `error`, or `latest` |
| `endingOffsets`, `endingOffsetsByTimestamp`, `endingTimestamp` | `latest` | where a batch ends, in the same forms |
| `maxOffsetsPerTrigger` | | maximum number of records in a micro-batch, shared among partitions in proportion to their backlog |
| `maxBytesPerTrigger` | | approximate maximum size of a micro-batch in bytes, as stored in the table and the write-ahead log, such as `64m`; not with `bootstrap` |
| `minOffsetsPerTrigger` | | number of waiting records that triggers a micro-batch |
| `maxTriggerDelay` | `15m` | time after which a micro-batch starts with fewer |
| `minPartitions` | by size | minimum number of tasks; a stream with fewer partitions splits them |
| `maxRecordsPerPartition` | | maximum number of records in a task |
| `failOnDataLoss` | `true` | whether lost records end the query |
| `pollInterval` | object store, broker: `500ms`; folder: none | minimum time between two polls of a stream for new records |
| `commitToGroup` | | a stream commits its progress to this consumer group, so that its lag is visible |
| `includeHeaders` | `false` | adds the column `headers` |
| `rows` | `records` | rows of a stream: `records`, or `ranges`: the offsets of each micro-batch, for `sources.foreach_dataframe` |
| `columns` | all but `headers` | only these columns: Spark does not pass a query's columns to a Python source |
| `valueFormat` | `binary` | type of `value`: `binary`, `string`, or `json`, a struct of `valueSchema`; `typed`: the topic's typed columns follow the others |
| `valueSchema` | | fields of the JSON objects, as DDL: `carrier STRING, delay INT` |
| `badValues` | `null` | result for a value that cannot be decoded: `null`; `column`, its bytes in `_corrupt`; or `error` |
"""  # noqa: E501 (a table)

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sparklog import errors
from sparklog.clock import Clock, SystemClock
from sparklog.options import BOOTSTRAP_VARIABLE, ROOT_VARIABLE, ConnectorOptions, check_bootstrap
from sparklog.security.credentials import VARIABLES, Security
from sparklog.sources import selection, starting_offsets
from sparklog.sources.selection import Selection
from sparklog.sources.starting_offsets import Bound, Start
from sparklog.sources.task_credentials import TaskCredentials

_MAX_TRIGGER_DELAY_SECONDS = 15 * 60.0

CORRUPT: Final = "_corrupt"
TYPED: Final = "typed"
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
"""Columns of a row, in the order of Spark's Kafka source."""

PARALLELISM_VARIABLE: Final = "SPARKLOG_PARALLELISM"
"""Number of concurrent tasks of the cluster, set as `spark.executorEnv.SPARKLOG_PARALLELISM`."""

FOLDERS_VARIABLE: Final = "SPARKLOG_CREDENTIAL_FOLDERS"
"""The folders of the driver whose files options may name, separated as in PATH; unset: all.

For a driver that several people share: it can read files that they cannot, and its login sends
their content, or a proof of it, to a broker that they choose."""

_WHERE: Final = 'the source format("sparklog")'
_ENDING: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_TRIGGERS: Final = (
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
)
_SECURITY: Final = {
    "ca": "ca",
    "user": "user",
    "passwordFile": "password_file",
    "tokenFile": "token_file",
}
"""Fields of `Security`, by the option that sets them."""
_FILES: Final = ("ca", "passwordFile", "tokenFile")
"""Those of them that name files."""
_KNOWN: Final = (
    "bootstrap",
    *_SECURITY,
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
    "rows",
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
"""Options of Spark's Kafka source that concern its Kafka client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLocation:
    """Location of a log: a root with the options of its store, or a broker's address."""

    root: str | None = None
    storage: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    bootstrap: str | None = None
    security: Security | None = None
    """For brokers; names files of the driver. None: that of the environment."""
    task_credentials: TaskCredentials | None = field(default=None, repr=False)
    """Sent with a task; None on the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Validated options of one read. An option with neither a value nor a default is None."""

    location: LogLocation
    selection: Selection
    starting: Start | None
    ending: Bound | None
    late_start_is_latest: bool
    """True if a start time after the newest record means the end of the log, not an error."""
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_seconds: float
    parallelism: int
    """Number of tasks that Spark runs concurrently, as far as is known: see `_parallelism`."""
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    poll_interval_seconds: float | None
    commit_to_group: str | None
    rows_are_ranges: bool
    columns: tuple[str, ...]
    names_columns: bool
    """True if the option `columns` is given, which then names all columns."""
    value_format: str
    value_schema: str | None
    bad_values: str
    of_stream: tuple[str, ...]
    """The given options that apply only to streams."""
    of_batch: tuple[str, ...]
    """The given options that apply only to batches."""
    notes: tuple[str, ...]
    """Warnings for any query: Spark's Kafka options without effect, secrets that Spark shows."""

    @property
    def is_typed(self) -> bool:
        """True if rows have the typed columns of their topic."""
        return self.value_format == TYPED

    def check_batch(self) -> None:
        """Raises `BadOption` for an empty range, and for options of streams."""
        starting_offsets.check_start_of_batch(self.starting)
        starting_offsets.check_end_of_batch(self.ending)
        if self.commit_to_group is not None:
            reason = "only a stream commits its progress; remove the option from the batch read"
            raise _bad("commitToGroup", self.commit_to_group, reason)
        if self.rows_are_ranges:
            raise _bad("rows", "ranges", "only a stream has micro-batches; remove the option")

    def check_stream(self, *, has_limits: bool = True) -> None:
        """Raises `BadOption` for options of batches, and for limits before Spark 4.2."""
        for option in self.of_batch:
            reason = (
                "a stream has no end; use trigger(availableNow=True) to read the available records"
            )
            raise _bad(option, "set", reason)
        if self.of_stream and not has_limits:
            raise _bad(self.of_stream[0], "set", "limits of a stream need pyspark 4.2 or later")

    def batch_notes(self) -> list[str]:
        """Returns the warnings for a batch, one line each."""
        notes = list(self.notes)
        if self.of_stream:
            notes.append(
                f"{', '.join(self.of_stream)} has no effect on a batch, which has no triggers"
            )
        return notes

    def stream_notes(self) -> list[str]:
        """Returns the warnings for a stream, one line each."""
        return list(self.notes)


def parse(given: Mapping[str, str], clock: Clock | None = None) -> SourceOptions:
    """Returns the validated options. Raises `UnknownOption`, `BadOption`, `BadTopicName`.

    Args:
        clock: relative times refer to it; None: the machine's.
    """
    now_us = (clock or SystemClock()).now_us()
    for name in given:
        if name.lower() in ("password", "token"):
            file = f"{name.lower()}File"
            reason = f"Spark prints options: write it to a file, and set {file}"
            raise _bad(name, "…", reason)
    options = ConnectorOptions(_WHERE, given, _KNOWN, kafka=_OF_KAFKA)
    most, least = options.count("maxOffsetsPerTrigger"), options.count("minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        reason = f"it must not be more than maxOffsetsPerTrigger = {most}"
        raise _bad("minOffsetsPerTrigger", least, reason)
    value_format, bad_values = _value(options)
    delay_seconds = options.seconds("maxTriggerDelay")
    strategy = options.one_of("startingOffsetsByTimestampStrategy", ("error", "latest"))
    location = _location(options)
    return SourceOptions(
        location=location,
        selection=selection.parse(options),
        starting=starting_offsets.starting(options, now_us),
        ending=starting_offsets.ending(options, now_us),
        late_start_is_latest=strategy == "latest",
        max_offsets_per_trigger=most,
        max_bytes_per_trigger=_most_bytes(options, location),
        min_offsets_per_trigger=least,
        max_trigger_delay_seconds=(
            _MAX_TRIGGER_DELAY_SECONDS if delay_seconds is None else delay_seconds
        ),
        parallelism=_parallelism(),
        min_partitions=options.count("minPartitions"),
        max_records_per_partition=options.count("maxRecordsPerPartition"),
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        poll_interval_seconds=options.seconds("pollInterval"),
        commit_to_group=_group(options),
        rows_are_ranges=_rows_are_ranges(options),
        columns=_columns(
            options, with_corrupt=bad_values == "column", is_typed=value_format == TYPED
        ),
        names_columns=bool(options.names("columns")),
        value_format=value_format,
        value_schema=options.get("valueSchema"),
        bad_values=bad_values,
        of_stream=tuple(name for name in _TRIGGERS if options.get(name) is not None),
        of_batch=tuple(name for name in _ENDING if options.get(name) is not None),
        notes=options.notes,
    )


def _location(options: ConnectorOptions) -> LogLocation:
    """Returns the location: options override the environment, where a root overrides a broker."""
    bootstrap, root = options.get("bootstrap"), options.named_root
    if bootstrap is not None:
        if root is not None or options.names_storage:
            raise _bad("bootstrap", bootstrap, "set either the root or bootstrap, not both")
        return LogLocation(
            bootstrap=check_bootstrap("bootstrap", bootstrap), security=_security(options)
        )
    for name in _SECURITY:
        options.refuse(name, "it applies to brokers: set bootstrap too")
    if root is None and not os.environ.get(ROOT_VARIABLE):
        found = os.environ.get(BOOTSTRAP_VARIABLE)
        if found:
            return LogLocation(bootstrap=check_bootstrap(BOOTSTRAP_VARIABLE, found))
    return LogLocation(root=options.root, storage=tuple(sorted(options.storage.items())))


def _security(options: ConnectorOptions) -> Security | None:
    """Returns the security of the environment with the given options in place; None without any."""
    given: dict[str, str | None] = {
        field: value for name, field in _SECURITY.items() if (value := options.get(name))
    }
    if "token_file" in given:  # instead of the user of the environment
        given = {"user": None, "password_file": None, **given}
    elif "user" in given:
        given["token_file"] = None
    for name in _FILES:
        if path := options.get(name):
            _check_folder(name, path)
    if not ("token_file" in given or "user" in given):
        _check_own_token(options.get("bootstrap"))
    try:
        return replace(Security.from_environment(), **given) if given else None
    except errors.BadOption as error:
        named = {field: name for name, field in _SECURITY.items()}
        raise _bad(named.get(error.option, error.option), error.value, error.reason) from None


def _check_folder(name: str, path: str) -> None:
    """Raises `BadOption` unless the variable permits an option to name this file."""
    folders = os.environ.get(FOLDERS_VARIABLE)
    if folders is None:
        return
    file = Path(path).resolve()
    permitted = (Path(each).resolve() for each in folders.split(os.pathsep) if each)
    if not any(file.is_relative_to(each) for each in permitted):
        reason = f"on this driver, the file has to be in one of {FOLDERS_VARIABLE} = {folders!r}"
        raise _bad(name, path, reason)


def _check_own_token(bootstrap: str | None) -> None:
    """Raises `BadOption` if a query would send the token of a shared driver to any address.

    A password is not sent (SCRAM), but a broker that gets a token can use it.
    """
    is_shared = FOLDERS_VARIABLE in os.environ
    has_token = os.environ.get(VARIABLES["token_file"])
    if is_shared and has_token and bootstrap != os.environ.get(BOOTSTRAP_VARIABLE):
        reason = (
            f"on this driver, the token in {VARIABLES['token_file']} is only sent to"
            f" {BOOTSTRAP_VARIABLE}: set tokenFile, or user"
        )
        raise _bad("bootstrap", bootstrap, reason)


def _most_bytes(options: ConnectorOptions, location: LogLocation) -> int | None:
    if location.bootstrap is not None:
        reason = "a broker does not report the bytes of records: use maxOffsetsPerTrigger"
        options.refuse("maxBytesPerTrigger", reason)
    return options.size_bytes("maxBytesPerTrigger")


def _parallelism() -> int:
    """Returns the number of concurrent tasks, from the environment or the machine's cores.

    A planner has no access to Spark's executors or configuration.
    """
    value = os.environ.get(PARALLELISM_VARIABLE)
    if value is None:
        return os.cpu_count() or 1
    if not value.isascii() or not value.isdecimal() or int(value) < 1:
        raise _bad(PARALLELISM_VARIABLE, value, "expected a whole number of at least 1")
    return int(value)


def _group(options: ConnectorOptions) -> str | None:
    group = options.get("commitToGroup")
    if group is not None and not group.strip():
        raise _bad("commitToGroup", group, "expected the name of a consumer group")
    return group


def _rows_are_ranges(options: ConnectorOptions) -> bool:
    is_given = options.one_of("rows", ("records", "ranges")) == "ranges"
    if is_given:
        for name in ("columns", "includeHeaders", "valueFormat"):
            options.refuse(name, "with rows = ranges, rows do not contain records")
    return is_given


def _columns(options: ConnectorOptions, *, with_corrupt: bool, is_typed: bool) -> tuple[str, ...]:
    with_headers = options.flag("includeHeaders", default=False)
    extra = {"headers": with_headers, CORRUPT: with_corrupt}
    names = options.names("columns")
    if names and is_typed:
        return names  # they are checked once the topic's are known
    if not names:
        return tuple(name for name in COLUMNS if extra.get(name, True))
    options.refuse("includeHeaders", "add headers to the option columns instead")
    for name in names:
        if name not in COLUMNS or (name == CORRUPT and not with_corrupt):
            valid = ", ".join(each for each in COLUMNS if each != CORRUPT or with_corrupt)
            raise _bad("columns", name, f"use columns of {valid}")
    if CORRUPT in names and "value" not in names:
        raise _bad(
            "columns",
            CORRUPT,
            f"add value: {CORRUPT} holds the bytes of values that could not be decoded",
        )
    return names


def _value(options: ConnectorOptions) -> tuple[str, str]:
    """Returns the validated `valueFormat` and `badValues`."""
    kind = options.one_of("valueFormat", ("binary", "string", "json", TYPED))
    if kind == "json" and not options.get("valueSchema"):
        reason = "valueFormat = json needs a schema, such as 'carrier STRING, delay INT'"
        raise _bad("valueSchema", options.get("valueSchema"), reason)
    if kind != "json":
        options.refuse("valueSchema", "it applies to valueFormat = json only")
    if kind == TYPED:
        options.refuse("badValues", "what does not fit is null, and the column _error says why")
        if len(selection.parse(options).topics) != 1:
            raise _bad("valueFormat", TYPED, "a topic has its own columns: subscribe to one topic")
    if kind == "binary":
        options.refuse(
            "badValues", "binary values are never bad; set valueFormat to string or json"
        )
    return kind, options.one_of("badValues", ("null", "column", "error"))


def _bad(option: str, value: object, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
