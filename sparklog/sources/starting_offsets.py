"""Parses the options for the start and end of a read; `Planner.resolve` makes them offsets.

A time is milliseconds since 1970 UTC, ISO 8601, or relative to the moment of parsing.

Three options name a start, and three an end. The first that is given takes precedence:
`startingTimestamp`, `startingOffsetsByTimestamp`, `startingOffsets`. A start may also be the
offsets that a consumer group has committed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias, TypeVar

import msgspec

from sparklog import errors, limits
from sparklog.client.times import datetime_us, moment
from sparklog.options import ConnectorOptions
from sparklog.sources.offsets import TopicOffsets

EARLIEST: Final = -2
LATEST: Final = -1

_WORDS: Final = {"earliest": EARLIEST, "latest": LATEST}
_GROUP: Final = "group"
_OF_GROUPS: Final = ("group.id", "groupOffsetReset")

_FROM_END: Final = re.compile(r"-(\d{1,18})", re.ASCII)
_MILLISECONDS: Final = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_AGO: Final = re.compile(r"(\d{1,12})\s*(second|minute|hour|day|week)s?\s+ago", re.ASCII)
_UNIT_SECONDS: Final = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
_TIMES: Final = "milliseconds since 1970, a time in ISO 8601, or a time such as '10 minutes ago'"

_Given = TypeVar("_Given")
_OFFSETS: Final = msgspec.json.Decoder(dict[str, dict[int, int]])
_PINNED: Final = msgspec.json.Decoder(dict[str, TopicOffsets])
_TIMESTAMPS: Final = msgspec.json.Decoder(dict[str, dict[int, int | str]])


class AtTime(msgspec.Struct, frozen=True):
    """The first record, by offset, that is not older than a time in microseconds since 1970 UTC."""

    timestamp_us: int


class FromEnd(msgspec.Struct, frozen=True):
    """A number of offsets before the end of the log, or the log start if that is closer."""

    count: int


Point: TypeAlias = int | AtTime | FromEnd
"""An offset, `EARLIEST`, `LATEST`, a time, or a number of offsets before the end."""

Points: TypeAlias = Mapping[str, Mapping[int, Point]]
"""A point for each partition, by topic."""


class Pinned(msgspec.Struct, frozen=True):
    """Offsets of the topics with these ids, as stored in a query's checkpoint."""

    ids: Mapping[str, str]
    points: Points


Bound: TypeAlias = Point | Points | Pinned
"""One point for all partitions, or one for each of them."""


class OfGroup(msgspec.Struct, frozen=True):
    """The offsets that a consumer group has committed."""

    group: str
    otherwise: int | None
    """For partitions without a committed offset: `EARLIEST`, `LATEST`, or None for an error."""


Start: TypeAlias = Bound | OfGroup


def starting(options: ConnectorOptions, now_us: int) -> Start | None:
    """Returns the start of a new query, or None if no option names it.

    Args:
        now_us: the moment that relative times refer to.

    Raises `BadOption`.
    """
    by_time = _by_time(options, "starting", now_us)
    if (options.get("startingOffsets") or "").strip().lower() != _GROUP:
        for name in _OF_GROUPS:
            options.refuse(name, "it applies to startingOffsets = group only")
        return _by_offset(options, "starting") if by_time is None else by_time
    group = options.get("group.id")
    if not group:
        reason = "startingOffsets = group needs the name of a consumer group"
        raise errors.BadOption(option="group.id", value=group, reason=reason)
    reset = options.one_of("groupOffsetReset", ("earliest", "latest", "error"))
    return OfGroup(group, _WORDS.get(reset)) if by_time is None else by_time


def ending(options: ConnectorOptions, now_us: int) -> Bound | None:
    """Returns the end of a batch, or None if no option names it. Parameters as in `starting`."""
    by_time = _by_time(options, "ending", now_us)
    return _by_offset(options, "ending") if by_time is None else by_time


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


