"""Options that name the start and end of a read, parsed; `Planner.resolve` makes them offsets.

Three options name a start, and three an end. The first one that is given counts:
`startingTimestamp`, `startingOffsetsByTimestamp`, `startingOffsets`. A start may also be the
offsets that a consumer group has committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec

from sparklog import errors, limits
from sparklog.options import ConnectorOptions

EARLIEST: Final = -2
LATEST: Final = -1

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_GROUP: Final = "group"
_OF_GROUPS: Final = ("group.id", "groupOffsetReset")


class AtTime(msgspec.Struct, frozen=True):
    """The first record, by offset, that is not older than a time in microseconds since 1970 UTC."""

    timestamp_us: int


Point: TypeAlias = int | AtTime
"""An offset, `EARLIEST`, `LATEST`, or a time."""

Bound: TypeAlias = Point | Mapping[str, Mapping[int, Point]]
"""One point for all partitions, or one for each of them."""


class OfGroup(msgspec.Struct, frozen=True):
    """The offsets that a consumer group has committed."""

    group: str
    otherwise: int | None
    """For partitions without a committed offset: `EARLIEST`, `LATEST`, or None for an error."""


Start: TypeAlias = Bound | OfGroup


def starting(options: ConnectorOptions) -> Start | None:
    """Returns the start of a new query, or None if no option names it. Raises `BadOption`."""
    if (options.get("startingOffsets") or "").strip().lower() != _GROUP:
        for name in _OF_GROUPS:
            options.refuse(name, "it applies to startingOffsets = group only")
        return _bound(options, "starting")
    group = options.get("group.id")
    if not group:
        reason = "startingOffsets = group needs the name of a consumer group"
        raise errors.BadOption(option="group.id", value=group, reason=reason)
    reset = options.one_of("groupOffsetReset", ("earliest", "latest", "error"))
    by_time = _by_time(options, "starting")
    return OfGroup(group, _WORDS.get(reset)) if by_time is None else by_time


def ending(options: ConnectorOptions) -> Bound | None:
    """Returns the end of a batch, or None if no option names it. Raises `BadOption`."""
    return _bound(options, "ending")


def check_start_of_batch(bound: Start | None) -> None:
    """Raises `BadOption` if a partition starts at the end of the log."""
    if LATEST in _points(bound):
        reason = "a batch that starts at the end of the log has no records"
        raise errors.BadOption(option="startingOffsets", value="latest", reason=reason)


def check_end_of_batch(bound: Bound | None) -> None:
    """Raises `BadOption` if a partition ends at the start of the log."""
    if EARLIEST in _points(bound):
        reason = "a batch that ends at the start of the log has no records"
        raise errors.BadOption(option="endingOffsets", value="earliest", reason=reason)


def encode(offsets: Mapping[str, Mapping[int, int]]) -> str:
    """Returns the JSON of `startingOffsets` and `endingOffsets`."""
    return msgspec.json.encode(offsets).decode()


def encode_partitions(partitions: Mapping[str, list[int]]) -> str:
    """Returns the JSON of `assign`."""
    return msgspec.json.encode(partitions).decode()


def _points(bound: Start | None) -> Iterator[Point | OfGroup | None]:
    if isinstance(bound, Mapping):
        for each in bound.values():
            yield from each.values()
    else:
        yield bound


def _by_time(options: ConnectorOptions, side: str) -> Bound | None:
    timestamp = options.whole(f"{side}Timestamp")
    if timestamp is not None:
        return _at(timestamp)
    name = f"{side}OffsetsByTimestamp"
    value = options.get(name)
    if value is not None:
        return _json(name, value, '{"flights": {"0": 1357016400000}}', _at)
    return None


def _bound(options: ConnectorOptions, side: str) -> Bound | None:
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
        reason = "expected offsets of at least 0, or -2 (earliest) or -1 (latest)"
        raise errors.BadOption(option=name, value=value, reason=reason)
    return found


def _at(timestamp_ms: int) -> AtTime:
    """Returns the time, clipped to the range of a timestamp."""
    micros = timestamp_ms * 1000
    return AtTime(min(max(micros, limits.TIMESTAMP_MIN_US), limits.TIMESTAMP_MAX_US))


def _json(name: str, value: str, example: str, point: Callable[[int], Point]) -> Bound:
    try:
        found = msgspec.json.decode(value, type=dict[str, dict[int, int]])
    except msgspec.MsgspecError:
        reason = f"expected {example}"
        raise errors.BadOption(option=name, value=value, reason=reason) from None
    return {
        topic: {partition: point(each) for partition, each in points.items()}
        for topic, points in found.items()
    }
