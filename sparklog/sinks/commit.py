"""Commits a batch: one manifest decides its contents, and the brokers append them.

A commit that is repeated after a crash finds the same manifest and completes it; a broker
recognises a batch by its id, and skips one that it has already appended. If several brokers lead
the partitions, each appends its part, and a receipt next to the manifest records that all have done
so.
Rows that were staged for a topic that has been deleted since are dropped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from sparklog import errors, limits
from sparklog.clock import SystemClock
from sparklog.formats import flight_messages
from sparklog.formats.topic_names import unknown_topic
from sparklog.storage.objects import ObjectMissing, Store, open_store
from sparklog.storage.snapshot import BatchKind
from sparklog.storage.staging import manifest, query_run
from sparklog.storage.staging.manifest import Destinations, Manifest, Section
from sparklog.storage.staging.query_run import QueryRun

if TYPE_CHECKING:
    from sparklog.client.connection import Connection
    from sparklog.client.log import Log

_log = logging.getLogger("sparklog.sinks")


def commit(
    root: str,
    storage: Mapping[str, str],
    *,
    query: str,
    batch: int,
    sections: Sequence[Section],
    topics: Destinations,
    kind: BatchKind = BatchKind.NUMBERED,
    run: str = "",
    fails_on_different_rerun: bool = False,
) -> None:
    """Appends the batch, including any part that an earlier run left unfinished.

    Raises `BadRequest` if the batch was given up, is in other topics, was decided with different
    numbers of rows, or belongs to a run that has been replaced, `UnknownTopic` if a topic has been
    deleted, `Retriable` if no broker could be reached, and `OutcomeUnknown`: after these two,
    commit again.

    Args:
        root: the root.
        storage: options of its store.
        query: the query of the batch.
        batch: its number.
        sections: the rows that the tasks have staged.
        topics: those that exist.
        kind: how the batch may be repeated.
        run: the run of a streaming query; empty if the write belongs to none.
        fails_on_different_rerun: whether different numbers of rows are an error, or a warning.
    """
    store = open_store(root, storage)
    ours = Manifest(
        query=query,
        batch=batch,
        sections=tuple(sections),
        kind=kind,
        attempt=_attempt(store, query, batch, sections, topics),
        topic_ids=_topic_ids(sections, topics),
        run=run,
    )
    if not sections and not _stands(store, ours.path):
        return
    known = query_run.load(store, query) if run else None
    if known is not None and run in known.replaced:
        store.delete(section.path for section in sections if section.rows)
        raise _replaced(ours, by=known.run)
    decided = _decide(store, ours)
    kept = {section.path for section in decided.sections} if decided else set()
    store.delete({section.path for section in sections if section.rows} - kept)
    if decided is not None:
        _check_topics(ours, {section.topic for section in decided.sections})
        _check_run(ours, decided, known)
        _check_rows(ours, decided, topics, fails=fails_on_different_rerun)
    if known is None or known.run != run:
        _begin(store, ours, known)
    if decided is not None and not decided.sections:
        return
    receipt = None if decided is ours else manifest.find_receipt(store, ours)
    if receipt is not None:
        is_repeated, holders = True, receipt.holders(topics)
    else:
        connection = _connect(root, tuple(sorted(storage.items()))).connection
        reply = append_everywhere(connection, ours.path)
        if reply.topic_ids:
            ranges = {name: reply.ranges[name] for name in reply.topic_ids if name in reply.ranges}
            receipt = manifest.Receipt(ranges=ranges, topic_ids=reply.topic_ids)
            receipt.put(store, ours, SystemClock())
        is_repeated, holders = reply.skipped, set(reply.ranges)
    if is_repeated:
        _check_topics(ours, holders)
        _log.warning("batch %d of %s was appended before and is not written again", batch, query)
    for name in sorted({each.topic for each in ours.sections} - holders):
        _log.warning(
            "the rows of this run of batch %d of %s for topic %s are not written: the batch had"
            " none for it when it was first staged, or the topic has been recreated since",
            batch,
            query,
            name,
        )


def append_everywhere(connection: Connection, path: str) -> flight_messages.AppendStagedReply:
    """Has all leaders of its partitions append the batch of a manifest.

    Any broker can name the leaders. Returns their merged replies; these name the topics' ids if the
    batch is in parts and so needs a receipt. Raises what `commit` raises; an error from one leader
    has a note if others have appended their part.
    """
    request = flight_messages.AppendStaged(manifest=path)
    retry = connection.retry(limits.SPARK_PATIENCE_SECONDS)
    known: flight_messages.AppendStagedReply = connection.action(
        "batches.append_staged", request, timeout_seconds=retry.left_seconds
    )
    if known.elsewhere:
        connection.brokers()  # to learn their addresses
    asked: set[int] = set()
    while left := _left(known):
        broker = left[0]
        try:
            if broker in asked:  # a partition is moving, and not all brokers know it yet
                raise errors.MetadataChanged
            asked.add(broker)
            reply: flight_messages.AppendStagedReply = connection.attempt(
                "batches.append_staged", request, timeout_seconds=retry.left_seconds, broker=broker
            )
            known = _merged(known, reply)
        except errors.SparklogError as error:
            try:
                retry.wait_or_raise(error)
            except errors.SparklogError:
                error.add_note(f"Appended so far, as first offset and count: {known.ranges}")
                raise
            asked.clear()
            with contextlib.suppress(errors.Retriable):  # any broker knows the leaders
                connection.brokers()
                known = _merged(
                    known,
                    connection.attempt(
                        "batches.append_staged", request, timeout_seconds=retry.left_seconds
                    ),
                )
    return known


def _left(reply: flight_messages.AppendStagedReply) -> list[int]:
    """Returns the leaders of the partitions whose rows are not known to be appended."""
    return sorted(
        {
            leader
            for topic, leaders in reply.elsewhere.items()
            for partition, leader in leaders.items()
            if partition not in reply.ranges.get(topic, {})
        }
    )


def _merged(
    known: flight_messages.AppendStagedReply, reply: flight_messages.AppendStagedReply
) -> flight_messages.AppendStagedReply:
    """Merges the replies. One that names no other leader covers the whole batch."""
    if not reply.elsewhere and not reply.topic_ids:
        return reply
    ranges = {name: dict(of_topic) for name, of_topic in known.ranges.items()}
    for name, of_topic in reply.ranges.items():
        ranges.setdefault(name, {}).update(of_topic)
    return msgspec.structs.replace(reply, ranges=ranges, skipped=known.skipped and reply.skipped)


def _topic_ids(sections: Iterable[Section], topics: Destinations) -> dict[str, str]:
    names = {each.topic for each in sections}
    for name in names - topics.keys():
        raise unknown_topic(name, topics)
    return {name: topics[name].topic_id for name in names}


def _attempt(
    store: Store, query: str, batch: int, sections: Sequence[Section], topics: Destinations
) -> int:
    """Returns the attempt that staged the sections. Raises `BadRequest` if there are two."""
    attempts = {manifest.attempt_of(section.path) for section in sections if section.rows}
    if len(attempts) > 1:
        raise errors.BadRequest(
            reason=f"batch {batch} of query {query} was given up while its tasks were staging it;"
            " start the query again"
        )
    return attempts.pop() if attempts else manifest.open_attempt(store, query, batch, topics)


def _decide(store: Store, ours: Manifest) -> Manifest | None:
    """Returns the manifest of the batch; None if a sweeper has refused it.

    The refused batch may be a failed rerun, long after the batch was appended and its manifest
    swept. Only the broker knows, so it is asked anyway, and rejects the batch if it is new.
    """
    try:
        return manifest.write(store, ours, SystemClock())
    except errors.BadRequest:
        if manifest.load(store, ours.path).refused:
            return None
        raise


def _check_topics(ours: Manifest, appended: Collection[str]) -> None:
    """Raises `BadRequest` if the batch was appended, but to none of the topics of this write.

    A rerun may distribute its rows differently, but this must be another query with a copy
    of the checkpoint.
    """
    wanted = {section.topic for section in ours.sections}
    if wanted and appended and wanted.isdisjoint(appended):
        raise errors.BadRequest(
            reason=f"batch {ours.batch} of query {ours.query} was previously written to"
            f" {_named(appended)}, and now goes to {_named(wanted)}: nothing was written. Two"
            " queries seem to share a checkpoint, or two writes a name: give this one its own"
        )


def _check_run(ours: Manifest, decided: Manifest, known: QueryRun | None) -> None:
    """Raises `BadRequest` if another run decided the batch while ours was writing.

    Only a run's first batch may already have been decided: by the run that it continues.
    """
    continues = known is None or known.run != ours.run or ours.batch <= known.first_batch
    if not continues and decided.run not in ("", ours.run):
        raise _replaced(ours, by=decided.run)


def _begin(store: Store, ours: Manifest, known: QueryRun | None) -> None:
    if not ours.run:
        return
    if known is None:
        begun = QueryRun(query=ours.query, run=ours.run, first_batch=ours.batch)
    else:
        begun = known.next(ours.run, ours.batch)
    begun.put(store)


def _replaced(ours: Manifest, *, by: str) -> errors.BadRequest:
    return errors.BadRequest(
        reason=f"query {ours.query} was started again: its run {by} now writes its batches, and"
        f" batch {ours.batch} of run {ours.run} was not written. If that run is another query with"
        " a copy of this one's checkpoint, stop one of them, and give each its own checkpoint, or"
        " a topic of its own"
    )


def _check_rows(ours: Manifest, decided: Manifest, topics: Destinations, *, fails: bool) -> None:
    """Raises `BadRequest` if the batch was decided with other numbers of rows, and ours has some.

    A restarted query reads the same records for a batch. Another query with a copy of its
    checkpoint does not, and its rows would be dropped.
    """
    wanted = _rows(ours)
    known = _rows(decided)
    for name in decided.topics_gone(topics):
        known.pop(name, None)
        wanted.pop(name, None)
    if not wanted or wanted == known:
        return
    reason = (
        f"batch {ours.batch} of query {ours.query} was already decided with {_counted(known)}, and"
        f" now has {_counted(wanted)}, which are not written. If another query has a copy of this"
        " query's checkpoint, give each one its own, or a topic of its own. If the query does not"
        " return the same rows for a batch each time, set failOnDifferentRerun=false: the rows that"
        " were staged first count"
    )
    if fails:
        raise errors.BadRequest(reason=reason)
    _log.warning("%s", reason)


def _rows(batch: Manifest) -> dict[str, int]:
    """Returns the number of rows by topic."""
    found: dict[str, int] = {}
    for each in batch.sections:
        found[each.topic] = found.get(each.topic, 0) + each.rows
    return found


def _counted(rows: Mapping[str, int]) -> str:
    counts = [f"{count:,} rows for {topic}" for topic, count in sorted(rows.items())]
    return ", ".join(counts) or "no rows"


def _named(topics: Iterable[str]) -> str:
    return ", ".join(sorted(topics))


def discard(root: str, storage: Mapping[str, str], sections: Iterable[Section]) -> None:
    """Removes the staged files of a batch whose commit was not attempted."""
    open_store(root, storage).delete({section.path for section in sections})


def _stands(store: Store, path: str) -> bool:
    try:
        store.stat(path)
    except ObjectMissing:
        return False
    return True


@functools.lru_cache(maxsize=4)
def _connect(root: str, storage: tuple[tuple[str, str], ...]) -> Log:
    """Returns the client; cached, since Spark may use a worker process for many commits."""
    from sparklog.connecting import connect  # not needed by tasks, which only stage

    return connect(root, detached=True, storage_options=dict(storage))
