"""A broker's write-ahead log: the records that it acked, until they are in the tables.

`base` defines the interface and the rules that every kind follows. Callers use only what this
package exports, regardless of the kind.
"""

from __future__ import annotations

from sparklog import errors
from sparklog.clock import Clock
from sparklog.storage.objects import Store
from sparklog.storage.objects.files import files_of
from sparklog.storage.snapshot import WalKind
from sparklog.storage.wal.base import (
    FOLDER,
    Appender,
    Checkpoint,
    Follower,
    PlannedFlush,
    PlanningAppender,
    Wal,
    WalObject,
    check_payload,
    folder,
    payload_place,
    read_payload,
)
from sparklog.storage.wal.objects import ObjectWal
from sparklog.storage.wal.payloads import (
    EMPTY,
    Payload,
    decode_body,
    decode_kafka,
    decode_payload,
    encode_kafka,
    encode_payload,
)
from sparklog.storage.wal.segments import SegmentWal

__all__ = [
    "EMPTY",
    "FOLDER",
    "Appender",
    "Checkpoint",
    "Follower",
    "Payload",
    "PlannedFlush",
    "PlanningAppender",
    "Wal",
    "WalObject",
    "check_payload",
    "decode_body",
    "decode_kafka",
    "decode_payload",
    "encode_kafka",
    "encode_payload",
    "folder",
    "of",
    "payload_place",
    "read_payload",
]


def of(store: Store, clock: Clock, kind: WalKind = WalKind.OBJECTS) -> Wal:
    """Returns a root's write-ahead logs of this kind."""
    if kind is WalKind.OBJECTS:
        return ObjectWal(store, clock)
    files = files_of(store)
    if files is None:
        raise errors.NotARoot(
            root=store.uri,
            reason="a broker has written its log in segments, which are files of a local root",
        )
    return SegmentWal(store, files, clock)
