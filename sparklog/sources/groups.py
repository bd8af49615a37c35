"""A stream's progress, committed to a consumer group, so that its lag shows as any consumer's does.

It is a report, for which a query must never wait, nor end: a thread of its own commits the newest
position, one commit at a time, no oftener than every `GROUP_REPORT_SECONDS`. What fails is told
once, and tried again. No broker is started for it: where none lives, the report waits for one.

Only what has changed is committed, and from time to time the rest, because offsets expire that
nobody commits again.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from sparklog import errors, limits, wire
from sparklog.sources.offsets import Position
from sparklog.sources.options import Place

if TYPE_CHECKING:
    from sparklog.client.connection import Connection

_log = logging.getLogger("sparklog.sources")

Progress: TypeAlias = Mapping[tuple[str, int], tuple[str, int]]
"""By topic and partition: the topic's id, and the next offset to be read."""


class GroupReporter:
    """Commits where a stream is. Its methods raise nothing.

    Args:
        group: its name.
        send: commits what it is given, or raises; called in a thread of the reporter's.
        interval_seconds: from one commit to the next, at least.
        retry_seconds: the same after one that has failed.
        again_seconds: after so long all is committed, and not only what has changed.
    """

    def __init__(
        self,
        group: str,
        send: Callable[[Progress], None],
        *,
        interval_seconds: float = limits.GROUP_REPORT_SECONDS,
        retry_seconds: float = limits.GROUP_REPORT_RETRY_SECONDS,
        again_seconds: float = limits.GROUP_REPORT_AGAIN_SECONDS,
    ) -> None:
        self._group = group
        self._send = send
        self._interval_seconds = interval_seconds
        self._retry_seconds = retry_seconds
        self._again_seconds = again_seconds
        self._changed = threading.Condition()
        self._told: Progress = {}
        self._stands: dict[tuple[str, int], tuple[str, int]] = {}
        """What the group has of us, and needs not to be told again yet."""
        self._again_at = time.monotonic() + again_seconds
        self._next_at = -float("inf")
        self._hurried = False
        self._failures = 0
        self._warned: set[str] = set()
        """Codes of errors, since the last success."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def tell(self, position: Position) -> None:
        """The stream is there. Returns at once."""
        with self._changed:
            self._told = {
                (topic, number): (each.id, offset)
                for topic, each in position.items()
                for number, offset in each.offsets.items()
            }
            if time.monotonic() >= self._again_at:
                self._again_at = time.monotonic() + self._again_seconds
                self._stands.clear()
            if self._closed or not self._due():
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="sparklog-group", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> None:
        """Commits now, and waits until what was told stands or an attempt has failed."""
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
        """Flushes, and ends the thread, but for an attempt that it is in."""
        self.flush(timeout_seconds)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _due(self) -> Progress:
        return {place: at for place, at in self._told.items() if self._stands.get(place) != at}

    def _run(self) -> None:
        while (due := self._next()) is not None:
            error: Exception | None = None
            try:
                self._send(due)
            except Exception as failure:
                error = failure
            with self._changed:
                if error is None:
                    self._stands.update(due)
                    self._warned.clear()
                else:
                    self._next_at = time.monotonic() + self._retry_seconds
                    self._failures += 1
                    self._warn(error)
                self._changed.notify_all()

    def _next(self) -> Progress | None:
        """What is to be committed, once it is time to; None: that was all."""
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
            reason = "it has members"
            advice = " (stop them, or let commitToGroup name a group of the query's own)"
        _log.warning(
            "the query goes on, but where it is cannot be committed to group %r: %s%s;"
            " trying again every %g s",
            self._group,
            reason,
            advice,
            self._retry_seconds,
        )


# ------------------------------------------------------------------------------ by a broker


def sender(place: Place, group: str) -> Callable[[Progress], None]:
    """Commits to `group` through the broker at `place`, or whichever lives on its root.

    What it returns raises what `Connection.action` raises: `BrokerUnavailable` at once where no
    broker lives, `MemberFenced` where the group has members.
    """
    note = f"Spark on {socket.gethostname()}"

    def send(progress: Progress) -> None:
        connection = _connection(place)
        ids = {
            topic: _topic_id(connection, topic) for topic in dict.fromkeys(t for t, _ in progress)
        }
        offsets = [
            wire.GroupOffset(
                topic=topic, partition=number, offset=offset, metadata=note, topic_id=topic_id
            )
            for (topic, number), (topic_id, offset) in progress.items()
            if topic_id == ids[topic]
        ]
        if offsets:
            connection.action(
                "groups.commit",
                wire.CommitOffsets(group=group, offsets=offsets),
                timeout_seconds=limits.GROUP_REPORT_TIMEOUT_SECONDS,
            )

    return send


def _topic_id(connection: Connection, topic: str) -> str | None:
    """None where there is no such topic any more."""
    try:
        info: wire.TopicInfo = connection.attempt(
            "topics.describe",
            wire.TopicName(topic=topic),
            timeout_seconds=limits.GROUP_REPORT_TIMEOUT_SECONDS,
        )
    except errors.UnknownTopic:
        return None
    return info.topic_id


@functools.lru_cache(maxsize=4)
def _connection(place: Place) -> Connection:
    """Made in the reporter's thread: what it loads takes a while."""
    if place.bootstrap is not None:
        from sparklog.sources.brokers import connection

        return connection(place.bootstrap)
    from sparklog.session import visit

    assert place.root is not None
    return visit(place.root, storage_options=dict(place.storage))
