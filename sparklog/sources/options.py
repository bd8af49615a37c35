"""What a read was asked for: the options of Spark's Kafka source, under their own names.

| option | default | meaning |
|---|---|---|
| `subscribe` | | topics, separated by commas |
| `startingOffsets` | `latest`; batch: `earliest` | where a *new* query begins: `earliest`, `latest`, or JSON: `{"flights": {"0": 23, "1": -2}}`, where -2 is earliest and -1 latest |
| `endingOffsets` | `latest` | where a batch ends, in the same forms |
| `maxOffsetsPerTrigger` | | most records in one micro-batch, shared among partitions by what waits |
| `failOnDataLoss` | `true` | whether records that are gone end the query |
| `minPartitions` | twice the driver's cores | least number of tasks of a large read |
| `includeHeaders` | `false` | adds the column `headers` |
| `columns` | all | only these columns: Spark never tells a Python source what it needs |
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from sparklog import errors
from sparklog.options import Options
from sparklog.record import check_topic_name

EARLIEST: Final = -2
LATEST: Final = -1

Bound: TypeAlias = int | Mapping[str, Mapping[int, int]]
"""`EARLIEST` or `LATEST` of every partition; or, for each partition, one of them or an offset."""

COLUMNS: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "headers",
)
"""Of a row, in the order of Spark's Kafka source."""

_WHERE: Final = 'the source format("sparklog")'
_KNOWN: Final = (
    "subscribe",
    "startingOffsets",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
    "minPartitions",
    "includeHeaders",
    "columns",
)
_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of one read, checked. A bound that was not given is None."""

    root: str
    storage: Mapping[str, str]
    topics: tuple[str, ...]
    starting: Bound | None
    ending: Bound | None
    max_offsets_per_trigger: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    columns: tuple[str, ...]

    def check_batch(self) -> None:
        """Raises `BadOption` for what only a stream has."""
        if self.max_offsets_per_trigger is not None:
            reason = "a batch has no triggers; choose its range by startingOffsets, endingOffsets"
            raise _bad("maxOffsetsPerTrigger", self.max_offsets_per_trigger, reason)
        if self.starting == LATEST:
            raise _bad("startingOffsets", "latest", "a batch that begins there has no records")
        if self.ending == EARLIEST:
            raise _bad("endingOffsets", "earliest", "a batch that ends there has no records")

    def check_stream(self) -> None:
        """Raises `BadOption` for what only a batch has."""
        if self.ending is not None:
            reason = "a stream has no end; to read what there is, trigger(availableNow=True)"
            raise _bad("endingOffsets", _shown(self.ending), reason)


def parse(given: Mapping[str, str]) -> SourceOptions:
    """Raises `UnknownOption`, `BadOption`, `BadTopicName`."""
    options = Options(_WHERE, given, _KNOWN)
    topics = options.names("subscribe")
    if not topics:
        raise _bad("subscribe", options.get("subscribe"), "name topics, separated by commas")
    return SourceOptions(
        root=options.root,
        storage=options.storage,
        topics=tuple(sorted(check_topic_name(topic) for topic in topics)),
        starting=_bound(options, "startingOffsets", topics),
        ending=_bound(options, "endingOffsets", topics),
        max_offsets_per_trigger=options.count("maxOffsetsPerTrigger"),
        min_partitions=options.count("minPartitions"),
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        columns=_columns(options),
    )


def _columns(options: Options) -> tuple[str, ...]:
    names = options.names("columns")
    if not names:
        with_headers = options.flag("includeHeaders", default=False)
        return COLUMNS if with_headers else COLUMNS[:-1]
    options.refuse("includeHeaders", "columns are named already; name headers among them")
    for name in names:
        if name not in COLUMNS:
            raise _bad("columns", name, f"a row has {', '.join(COLUMNS)}")
    return names


def _bound(options: Options, name: str, topics: tuple[str, ...]) -> Bound | None:
    value = options.get(name)
    if value is None:
        return None
    word = _WORDS.get(value.strip().lower())
    if word is not None:
        return word
    try:
        bound = msgspec.json.decode(value, type=dict[str, dict[int, int]])
    except msgspec.MsgspecError:
        reason = 'expected earliest, latest, or JSON as {"flights": {"0": 23, "1": -2}}'
        raise _bad(name, value, reason) from None
    if bound.keys() != set(topics):
        raise _bad(name, value, f"it must name the topics of subscribe: {', '.join(topics)}")
    for topic, offsets in bound.items():
        for partition, offset in offsets.items():
            if partition < 0 or offset < EARLIEST:
                reason = f"{topic}: an offset is 0 and up, -2 (earliest) or -1 (latest)"
                raise _bad(name, value, reason)
    return bound


def _shown(bound: Bound) -> object:
    return next((word for word, meant in _WORDS.items() if meant == bound), bound)


def _bad(option: str, value: object, reason: str) -> errors.BadOption:
    return errors.BadOption(option=option, value=value, reason=reason)
