"""SQL that makes topics' tables known to a catalog: Spark's own, a Hive metastore, Unity Catalog.

Rules of this room:

- A table is registered where it stands. Nothing is copied or written, and dropping it from the
  catalog leaves the topic as it is.
- Most catalogs want names of letters, digits and underscores only, and do not tell case apart. So
  what else a topic's name has becomes an underscore, as in the names of Kafka's metrics, and topics
  that would have one name are refused.
- Names stand in backticks always, since a topic may have the name of a keyword.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from sparklog import errors

VIEW_SUFFIX: Final = "_text"

_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")
_NOT_FOR_SPARK: Final = ("az", "azure", "memory")
"""Schemes of stores that Spark has other names for, or none."""


def table_names(topics: Sequence[str]) -> dict[str, str]:
    """A name for the table of each topic. Raises `BadOption` where two would have the same."""
    taken: dict[str, str] = {}
    names = {}
    for topic in topics:
        name = _NOT_IN_NAMES.sub("_", topic)
        other = taken.setdefault(name.lower(), topic)
        if other != topic:
            reason = f"its table would be named {name}, as that of {other}; name one with --name"
            raise errors.BadOption(option="topic", value=topic, reason=reason)
        names[topic] = name
    return names


def location(table_uri: str, *, root: str | None = None) -> str:
    """Where Spark finds a table, of which the broker says `table_uri`.

    Args:
        root: the root as Spark names it, if that is not how the broker does: `s3a://bucket/log`.

    Raises `BadOption` for a store that Spark has another name for.
    """
    if root is not None:
        folder, topic = table_uri.split("/")[-2:]
        return f"{root.rstrip('/')}/{folder}/{topic}"
    scheme = table_uri.partition("://")[0]
    if scheme in _NOT_FOR_SPARK:
        reason = f"Spark knows no {scheme}://; say how it names the root"
        raise errors.BadOption(option="--spark-root", value=None, reason=reason)
    # Spark decodes nothing, and takes a path to the letter.
    return f"file://{unquote(table_uri[len('file://') :])}" if scheme == "file" else table_uri


def statements(
    topic: str, location: str, table: Sequence[str], *, with_view: bool = False
) -> list[str]:
    """What registers a topic's table; no columns, since the table itself tells them.

    Args:
        location: the table's URI, as Spark has it.
        table: its name in parts: catalog and schema, if given, and its own.
        with_view: also a view that has key and value as text, and the topic's name.
    """
    *where, name = table
    register = (
        f"CREATE TABLE IF NOT EXISTS {_name(table)}\nUSING delta\nLOCATION {_text(location)};"
    )
    if not with_view:
        return [register]
    view = (
        f"CREATE OR REPLACE VIEW {_name((*where, name + VIEW_SUFFIX))} AS\n"
        "SELECT CAST(`key` AS STRING) AS `key`, CAST(`value` AS STRING) AS `value`,\n"
        f"  {_text(topic)} AS `topic`, `partition`, `offset`,"
        " `timestamp`, `timestampType`, `headers`\n"
        f"FROM {_name(table)};"
    )
    return [register, view]


def _name(parts: Sequence[str]) -> str:
    return ".".join("`{}`".format(part.replace("`", "``")) for part in parts)


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
