"""SQL that registers topics' tables in a catalog: Spark's own, a Hive metastore, Unity Catalog.

Rules:

- A table is registered at its location. No data is copied or written, and dropping the table from
  the catalog leaves the topic unchanged.
- Most catalogs allow letters, digits and underscores in names, and ignore case. Other characters of
  a topic's name become underscores, as in the names of Kafka's metrics. So a table's name depends
  on the topic's name alone, not on which other topics exist or are registered with it.
- Tables and views share the namespace of a schema, and `IF NOT EXISTS` hides that a name is taken.
  So each topic of the log reserves two names, for its table and its view, whether or not it is
  being registered. Two topics that share a name are an error, until the user renames one of them.
- Names are always in backticks, since a topic's name may be a keyword.
- The view of a topic with typed columns has those that new records fill, and neither the value nor
  the headers. It has no columns that are added later, until it is created again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from sparklog import errors
from sparklog.formats.values.columns import ERROR

VIEW_SUFFIX: Final = "_text"

_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")
_NOT_FOR_SPARK: Final = ("az", "azure", "memory")
"""URI schemes that Spark does not support, or supports under another name."""


def table_names(
    topics: Sequence[str], log: Iterable[str], chosen: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns a table name for each topic.

    Args:
        topics: the topics to name.
        log: all topics of the log; the returned names do not collide with theirs.
        chosen: the names that the user has chosen, by topic.

    Raises:
        errors.BadOption: a topic's table or view would have the same name as another topic's.
    """
    every = {*log, *topics}
    names = {topic: chosen.get(topic) or _NOT_IN_NAMES.sub("_", topic) for topic in sorted(every)}
    owners: dict[str, list[tuple[str, str]]] = {}
    for topic, name in names.items():
        owners.setdefault(name.lower(), []).append((topic, "table"))
        owners.setdefault((name + VIEW_SUFFIX).lower(), []).append((topic, "view"))
    for topic in topics:
        for what, name in (("table", names[topic]), ("view", names[topic] + VIEW_SUFFIX)):
            for other, its in owners[name.lower()]:
                if other != topic:
                    reason = (
                        f"its {what} would be named {name}, like the {its} of {other!r}; choose a"
                        f" name for one of them with --name {topic}=NAME or --name {other}=NAME"
                    )
                    raise errors.BadOption(option="topic", value=topic, reason=reason)
    return {topic: names[topic] for topic in topics}


def location(table_uri: str, *, root: str | None = None) -> str:
    """Returns the URI at which Spark finds the table whose URI at the broker is `table_uri`.

    Args:
        table_uri: as the broker reports it.
        root: the root in Spark's notation, if it differs from the broker's: `s3a://bucket/log`.

    Raises:
        errors.BadOption: Spark has a different notation for the store, and `root` is not given.
    """
    if root is not None:
        folder, topic = table_uri.split("/")[-2:]
        return f"{root.rstrip('/')}/{folder}/{topic}"
    scheme = table_uri.partition("://")[0]
    if scheme in _NOT_FOR_SPARK:
        reason = f"Spark does not read {scheme}://; pass the root in Spark's notation"
        raise errors.BadOption(option="--spark-root", value=None, reason=reason)
    # Spark does not decode percent escapes in a path.
    return f"file://{unquote(table_uri[len('file://') :])}" if scheme == "file" else table_uri


def statements(
    topic: str,
    location: str,
    table: Sequence[str],
    *,
    with_view: bool = False,
    typed: Sequence[str] = (),
) -> list[str]:
    """Returns SQL that registers a topic's table, without columns: Delta reads them from its log.

    Args:
        topic: the topic's name, a column of the view.
        location: the URI of the table in Spark's notation.
        table: the parts of the table's name: catalog and schema, if given, and its own.
        with_view: add a view with key and value as strings, and the topic's name.
        typed: the names of the typed columns, which the view has instead of the value.
    """
    *where, name = table
    register = (
        f"CREATE TABLE IF NOT EXISTS {_name(table)}\nUSING delta\nLOCATION {_text(location)};"
    )
    if not with_view:
        return [register]
    view = f"CREATE OR REPLACE VIEW {_name((*where, name + VIEW_SUFFIX))} AS"
    key = "CAST(`key` AS STRING) AS `key`"
    place = f"{_text(topic)} AS `topic`, `partition`, `offset`, `timestamp`, `timestampType`"
    if typed:
        columns = ", ".join([*map(_quoted, typed), _quoted(ERROR)])
        select = f"SELECT {key},\n  {columns},\n  {place}"
    else:
        value = "CAST(`value` AS STRING) AS `value`"
        select = f"SELECT {key}, {value},\n  {place}, `headers`"
    return [register, f"{view}\n{select}\nFROM {_name(table)};"]


def _name(parts: Sequence[str]) -> str:
    return ".".join(map(_quoted, parts))


def _quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
