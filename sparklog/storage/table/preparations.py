"""Preparations: data files that are written over a long time for one later commit.

A preparation is open while the version of its `txn` is odd. While it is open, no sweeper removes
its files, whose names contain its number.
"""

from __future__ import annotations

from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table.changes import TableChange
from sparklog.storage.table.encoding import lost_preparation
from sparklog.storage.table.names import preparation_app_id
from sparklog.storage.table.topic_table import TopicTable


def prepare(table: TopicTable, topic_id: str, broker: int) -> int:
    """Opens a preparation of files for one later commit, and closes the broker's previous one.

    Those of other brokers stay open: each leader prepares the files of its own partitions. A number
    is used only once per table, across all brokers. Returns the number, for the names of the files.
    Raises what `TopicTable.commit` raises, and `TimedOut` if the topic no longer exists.
    """
    opened: int | None = None

    def decide(before: TableSnapshot) -> TableChange | None:
        nonlocal opened
        opened = None
        if before.topic_id != topic_id:
            return None
        last = max(table.preparations.values(), default=0)
        opened = last + 1 + last % 2
        app_id = preparation_app_id(topic_id, broker)
        return TableChange(txns={app_id: opened}, operation="PREPARE")

    table.commit(decide)
    if opened is None:
        raise lost_preparation(table.topic)
    return opened


def renew(table: TopicTable, number: int) -> None:
    """Renews the preparation, so that no sweeper closes it.

    Raises what `TopicTable.commit` raises, and `TimedOut` if it is closed.
    """
    app_id: str | None = None

    def decide(_before: TableSnapshot) -> TableChange | None:
        nonlocal app_id
        app_id = table.open_preparations.get(number)
        if app_id is None:
            return None
        return TableChange(txns={app_id: number}, operation="PREPARE")

    table.commit(decide)
    if app_id is None:
        raise lost_preparation(table.topic)


def end_old(table: TopicTable, before_us: int) -> None:
    """Closes open preparations not renewed since `before_us`.

    Raises what `TopicTable.commit` raises.
    """

    def decide(_before: TableSnapshot) -> TableChange | None:
        old = {
            app_id: number + 1
            for number, app_id in table.open_preparations.items()
            if (found := table.txn(app_id)) is not None
            and (found.last_updated or 0) * 1_000 < before_us
        }
        return TableChange(txns=old, operation="SWEEP") if old else None

    table.commit(decide)