def encode_pinned(offsets: Mapping[str, Mapping[int, int]], ids: Mapping[str, str]) -> str:
    """Returns the JSON for offsets that are valid only for the topics with these ids."""
    pinned = {topic: TopicOffsets(ids[topic], each) for topic, each in offsets.items()}
    return msgspec.json.encode(pinned).decode()


def encode_partitions(partitions: Mapping[str, list[int]]) -> str:
    """Returns the JSON of `assign`."""
    return msgspec.json.encode(partitions).decode()


def _points(bound: Start | None) -> Iterator[Point | OfGroup | None]:
    if isinstance(bound, Pinned):
        bound = bound.points
    if isinstance(bound, Mapping):
        for each in bound.values():
            yield from each.values()
    else:
        yield bound


def _by_time(options: ConnectorOptions, side: str, now_us: int) -> Bound | None:
    name = f"{side}Timestamp"
    value = options.get(name)
    if value is not None:
        try:
            return _at(value, now_us)
        except ValueError:
            raise errors.BadOption(option=name, value=value, reason=f"expected {_TIMES}") from None
    name = f"{side}OffsetsByTimestamp"
    value = options.get(name)
    if value is None:
        return None
    expected = f'JSON such as {{"flights": {{"0": 1357016400000}}}}, with {_TIMES}'
    return _json(name, value, expected, _TIMESTAMPS, lambda each: _at(each, now_us))


def _by_offset(options: ConnectorOptions, side: str) -> Bound | None:
    name = f"{side}Offsets"
    value = options.get(name)
    if value is None:
        return None
    text = value.strip().lower()
    if text in _WORDS:
        return _WORDS[text]
    from_end = _FROM_END.fullmatch(text)
    if from_end and int(from_end[1]) > -EARLIEST:
        return FromEnd(int(from_end[1]))
    if from_end:
        reason = "write latest for -1, and earliest for -2: -1 and -2 mean these only in JSON"
        raise errors.BadOption(option=name, value=value, reason=reason)
    words = [*_WORDS, *([_GROUP] if side == "starting" else [])]
    expected = (
        f"{', '.join(words)}, a number of records before the end such as -100, or JSON:"
        ' {"flights": {"0": 23, "1": -2}}'
    )
    found = _pinned(value) or _json(name, value, expected, _OFFSETS, int)
    if any(isinstance(each, int) and each < EARLIEST for each in _points(found)):
        reason = "expected offsets of at least 0, or -2 (earliest) or -1 (latest)"
        raise errors.BadOption(option=name, value=value, reason=reason)
    return found


def _pinned(value: str) -> Pinned | None:
    """Returns the offsets if they are in the form of a checkpoint, else None."""
    try:
        found = _PINNED.decode(value)
    except msgspec.MsgspecError:
        return None
    return Pinned(
        ids={topic: each.id for topic, each in found.items()},
        points={topic: each.offsets for topic, each in found.items()},
    )


def _at(given: int | str, now_us: int) -> AtTime:
    """Returns the time, clamped to the range of a timestamp. Raises `ValueError` if it is none."""
    if isinstance(given, int):
        micros = given * 1_000
    else:
        text = given.strip()
        ago = _AGO.fullmatch(text.lower())
        if ago is not None:
            micros = now_us - int(ago[1]) * _UNIT_SECONDS[ago[2]] * 1_000_000
        elif _MILLISECONDS.fullmatch(text):
            micros = int(text) * 1_000
        else:
            micros = datetime_us(moment(text))
    return AtTime(min(max(micros, limits.TIMESTAMP_MIN_US), limits.TIMESTAMP_MAX_US))


def _json(
    name: str,
    value: str,
    expected: str,
    decoder: msgspec.json.Decoder[dict[str, dict[int, _Given]]],
    point: Callable[[_Given], Point],
) -> Bound:
    """Returns the points by topic and partition. `point` raises `ValueError` for an invalid one."""
    try:
        found = decoder.decode(value)
        return {
            topic: {partition: point(each) for partition, each in points.items()}
            for topic, points in found.items()
        }
    except ValueError:  # msgspec's errors too
        reason = f"expected {expected}"
        raise errors.BadOption(option=name, value=value, reason=reason) from None
