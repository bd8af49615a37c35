"""Small Produce responses without errors, written without kio; pure.

A producer that waits for each ack receives one response per record, and kio takes eight times as
long to write it. All other responses are left to kio; those with many items are written in turns.
Source: https://kafka.apache.org/protocol, "Produce API (Key: 0)", versions 3 to 13.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from sparklog.broker.kafka import wire
from sparklog.broker.kafka.times import ms_of, to_ms

_WITH_LOG_STARTS: Final = 5
_WITH_ERROR_TEXTS: Final = 8
_FLEXIBLE: Final = 9
"""The first version with compact lengths and tagged fields."""
_WITH_TOPIC_IDS: Final = 13
_NO_TIME: Final = -1
_INT32: Final = struct.Struct(">i")
_OLD_PARTITION: Final = struct.Struct(">ihqq")
_PARTITION: Final = struct.Struct(">ihqqq")
"""Index, error code, base offset, append time, log start offset."""


def write(version: int, correlation_id: int, fields: Mapping[str, Any]) -> bytearray:
    """Returns a response's frame, prefixed with its length.

    Args:
        fields: the response's fields, as for `messages.write_reply`: few items and no errors.
    """
    is_flexible = version >= _FLEXIBLE
    responses = fields["responses"]
    frame = bytearray(_INT32.size) + _INT32.pack(correlation_id)
    if is_flexible:
        frame += b"\0"
    frame += wire.count(len(responses), is_flexible=is_flexible)
    for topic in responses:
        has_id = version >= _WITH_TOPIC_IDS
        frame += wire.topic_head(topic, "name", has_id=has_id, is_flexible=is_flexible)
        partitions = topic["partition_responses"]
        frame += wire.count(len(partitions), is_flexible=is_flexible)
        for each in partitions:
            _write_partition(frame, version, each)
        if is_flexible:
            frame += b"\0"
    frame += _INT32.pack(to_ms(fields["throttle_time"]))
    if is_flexible:
        frame += b"\0"
    frame[: _INT32.size] = _INT32.pack(len(frame) - _INT32.size)
    return frame


def _write_partition(frame: bytearray, version: int, each: Mapping[str, Any]) -> None:
    assert not each["error_code"], "kio writes errors"
    time = each["log_append_time"]
    numbers = each["index"], 0, each["base_offset"], _NO_TIME if time is None else ms_of(time)
    if version < _WITH_LOG_STARTS:
        frame += _OLD_PARTITION.pack(*numbers)
        return
    frame += _PARTITION.pack(*numbers, each["log_start_offset"])
    if version >= _FLEXIBLE:
        frame += b"\1\0\0"  # no record errors, no error message, no tags
    elif version >= _WITH_ERROR_TEXTS:
        frame += b"\0\0\0\0\xff\xff"
