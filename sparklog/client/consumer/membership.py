"""Membership of a consumer in its group: joins, heartbeats, commits, topic changes.

Two threads share a `Membership`. The consumer's own thread does what its user must see in order: it
commits, gives up partitions and takes over new ones, and calls `next_step` whenever `calls` is set.
The membership's thread makes the calls to the coordinator that may take a long time: it joins and
syncs, sends heartbeats, commits offsets handed over by the other thread, and checks the topics. So
a slow consumer stays a member, with up to `max_poll_interval_seconds` between two polls.

The rules are those of Kafka's consumers (`ConsumerCoordinator`, `AbstractCoordinator`). With the
eager protocol all partitions are given up before each join. With the cooperative one (KIP-429),
which a consumer uses if all its assignors support it, it joins with the partitions that it owns. A
member without an instance id is assigned its member id before it joins (KIP-394).
"""

from __future__ import annotations

import enum
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from sparklog import errors, limits
from sparklog.client import arguments
from sparklog.client.connection import Connection, RetryLog, may_pass
from sparklog.client.consumer import assignors
from sparklog.client.offsets import OffsetAndMetadata, TopicPartition, describe
from sparklog.formats import flight_messages, group_messages
from sparklog.formats.topic_names import INTERNAL_TOPICS

_GROUP_ANSWER_SECONDS = 30.0  # beyond the time that members have to join

_log = logging.getLogger(__name__)


class GroupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a member; `Consumer` documents each of them."""

    group: str
    instance_id: str | None = None
    client_id: str = "sparklog"
    assignors: tuple[str, ...] = ("range", "roundrobin")
    session_timeout_seconds: float = limits.SESSION_TIMEOUT_SECONDS
    heartbeat_seconds: float = limits.GROUP_HEARTBEAT_SECONDS
    max_poll_interval_seconds: float = limits.MAX_POLL_INTERVAL_SECONDS
    auto_commit: bool = True
    auto_commit_seconds: float = limits.AUTO_COMMIT_SECONDS
    metadata_age_seconds: float = limits.METADATA_AGE_SECONDS

    @property
    def is_cooperative(self) -> bool:
        """True if the member keeps its partitions when it rejoins."""
        return set(self.assignors) <= assignors.COOPERATIVE

    def check(self) -> None:
        """Raises `BadOption`."""
        arguments.text("group", self.group)
        if self.instance_id is not None:
            arguments.text("instance_id", self.instance_id)
        for name in self.assignors:
            if name not in assignors.ASSIGNORS:
                reason = f"expected some of {', '.join(assignors.ASSIGNORS)}"
                raise errors.BadOption(option="assignors", value=name, reason=reason)
        if not self.assignors:
            raise errors.BadOption(option="assignors", value="[]", reason="name at least one")
        for name in (
            "heartbeat_seconds",
            "session_timeout_seconds",
            "max_poll_interval_seconds",
            "auto_commit_seconds",
        ):
            arguments.number(name, getattr(self, name), above=0)
        if self.heartbeat_seconds >= self.session_timeout_seconds:
            raise errors.BadOption(
                option="heartbeat_seconds",
                value=self.heartbeat_seconds,
                reason="expected less than session_timeout_seconds ="
                f" {self.session_timeout_seconds}",
            )


class Topics:
    """Subscription of a consumer: names, or a pattern that matches whole names."""

    def __init__(self, topics: str | Iterable[str] | re.Pattern[str] | None) -> None:
        self.pattern = topics if isinstance(topics, re.Pattern) else None
        self._names: list[str] = []
        if isinstance(topics, str):
            self._names = [topics]
        elif topics is not None and not isinstance(topics, re.Pattern):
            what = "the name of a topic, a list of names, or a compiled pattern"
            self._names = arguments.each(
                "topics", topics, lambda _, name: arguments.topic(name), what
            )
            if not self._names:
                raise errors.BadOption(option="topics", value="[]", reason=f"expected {what}")

    def check_some(self) -> None:
        """Raises `BadOption` if there is nothing to subscribe to."""
        if self.pattern is None and not self._names:
            reason = "expected the name of a topic, a list of names, or a compiled pattern"
            raise errors.BadOption(option="topics", value=None, reason=reason)

    def names(self, connection: Connection) -> list[str]:
        """Returns the names, or the topics that match the pattern now.

        No pattern matches internal topics, as with Kafka's `exclude.internal.topics`.
        """
        if self.pattern is None:
            return self._names
        found: flight_messages.TopicNames = connection.action("topics.list")
        return sorted(
            name
            for name in found.topics
            if self.pattern.fullmatch(name) and name not in INTERNAL_TOPICS
        )


class Assigned(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """This member's assignment in one generation."""

    partitions: list[TopicPartition]
    infos: dict[str, flight_messages.TopicInfo]
    committed: dict[TopicPartition, int]
    """Offsets that the group has committed, for all topics."""


