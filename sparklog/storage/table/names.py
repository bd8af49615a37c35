"""Names in a topic's table: its folder, its data files, and the `app_id` of each of its `txn`."""

from __future__ import annotations

import re
import secrets
from typing import Final
from urllib.parse import unquote

from sparklog.storage.snapshot import TableFile

_SUFFIX: Final = re.compile(r"-([0-9a-f]{8})[0-9a-f]{8}\.parquet$")
# These names are formed by `data_file.new_file` and `file_suffix`.
_OUR_FILE: Final = re.compile(r"partition=\d+/[^/]+-\d+-\d+-[0-9a-f]{16}\.parquet")


def is_our_file(path: str) -> bool:
    """Returns whether sparklog named a data file; `path` is relative to the table's folder."""
    return _OUR_FILE.fullmatch(path) is not None


def file_suffix(preparation: int | None) -> str:
    """Returns the unique suffix of a data file's name: 16 hexadecimal digits."""
    if preparation is None:
        return secrets.token_hex(8)
    return f"{preparation:08x}{secrets.token_hex(4)}"


def preparation_of(path: str) -> int | None:
    """Returns the preparation number in a data file's name; a random one if it was not prepared."""
    named = _SUFFIX.search(path)
    return int(named[1], 16) if named is not None else None


def table_folder(topic: str) -> str:
    """Returns the path of the topic's table under a root."""
    return f"topics/{topic}"


def data_path(topic: str, file: TableFile) -> str:
    """Returns the path of `file` in the store; the Delta log percent-encodes it."""
    return f"{table_folder(topic)}/{unquote(file.path)}"


def end_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the partition's next offset."""
    return f"sparklog/{topic_id}/{partition}"


def start_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the partition's log start offset."""
    return f"sparklog/{topic_id}/{partition}/start"


def compacted_app_id(topic_id: str, partition: int) -> str:
    """The `txn` whose version is the end offset of the last key compaction."""
    return f"sparklog/{topic_id}/{partition}/compacted"


def tombstones_app_id(topic_id: str, partition: int) -> str:
    """The `txn` below whose version tombstones have been waiting since its `lastUpdated`."""
    return f"sparklog/{topic_id}/{partition}/tombstones"


def preparation_app_id(topic_id: str, broker: int) -> str:
    """The `txn` whose version numbers a broker's preparations; odd while one is open."""
    return f"{preparations_prefix(topic_id)}/{broker}"


def preparations_prefix(topic_id: str) -> str:
    """The prefix of every preparation's `app_id`; on its own, the `app_id` of an older release."""
    return f"sparklog/{topic_id}/preparation"


def query_app_id(topic_id: str, query: str) -> str:
    """The `txn` whose version is the newest batch of a Spark query in the table."""
    return f"sparklog/{topic_id}/query/{query}"


def begun_app_id(topic_id: str, query: str) -> str:
    """The `txn` whose version is the newest batch of a query that is at least partly in the table.

    Several leaders append the parts of such a batch, and commit them separately.
    """
    return f"sparklog/{topic_id}/begun/{query}"


def key_app_id(topic_id: str, key: str) -> str:
    """The `txn` of a write with an idempotency key, once it is in the table; its version is 0."""
    return f"sparklog/{topic_id}/key/{key}"


def maintenance_app_id(topic_id: str) -> str:
    """The `txn` of compaction and retention, which lets other engines detect conflicts."""
    return f"sparklog/{topic_id}/maintenance"
