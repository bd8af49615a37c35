"""Where a read begins or ends, as the options of Spark's Kafka source say it.

Three options may name a start, and as many an end; the first of them that is given counts:
`startingTimestamp`, `startingOffsetsByTimestamp`, `startingOffsets`. A start may also be what a
consumer group has committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

from sparklog import errors, limits
from sparklog.options import Options

EARLIEST: Final = -2
LATEST: Final = -1

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_GROUP: Final = "group"
_OF_GROUPS: Final = ("group.id", "groupOffsetReset")


class AtTime(msgspec.Struct, frozen=True):
    """The first record, by offset, whose timestamp is not before; microseconds since 1970 UTC."""

    timestamp_us: int


Point: TypeAlias = int | AtTime
"""An offset, `EARLIEST`, `LATEST`, or a time."""

Bound: TypeAlias = Point | Mapping[str, Mapping[int, Point]]
"""A point for all partitions, or one for each."""


class OfGroup(msgspec.Struct, frozen=True):
    """What a consumer group has committed."""

    group: str
    otherwise: int | None
    """Where it has committed nothing: `EARLIEST`, `LATEST`, or None: that is refused."""


Start: TypeAlias = Bound | OfGroup


def starting(options: Options) -> Start | None:
    """Where a new query begins; None: nothing was said. Raises `BadOption`."""
    if (options.get("startingOffsets") or "").strip().lower() != _GROUP:
        for name in _OF_GROUPS:
            options.refuse(name, "only startingOffsets = group has one")
        return _bound(options, "starting")
    group = options.get("group.id")
    if not group:
        reason = "startingOffsets = group needs the name of a consumer group"
        raise errors.BadOption(option="group.id", value=group, reason=reason)
    reset = options.one_of("groupOffsetReset", ("earliest", "latest", "error"))
    by_time = _by_time(options, "starting")
    return OfGroup(group, _WORDS.get(reset)) if by_time is None else by_time


def ending(options: Options) -> Bound | None:
    """Where a batch ends; None: nothing was said. Raises `BadOption`."""
    return _bound(options, "ending")


def check_start_of_batch(bound: Start | None) -> None:
    """Raises `BadOption` for the end of the log."""
    if LATEST in _points(bound):
        reason = "a batch that begins there has no records"
        raise errors.BadOption(option="startingOffsets", value="latest", reason=reason)


def check_end_of_batch(bound: Bound | None) -> None:
    """Raises `BadOption` for the beginning of the log."""
    if EARLIEST in _points(bound):
        reason = "a batch that ends there has no records"
        raise errors.BadOption(option="endingOffsets", value="earliest", reason=reason)


def encode(offsets: Mapping[str, Mapping[int, int]]) -> str:
    """As `startingOffsets` and `endingOffsets` have it."""
    return msgspec.json.encode(offsets).decode()


def encode_partitions(partitions: Mapping[str, list[int]]) -> str:
    """As `assign` has it."""
    return msgspec.json.encode(partitions).decode()


def _points(bound: Start | None) -> Iterator[Point | OfGroup | None]:
    if isinstance(bound, Mapping):
        for each in bound.values():
            yield from each.values()
    else:
        yield bound


def _by_time(options: Options, side: str) -> Bound | None:
    timestamp = options.whole(f"{side}Timestamp")
    if timestamp is not None:
        return _at(timestamp)
    name = f"{side}OffsetsByTimestamp"
    value = options.get(name)
    if value is not None:
        return _json(name, value, '{"flights": {"0": 1357016400000}}', _at)
    return None


def _bound(options: Options, side: str) -> Bound | None:
    by_time = _by_time(options, side)
    name = f"{side}Offsets"
    value = options.get(name)
    if by_time is not None or value is None:
        return by_time
    word = _WORDS.get(value.strip().lower())
    if word is not None:
        return word
    words = [*_WORDS, *([_GROUP] if side == "starting" else [])]
    expected = f'{", ".join(words)}, or JSON: {{"flights": {{"0": 23, "1": -2}}}}'
    found = _json(name, value, expected, int)
    if any(isinstance(each, int) and each < EARLIEST for each in _points(found)):
        reason = "an offset is 0 and up, -2 (earliest) or -1 (latest)"
        raise errors.BadOption(option=name, value=value, reason=reason)
    return found


def _at(timestamp_ms: int) -> AtTime:
    """What lies outside the years of a timestamp means the first or last of them."""
    micros = timestamp_ms * 1000
    return AtTime(min(max(micros, limits.TIMESTAMP_MIN_US), limits.TIMESTAMP_MAX_US))


def _json(name: str, value: str, example: str, point: Callable[[int], Point]) -> Bound:
    try:
        found = msgspec.json.decode(value, type=dict[str, dict[int, int]])
    except msgspec.MsgspecError:
        reason = f"expected {example}"
        raise errors.BadOption(option=name, value=value, reason=reason) from None
    return {
        topic: {partition: point(each) for partition, each in places.items()}
        for topic, places in found.items()
    }
