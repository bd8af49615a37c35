"""Writes each micro-batch of `foreachBatch` once, even if Spark repeats it after a crash.

A write is identified by its name, the query's id and the number of the micro-batch. Spark keeps the
id in the checkpoint: it stays the same when a query restarts, and changes when the checkpoint is
deleted, so that batches numbered from 0 again are not mistaken for earlier ones.

In classic Spark the id is a local property of the thread that calls the function. A function that
runs in Spark Connect has no such thread, but can list the session's queries; it finds its own by
`queryName`, which is unique among the active queries of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from sparklog import errors
from sparklog.sinks.options import DIFFERENT_RERUN, ONCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERY_ID: Final = "sql.streaming.queryId"
"""Local property of the driver's thread and of its tasks."""


def write_batch(
    frame: DataFrame,
    batch_id: int,
    *,
    name: str,
    query_name: str | None = None,
    root: str | None = None,
    topic: str | None = None,
    **options: str,
) -> None:
    """Appends `frame` once, however often this micro-batch is run.

    To be called in a function for `foreachBatch`, on the thread on which Spark calls it.

    Args:
        frame: a frame that the sink accepts: see its columns.
        batch_id: as passed by Spark.
        name: of this write, up to 160 of [a-zA-Z0-9._-]. Two writes of one micro-batch to one topic
            need two names: with the same name, the second is taken for a rerun of the first.
        query_name: in Spark Connect, the query's `queryName`; None: the same as `name`.
        root: of the log; None: `SPARKLOG_ROOT` in the driver's environment.
        topic: the topic of all rows; None: that in the column `topic`.
        options: further options of the sink.

    Raises:
        errors.BadOption: an option that identifies a write, such as `txnAppId`.
        errors.BadRequest: no streaming query runs on this thread, or none has that name.
        Exception: Spark's own, if the write fails.
    """
    _check_options(options)
    query_id = _query_id(frame.sparkSession, query_name or name)
    given = {DIFFERENT_RERUN: "true", "root": root, "topic": topic, **options}
    writer = frame.write.format("sparklog").mode("append")
    for option, value in given.items():
        if value is not None:
            writer = writer.option(option, value)
    writer.option("txnAppId", f"{name}.{query_id}").option("txnVersion", str(batch_id)).save()


def foreach_batch(
    *,
    name: str,
    query_name: str | None = None,
    root: str | None = None,
    topic: str | None = None,
    **options: str,
) -> Callable[[DataFrame, int], None]:
    """Returns a function for `writeStream.foreachBatch` that calls `write_batch`.

    Raises `BadOption` for an option that identifies a write, such as `txnAppId`.
    """
    _check_options(options)

    def write(frame: DataFrame, batch_id: int) -> None:
        write_batch(
            frame, batch_id, name=name, query_name=query_name, root=root, topic=topic, **options
        )

    return write


def _check_options(options: Mapping[str, str]) -> None:
    refused = {name.lower() for name in ONCE}
    for option, value in options.items():
        if option.lower() in refused:
            reason = (
                "the name, the query's id and the micro-batch's number identify the write: remove"
                " the option, or write without this helper"
            )
            raise errors.BadOption(option=option, value=value, reason=reason)


def _query_id(session: SparkSession, query_name: str) -> str:
    try:
        context = session.sparkContext
    except AttributeError:  # Spark Connect
        return _id_of(session, query_name)
    found: str | None = context.getLocalProperty(QUERY_ID)
    if found is None:
        raise errors.BadRequest(
            reason="no streaming query runs on this thread: call write_batch where Spark calls"
            " your function, or set the options txnAppId and txnVersion yourself"
        )
    return found


def _id_of(session: SparkSession, query_name: str) -> str:
    for query in session.streams.active:
        if query.name == query_name:
            return str(query.id)
    raise errors.BadRequest(
        reason=f"no active query is named {query_name!r}: in Spark Connect a query is found"
        f" only by its name: set it with writeStream.queryName({query_name!r}). As of Spark 4.3,"
        " the function finds no query there: use frame.write with the options txnAppId and"
        " txnVersion"
    )