class Step(enum.Enum):
    """Next step of the consumer's thread."""

    NOTHING = enum.auto()
    WAIT = enum.auto()
    COMMIT = enum.auto()
    """Call `commit_soon` with its positions."""
    JOIN = enum.auto()
    """Call `join` with its partitions, and keep reading them."""
    GIVE_UP = enum.auto()
    """Give up all partitions, and call `join` without any."""
    TAKE_OVER = enum.auto()
    """Take over `assigned`, and call `took_over`."""


class _Phase(enum.Enum):
    OUT = enum.auto()
    JOINING = enum.auto()
    MEMBER = enum.auto()


class Membership:
    """Membership of one consumer in `options.group`.

    Args:
        connection: to the brokers.
        options: checked.
        topics: the subscription.
        wake: called on the membership's thread after it has set `calls`.
    """

    def __init__(
        self,
        connection: Connection,
        options: GroupOptions,
        topics: Topics,
        wake: Callable[[], None],
    ) -> None:
        self.options = options
        self.calls = True
        """True if the consumer has something to do: call `next_step`."""
        self.polled_at = connection.clock.monotonic()
        """The last time at which the consumer was asked for records."""
        self.is_polled = False
        """True while the consumer is being asked for records."""
        self.committed: dict[TopicPartition, int] = {}
        """The committed offsets that this member knows of."""
        self.member_id = ""
        self._connection = connection
        self._clock = connection.clock
        self._topics = topics
        self._wake = wake
        self._changed = threading.Condition()
        self._committing = threading.Lock()
        """Held during a commit: an older one must not take effect after a newer one."""
        self._phase = _Phase.OUT
        self._generation = -1
        self._assigned: Assigned | None = None
        self._topic_ids: dict[str, str] = {}
        """Ids of the topics in the assignment that was taken over, by name."""
        self._owned: list[TopicPartition] = []
        """The partitions that it keeps while it joins."""
        self._must_rejoin = False
        self._is_lost = False
        self._failure: errors.SparklogError | None = None
        self._is_final = False
        """True once every call raises the failure."""
        self._join_is_wanted = False
        self._to_commit: dict[TopicPartition, int] | None = None
        self._is_ending = False
        self._has_left = False
        self._subscribed: list[str] = []
        """The topics that the member subscribed to in this generation."""
        self._counts: dict[str, int] | None = None
        """Partition counts by topic as of when this member, as the leader, assigned them."""
        self._heartbeat_at = self._commit_at = self._check_topics_at = 0.0
        self._thread: threading.Thread | None = None
        _memberships.add(self)

    # -------------------------------------------------------------------------- for the consumer

    def next_step(self) -> Step:
        """Raises the failure that ended the membership, once; the step after that rejoins."""
        with self._changed:
            if self._is_lost:
                return Step.GIVE_UP
            if self._must_rejoin:
                return Step.JOIN if self.options.is_cooperative else Step.GIVE_UP
            if self._failure is not None:
                failure = self._failure
                if not self._is_final:
                    self._failure = None
                raise failure.with_traceback(None)
            if self._phase is _Phase.OUT:
                return Step.GIVE_UP
            if self._phase is _Phase.JOINING and not self._owned:
                return Step.WAIT
            if self._assigned is not None:
                return Step.TAKE_OVER
            if self._is_commit_due() and self._phase is _Phase.MEMBER:
                return Step.COMMIT
            self.calls = False
            return Step.NOTHING

    @property
    def is_member(self) -> bool:
        """True if it has partitions of the group, perhaps lost but not yet given up."""
        return self._phase is _Phase.MEMBER or bool(self._owned)

    @property
    def is_lost(self) -> bool:
        """True if the group has removed this member, which can no longer commit."""
        return self._is_lost

    @property
    def assigned(self) -> Assigned:
        """The assignment to be taken over."""
        assert self._assigned is not None
        return self._assigned

    def join(self, owned: Iterable[TopicPartition] = ()) -> None:
        """Joins the next generation, with the partitions that it keeps during the rebalance."""
        with self._changed:
            self._must_rejoin = self._is_lost = False
            self._assigned = None
            self._owned = list(owned)
            self._phase = _Phase.OUT
            if self._failure is not None or self._is_ending:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="sparklog-group", daemon=True)
                thread.start()
                self._thread = thread
            self._phase = _Phase.JOINING
            self._join_is_wanted = True
            self._changed.notify_all()

    def took_over(self) -> None:
        with self._changed:
            if self._assigned is not None:
                self.committed = self._assigned.committed
                infos = self._assigned.infos
                self._topic_ids = {name: each.topic_id for name, each in infos.items()}
            self._assigned = None
            self._owned = []
            self._commit_at = self._clock.monotonic() + self.options.auto_commit_seconds

    def wait(self, deadline: float | None) -> bool:
        """Waits for a step other than `WAIT`; returns False at `deadline`, monotonic seconds."""
        with self._changed:
            return self._wait_for(lambda: self._phase is not _Phase.JOINING, deadline)

    def commit_soon(self, offsets: dict[TopicPartition, int]) -> None:
        """Commits in the background; a failure is logged, and the commit retried later."""
        with self._changed:
            self._commit_at = self._clock.monotonic() + self.options.auto_commit_seconds
            if offsets:
                self._to_commit = offsets
                self._changed.notify_all()

    def wait_for_commit(self, deadline: float | None) -> bool:
        """Waits until `commit_soon` has committed or failed; returns False at `deadline`."""
        with self._changed:
            return self._wait_for(lambda: self._to_commit is None or self._is_ending, deadline)

    def commit(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        """Returns when the offsets are durable.

        Raises:
            errors.MemberFenced: the group has removed this member.
            errors.GroupBusy: the group is rebalancing.
            errors.GroupRefused: a partition does not exist, or metadata is too long.
            errors.Retriable: no response in time, and no effect.
            errors.OutcomeUnknown: no response in time, and possibly an effect.
            errors.BadRequest: the consumer has not joined yet.
        """
        with self._committing:
            with self._changed:
                self._to_commit = None  # this one is newer
                self._changed.notify_all()
                if self._is_lost:
                    raise self._fenced("UNKNOWN_MEMBER_ID")
                is_joining = self._phase is _Phase.JOINING
                if is_joining and not self._owned:
                    raise self._busy()
                if self._phase is _Phase.OUT:
                    raise errors.BadRequest(
                        reason=f"not in group {self.options.group!r}: poll first, to join it"
                    )
                request = self._commit_request(offsets)
            try:
                self._connection.action("groups.commit", request, timeout_seconds=timeout_seconds)
            except errors.MemberFenced as error:
                if is_joining:
                    # The next generation has begun; the join shows if it includes this member.
                    raise self._busy() from error
                self._lose(error)
                raise
            self._note(offsets)

    def fetch_committed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Returns the offsets that the group has committed, for all topics."""
        request = group_messages.GroupName(group=self.options.group)
        found: group_messages.GroupOffsets = self._connection.action("groups.offsets", request)
        return {
            (each.topic, each.partition): OffsetAndMetadata(each.offset, each.metadata)
            for each in found.offsets
        }

    def close(self) -> None:
        """Leaves the group, unless it is a static member, and stops the thread."""
        with self._changed:
            self._is_ending = self._is_final = True
            self._failure = errors.BadRequest(reason="the consumer is closed")
            self._must_rejoin = self._is_lost = False
            self._owned = []
            self.calls = True
            phase, self._phase = self._phase, _Phase.OUT
            self._changed.notify_all()
        if phase is not _Phase.OUT:
            self._leave()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limits.GROUP_CLOSE_SECONDS)

    def abandon(self) -> None:
        """Has the thread leave and stop. Acquires no lock, because a finalizer may call it."""
        self._is_ending = True

    def after_fork(self) -> None:
        """Makes every call fail in a child process, which does not have the thread."""
        self._changed = threading.Condition()
        self._committing = threading.Lock()
        self._thread = None
        self._phase = _Phase.OUT
        self._must_rejoin = self._is_lost = False
        self._owned = []
        self._to_commit = None
        self._failure = errors.BadRequest(reason="this consumer belongs to the parent process")
        self._is_final = self._has_left = self._is_ending = self.calls = True

    # -------------------------------------------------------------------------- the other thread

    def _run(self) -> None:
        while not self._is_ending:
            try:
                self._work()
            except Exception as error:
                # A bug in our code must not leave the consumer waiting.
                _log.exception("a membership failed")
                self._fail(errors.UnexpectedError(reason=f"the membership failed: {error!r}"))
        self._leave()

    def _work(self) -> None:
        with self._changed:
            if not (self._is_ending or self._join_is_wanted or self._to_commit is not None):
                self._clock.wait_until(self._changed, self._wake_at())
            offsets, joins = self._to_commit, self._join_is_wanted
            self._join_is_wanted = False
        if self._is_ending:
            return
        if offsets is not None:
            self._commit(offsets)
        if joins:
            self._join()
        elif self._phase is _Phase.MEMBER and not self._is_lost:
            self._stay()

    def _wake_at(self) -> float:
        if self._phase is not _Phase.MEMBER or self._is_lost:
            return self._clock.monotonic() + self.options.heartbeat_seconds
        next_at = min(self._heartbeat_at, self._check_topics_at)
        if self.options.auto_commit and not self.calls:
            next_at = min(next_at, self._commit_at)
        return next_at

    def _stay(self) -> None:
        options = self.options
        if self._heartbeat_at <= self._clock.monotonic():
            self._heartbeat_at = self._clock.monotonic() + options.heartbeat_seconds
            self._heartbeat()
        if self._check_topics_at <= self._clock.monotonic():
            self._check_topics_at = self._clock.monotonic() + options.metadata_age_seconds
            self._check_topics()
        if self._is_commit_due() and not self.calls:
            self._call()
        idle_seconds = self._clock.monotonic() - self.polled_at
        if not self.is_polled and idle_seconds > options.max_poll_interval_seconds:
            _log.warning(
                "the consumer was not polled for %.0f s, more than max_poll_interval_seconds:"
                " it leaves group %r, and rejoins when it is polled",
                idle_seconds,
                options.group,
            )
            self._leave()
            self._lose(self._fenced("UNKNOWN_MEMBER_ID"))

    def _is_commit_due(self) -> bool:
        return self.options.auto_commit and self._commit_at <= self._clock.monotonic()

    def _heartbeat(self) -> None:
        request = group_messages.GroupHeartbeat(
            group=self.options.group,
            member_id=self.member_id,
            instance_id=self.options.instance_id,
            generation=self._generation,
        )
        try:
            state: group_messages.GroupHeartbeatReply = self._attempt("groups.heartbeat", request)
        except errors.MemberFenced as error:
            self._lose(error)
        except errors.SparklogError as error:
            # If it was too late, the next heartbeat is rejected.
            _log.warning("a heartbeat for group %r failed: %s", self.options.group, error)
        else:
            if state.rebalancing:
                self._call_to_rejoin("it is rebalancing")

    def _check_topics(self) -> None:
        """Requests a new generation if the topics have changed."""
        try:
            if self._topics.names(self._connection) != self._subscribed:
                self._call_to_rejoin("different topics match its pattern")
            elif self._counts is not None and self._count(self._counts) != self._counts:
                self._call_to_rejoin("partitions of its topics were added or deleted")
        except errors.SparklogError as error:
            _log.warning("cannot check the topics of group %r: %s", self.options.group, error)

    # -------------------------------------------------------------------------- joining

    def _join(self) -> None:
        backoff, log = self._connection.backoff(), RetryLog(self._clock)
        while not self._is_ending:
            try:
                assigned = self._join_once()
            except errors.MemberFenced as error:
                if _is_replaced(error):
                    self._fail(error)
                    return
                if error.error == "UNKNOWN_MEMBER_ID":
                    self.member_id = ""
                self._generation = -1
                if self._owned:
                    # The group may have assigned them to other members.
                    self._lose(error)
                    return
                failure: errors.SparklogError = error
            except errors.SparklogError as error:
                if not may_pass(error):
                    self._fail(error)
                    return
                # It is normal for other members to join and leave.
                if not isinstance(error, errors.GroupBusy) and log.is_due():
                    _log.warning("retrying to join group %r: %s", self.options.group, error)
                failure = error
            else:
                self._joined(assigned)
                return
            self._pause(backoff.next_seconds(failure))

    def _join_once(self) -> Assigned:
        """Returns the assignment, once the next generation has begun."""
        options, names = self.options, self._topics.names(self._connection)
        request = group_messages.JoinGroup(
            group=options.group,
            member_id=self.member_id,
            instance_id=options.instance_id,
            client_id=options.client_id,
            session_timeout_ms=round(options.session_timeout_seconds * 1e3),
            rebalance_timeout_ms=round(options.max_poll_interval_seconds * 1e3),
            protocol_type=assignors.PROTOCOL_TYPE,
            protocols=[
                group_messages.GroupProtocol(
                    name=name,
                    metadata=assignors.encode_subscription(
                        names, owned=self._owned, generation=self._generation
                    )
                    if name in assignors.COOPERATIVE
                    else assignors.encode_subscription(names),
                )
                for name in options.assignors
            ],
            member_id_required=True,
        )
        patience_seconds = options.max_poll_interval_seconds + _GROUP_ANSWER_SECONDS
        joined: group_messages.JoinedGroup = self._attempt("groups.join", request, patience_seconds)
        self._learn_id(joined.member_id)
        if joined.generation < 0:
            if self._is_ending:  # `close` did not know the id, so we leave
                raise self._busy()
            request = msgspec.structs.replace(request, member_id=joined.member_id)
            joined = self._attempt("groups.join", request, patience_seconds)
            self._learn_id(joined.member_id)
        counts, assignments = self._assign(joined)
        sync = group_messages.SyncGroup(
            group=options.group,
            member_id=joined.member_id,
            instance_id=options.instance_id,
            generation=joined.generation,
            assignments=assignments,
        )
        synced: group_messages.SyncedGroup = self._attempt("groups.sync", sync, patience_seconds)
        assigned = self._prepared(assignors.decode_assignment(synced.assignment))
        self._generation, self._subscribed, self._counts = joined.generation, names, counts
        return assigned

    def _learn_id(self, member_id: str) -> None:
        with self._changed:
            self.member_id, self._has_left = member_id, False

    def _assign(
        self, joined: group_messages.JoinedGroup
    ) -> tuple[dict[str, int] | None, dict[str, bytes]]:
        """Returns, as the leader, partition counts by topic, and each member's assignment."""
        if not joined.members:  # only the leader receives them
            return None, {}
        members = [
            assignors.decode_member(each.member_id, each.instance_id, each.metadata)
            for each in joined.members
        ]
        counts = self._count({topic for member in members for topic in member.topics})
        if joined.leader != joined.member_id:  # it has rejoined; the assignment is valid (KIP-814)
            return counts, {}
        found = assignors.ASSIGNORS[joined.protocol](counts, members)
        return counts, {
            member_id: assignors.encode_assignment(partitions)
            for member_id, partitions in found.items()
        }

    def _count(self, topics: Iterable[str]) -> dict[str, int]:
        """Returns the number of partitions of each topic; 0 if it does not exist."""
        counts = {}
        for topic in topics:
            request = flight_messages.TopicName(topic=topic)
            try:
                # Not `describe`: a partition that no broker serves must not block the group.
                counts[topic] = len(self._attempt("topics.describe", request).partitions)
            except errors.UnknownTopic:
                counts[topic] = 0
        return counts

    def _prepared(self, partitions: list[TopicPartition]) -> Assigned:
        # The committed offsets first: the ends that are fetched after them are not below them.
        request = group_messages.GroupName(group=self.options.group)
        committed = _offsets(self._attempt("groups.offsets", request))
        infos = {}
        for topic in {topic for topic, _ in partitions}:
            try:
                infos[topic] = describe(self._connection, topic)
            except errors.UnknownTopic as error:
                _log.warning("group %r: %s", self.options.group, error)
        there = [
            (topic, number)
            for topic, number in partitions
            if topic in infos and number < len(infos[topic].partitions)
        ]
        return Assigned(partitions=there, infos=infos, committed=committed)

    def _joined(self, assigned: Assigned) -> None:
        now = self._clock.monotonic()
        self._heartbeat_at = now + self.options.heartbeat_seconds
        self._check_topics_at = now + self.options.metadata_age_seconds
        with self._changed:
            if self._is_ending:
                return
            self._assigned = assigned
            self._phase = _Phase.MEMBER
            # If its poll has returned by now, the interval begins now.
            self.polled_at = now
            self._changed.notify_all()
        self._call()

    # -------------------------------------------------------------------------- other events

    def _call(self) -> None:
        """Wakes the consumer; never under the lock, because the consumer may hold the fetcher's."""
        self.calls = True
        self._wake()

    def _call_to_rejoin(self, why: str) -> None:
        _log.info("group %r: %s", self.options.group, why)
        with self._changed:
            self._must_rejoin = self._phase is _Phase.MEMBER
        self._call()

    def _lose(self, error: errors.MemberFenced) -> None:
        """Records that the group has removed this member."""
        if _is_replaced(error):
            self._fail(error)
            return
        _log.warning("%s; it rejoins", error)
        with self._changed:
            if self.is_member:
                self._phase, self._is_lost = _Phase.MEMBER, True
            if error.error == "UNKNOWN_MEMBER_ID":
                self.member_id = ""
            self._changed.notify_all()
        self._call()

    def _fail(self, error: errors.SparklogError) -> None:
        with self._changed:
            if self._is_ending:
                return
            self._failure = error
            # Rejoining would in turn replace the process that has replaced this one.
            self._is_final = isinstance(error, errors.MemberFenced)
            self._is_lost = self.is_member
            self._phase = _Phase.OUT
            if self._is_final:
                self.member_id = ""
            self._to_commit = None
            self._changed.notify_all()
        self._call()

    def _commit(self, offsets: dict[TopicPartition, int]) -> None:
        """Commits the offsets that the consumer has handed over."""
        backoff, log = self._connection.backoff(), RetryLog(self._clock)
        deadline = self._clock.monotonic() + self._answer_seconds
        while not self._is_ending:
            try:
                with self._committing:
                    if self._to_commit is not offsets:  # a newer commit has replaced it
                        return
                    self._attempt("groups.commit", self._commit_request(offsets))
                    self._note(offsets)
                break
            except errors.MemberFenced as error:
                self._lose(error)
                break
            except errors.SparklogError as error:
                if log.is_due():
                    _log.warning("a commit of group %r failed: %s", self.options.group, error)
                if not may_pass(error) or self._clock.monotonic() > deadline:
                    break
                wait_seconds = backoff.next_seconds(error)
            self._pause(wait_seconds)
        with self._changed:
            if self._to_commit is offsets:
                self._to_commit = None
                self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            member_id, has_left = self.member_id, self._has_left
            self._has_left = True
        if not member_id or has_left or self.options.instance_id is not None:
            return
        request = group_messages.LeaveGroup(group=self.options.group, member_id=member_id)
        try:
            self._connection.action(
                "groups.leave", request, timeout_seconds=limits.GROUP_CLOSE_SECONDS
            )
        except errors.SparklogError as error:
            _log.info("leaving group %r failed: %s", self.options.group, error)

    # -------------------------------------------------------------------------- requests

    @property
    def _answer_seconds(self) -> float:
        """The maximum time for an answer, after which there is still time for a retry."""
        return self.options.session_timeout_seconds / 3

    def _attempt(
        self, name: str, request: msgspec.Struct, timeout_seconds: float | None = None
    ) -> Any:
        seconds = self._answer_seconds if timeout_seconds is None else timeout_seconds
        return self._connection.attempt(name, request, timeout_seconds=seconds)

    def _wait_for(self, holds: Callable[[], bool], deadline: float | None) -> bool:
        """Returns False if `deadline` passes first. Requires `_changed`."""
        while not holds():
            if deadline is not None and deadline <= self._clock.monotonic():
                return False
            self._clock.wait_until(self._changed, deadline)
        return True

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._is_ending:
                self._clock.wait_until(self._changed, self._clock.monotonic() + seconds)

    def _commit_request(
        self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]
    ) -> group_messages.CommitOffsets:
        return group_messages.CommitOffsets(
            group=self.options.group,
            member_id=self.member_id,
            instance_id=self.options.instance_id,
            generation=self._generation,
            offsets=[
                group_messages.GroupOffset(
                    topic=topic,
                    partition=number,
                    offset=_offset(each),
                    metadata="" if isinstance(each, int) else each.metadata,
                    # Offsets of a topic that has since been re-created refer to other records.
                    topic_id=self._topic_ids.get(topic, ""),
                )
                for (topic, number), each in offsets.items()
            ],
        )

    def _note(self, offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> None:
        with self._changed:
            self.committed |= {key: _offset(each) for key, each in offsets.items()}

    def _busy(self) -> errors.GroupBusy:
        return errors.GroupBusy(group=self.options.group, error="REBALANCE_IN_PROGRESS")

    def _fenced(self, error: str) -> errors.MemberFenced:
        return errors.MemberFenced(group=self.options.group, member_id=self.member_id, error=error)


def _is_replaced(error: errors.MemberFenced) -> bool:
    """Returns whether another process has joined as the same static member."""
    return bool(error.error == "FENCED_INSTANCE_ID")


def _offset(committed: int | OffsetAndMetadata) -> int:
    return committed if isinstance(committed, int) else committed.offset


def _offsets(found: group_messages.GroupOffsets) -> dict[TopicPartition, int]:
    return {(each.topic, each.partition): each.offset for each in found.offsets}


# ------------------------------------------------------------------------------ forks

_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for membership in list(_memberships):
        membership.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
