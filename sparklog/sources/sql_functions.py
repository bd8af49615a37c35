"""Table functions for Spark SQL.

None of them reads a topic: a Python table function runs in a single task, and each evaluation
would see a different end of the log. A temporary view of the source has neither problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from sparklog import errors
from sparklog.options import ConnectorOptions
from sparklog.sources.options import LogLocation
from sparklog.sources.reader import absolute, view_of
from sparklog.spark_errors import rows_sentence_first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LAG: Final = "topic STRING, partition INT, committed BIGINT, end BIGINT, lag BIGINT"


def register_functions(spark: SparkSession, root: str | None = None) -> None:
    """Registers the table function `sparklog_lag(group)` with a session.

    `SELECT * FROM sparklog_lag('billing')` returns the partitions for which a consumer group has
    committed an offset: `topic`, `partition`, `committed` (the next offset that the group reads),
    `end` (the offset of the next record to be written), and `lag`, the difference, counted from the
    log start if that is higher. It reads the root; no broker needs to run.

    Args:
        spark: a session, classic or Spark Connect.
        root: of the log; None: `SPARKLOG_ROOT`. Its store's options come from the environment.

    Raises `BadOption` without a root. A query raises `BadOption` for an unknown group.
    """
    from pyspark.sql.functions import udtf

    options = ConnectorOptions("register_functions", {"root": root} if root else {}, ())
    storage = tuple(sorted(options.storage.items()))
    location = absolute(LogLocation(root=options.root, storage=storage))

    class SparklogLag:
        @rows_sentence_first
        def eval(self, group: str | None) -> Iterator[tuple[str, int, int, int, int]]:
            yield from group_lag(location, group)

    function: Any = udtf(SparklogLag, returnType=_LAG)
    spark.udtf.register("sparklog_lag", function)


def group_lag(location: LogLocation, group: str | None) -> Iterator[tuple[str, int, int, int, int]]:
    """Yields topic, partition, committed offset, end and lag, in order of topic and partition.

    Raises `BadOption` for an unknown group, and what `LogView.refresh` raises.
    """
    view = view_of(location)
    committed = view.committed(group) if group else None
    if committed is None:
        reason = (
            "the consumer group does not exist, or its offsets have expired; correct the name"
            " (`sparklog groups list` shows the groups)"
        )
        raise errors.BadOption(option="group", value=group, reason=reason)
    names = {topic for topic, _ in committed}
    topics = view.refresh(lambda existing: sorted(names.intersection(existing)), from_scratch=False)
    for (name, number), each in sorted(committed.items(), key=lambda item: item[0]):
        topic = topics.get(name)
        if topic is not None and topic.id == each.topic_id and number < len(topic.ends):
            end = topic.ends[number]
            lag = max(end - max(each.offset, topic.starts[number]), 0)
            yield name, number, each.offset, end, lag
