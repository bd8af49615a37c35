"""Commits a stream's progress to a consumer group, so that tools can show its lag.

A query never waits for these commits and never fails because of them: a separate thread commits the
newest position, one commit at a time, at most every `_GROUP_REPORT_SECONDS`. A failure is logged
once and retried. No broker is started for this: without a live broker, the commit waits for one.

Only changed offsets are committed, plus all of them from time to time, because offsets expire
unless they are committed again.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from sparklog import errors
from sparklog.formats import flight_messages, group_messages
from sparklog.sources.offsets import Position
from sparklog.sources.options import LogLocation

if TYPE_CHECKING:
    from sparklog.client.connection import Connection

_GROUP_REPORT_SECONDS = 1.0  # the interval at which a stream commits to a group
_GROUP_REPORT_RETRY_SECONDS = 10.0  # after a failed attempt
_GROUP_REPORT_AGAIN_SECONDS = 3600.0  # repeats unchanged offsets, because they expire
_GROUP_REPORT_TIMEOUT_SECONDS = 10.0  # of one attempt

_log = logging.getLogger("sparklog.sources")

Progress: TypeAlias = Mapping[tuple[str, int], tuple[str, int]]
"""The topic's id and the next offset to read, by topic and partition."""


class GroupReporter:
    """Commits the position of a stream. Its methods never raise.

    Args:
        group: name of the group.
        send: commits its argument or raises; called in the reporter's thread.
        interval_seconds: minimum time between two commits.
        retry_seconds: minimum time after a failed commit.
        again_seconds: interval at which all offsets are committed, including unchanged ones.
    """

    def __init__(
        self,
        group: str,
        send: Callable[[Progress], None],
        *,
        interval_seconds: float = _GROUP_REPORT_SECONDS,
        retry_seconds: float = _GROUP_REPORT_RETRY_SECONDS,
        again_seconds: float = _GROUP_REPORT_AGAIN_SECONDS,
    ) -> None:
        self._group = group
        self._send = send
        self._interval_seconds = interval_seconds
        self._retry_seconds = retry_seconds
        self._again_seconds = again_seconds
        self._changed = threading.Condition()
        self._reported: Progress = {}
        self._committed: dict[tuple[str, int], tuple[str, int]] = {}
        """Offsets that the group already has and that need no commit for now."""
        self._again_at = time.monotonic() + again_seconds
        self._next_at = -float("inf")
        self._hurried = False
        self._failures = 0
        self._warned: set[str] = set()
        """Codes of the errors logged since the last success."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def report(self, position: Position) -> None:
        """Records the stream's position. Returns immediately."""
        with self._changed:
            self._reported = {
                (topic, number): (each.id, offset)
                for topic, each in position.items()
                for number, offset in each.offsets.items()
            }
            if time.monotonic() >= self._again_at:
                self._again_at = time.monotonic() + self._again_seconds
                self._committed.clear()
            if self._closed or not self._due():
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="sparklog-group", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> None:
        """Commits now, and waits until the position is committed or an attempt has failed."""
        with self._changed:
            if self._thread is None:
                return
            failures, self._hurried = self._failures, True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or not self._due() or self._failures > failures,
                timeout_seconds,
            )

    def close(self, timeout_seconds: float) -> None:
        """Flushes, then stops the thread without waiting for an in-flight commit."""
        self.flush(timeout_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _due(self) -> Progress:
        return {
            place: at for place, at in self._reported.items() if self._committed.get(place) != at
        }

    def _run(self) -> None:
        while (due := self._next()) is not None:
            error: Exception | None = None
            try:
                self._send(due)
            except Exception as failure:
                error = failure
            with self._changed:
                if error is None:
                    self._committed.update(due)
                    self._warned.clear()
                else:
                    self._next_at = time.monotonic() + self._retry_seconds
                    self._failures += 1
                    self._warn(error)
                self._changed.notify_all()

    def _next(self) -> Progress | None:
        """Waits until a commit is due, and returns it; returns None once the reporter is closed."""
        with self._changed:
            while not self._closed:
                due = self._due()
                wait_seconds = 0.0 if self._hurried else self._next_at - time.monotonic()
                if due and wait_seconds <= 0:
                    self._next_at = time.monotonic() + self._interval_seconds
                    self._hurried = False
                    return due
                self._changed.wait(wait_seconds if due else None)
            return None

    def _warn(self, error: Exception) -> None:
        code = error.code if isinstance(error, errors.SparklogError) else type(error).__name__
        if code in self._warned:
            return
        self._warned.add(code)
        reason, advice = str(error), ""
        if isinstance(error, errors.MemberFenced):
            reason = "the group has members"
            advice = " (stop them, or set commitToGroup to another group)"
        _log.warning(
            "the query's progress cannot be committed to group %r: %s%s; the query continues, and"
            " the commit is retried every %g s",
            self._group,
            reason,
            advice,
            self._retry_seconds,
        )


# ------------------------------------------------------------------------------ through a broker


def sender(location: LogLocation, group: str) -> Callable[[Progress], None]:
    """Returns a function that commits to `group` through the location's live broker.

    It raises what `Connection.action` raises: `BrokerUnavailable`, immediately, if no broker is
    live, and `MemberFenced` if the group has members.
    """
    note = f"Spark on {socket.gethostname()}"

    def send(progress: Progress) -> None:
        connection = _connection(location)
        ids = {
            topic: _topic_id(connection, topic) for topic in dict.fromkeys(t for t, _ in progress)
        }
        offsets = [
            group_messages.GroupOffset(
                topic=topic, partition=number, offset=offset, metadata=note, topic_id=topic_id
            )
            for (topic, number), (topic_id, offset) in progress.items()
            if topic_id == ids[topic]
        ]
        if offsets:
            connection.action(
                "groups.commit",
                group_messages.CommitOffsets(group=group, offsets=offsets),
                timeout_seconds=_GROUP_REPORT_TIMEOUT_SECONDS,
            )

    return send


def _topic_id(connection: Connection, topic: str) -> str | None:
    """Returns the topic's id, or None if the topic does not exist."""
    try:
        info: flight_messages.TopicInfo = connection.attempt(
            "topics.describe",
            flight_messages.TopicName(topic=topic),
            timeout_seconds=_GROUP_REPORT_TIMEOUT_SECONDS,
        )
    except errors.UnknownTopic:
        return None
    return info.topic_id


@functools.lru_cache(maxsize=4)
def _connection(location: LogLocation) -> Connection:
    """Returns the connection; called in the reporter's thread, because its imports take a while."""
    if location.bootstrap is not None:
        from sparklog.sources.brokers import connection

        return connection(location)
    from sparklog.connecting import visit

    assert location.root is not None
    return visit(location.root, storage_options=dict(location.storage))
