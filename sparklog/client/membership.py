"""A consumer's membership of its group: joining, staying alive, committing, noticing changes.

Two threads share a `Membership`. The consumer's own does what its user must see in order: it
commits, gives up partitions and takes new ones over, and for that asks `next_step` whenever `calls`
is set. The other, of the membership, says everything to the coordinator that may take long: it
joins and syncs, sends heartbeats, commits what the first one hands over, and looks at the topics.
So a slow consumer stays a member, up to `max_poll_interval_seconds` between two polls.

The rules are those of Kafka's consumers with the eager protocol (`ConsumerCoordinator`,
`AbstractCoordinator`): all partitions are given up before each new joining, and a member without
an instance id is told its member id before it joins (KIP-394).
"""

from __future__ import annotations

import enum
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from sparklog import errors, limits, wire
from sparklog.client import arguments, assign
from sparklog.client.connection import Backoff, Connection, may_pass
from sparklog.client.reading import TopicPartition, describe

_log = logging.getLogger(__name__)

_INTERNAL: Final = frozenset({"__consumer_offsets", "__transaction_state"})
"""No pattern means these, as with Kafka's `exclude.internal.topics`."""


class GroupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a consumer is a member of its group; `Consumer` says what each is."""

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

    def check(self) -> None:
        """Raises `BadOption`."""
        arguments.text("group", self.group)
        if self.instance_id is not None:
            arguments.text("instance_id", self.instance_id)
        for name in self.assignors:
            if name not in assign.ASSIGNORS:
                reason = f"expected some of {', '.join(assign.ASSIGNORS)}"
                raise errors.BadOption(option="assignors", value=name, reason=reason)
        if not self.assignors:
            raise errors.BadOption(option="assignors", value="[]", reason="name one at least")
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
                reason=f"less than session_timeout_seconds = {self.session_timeout_seconds}",
            )


class Topics:
    """What a consumer subscribes to: names, or a pattern that the whole name matches."""

    def __init__(self, topics: str | Iterable[str] | re.Pattern[str]) -> None:
        self.pattern = topics if isinstance(topics, re.Pattern) else None
        self._names: list[str] = []
        if isinstance(topics, str):
            self._names = [topics]
        elif not isinstance(topics, re.Pattern):
            what = "the name of a topic, a list of names, or a compiled pattern"
            self._names = arguments.each(
                "topics", topics, lambda _, name: arguments.topic(name), what
            )
            if not self._names:
                raise errors.BadOption(option="topics", value="[]", reason=f"expected {what}")

    def names(self, connection: Connection) -> list[str]:
        """As of now."""
        if self.pattern is None:
            return self._names
        found: wire.TopicNames = connection.action("topics.list")
        return sorted(
            name for name in found.topics if self.pattern.fullmatch(name) and name not in _INTERNAL
        )


class Assigned(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a generation gives to this member."""

    partitions: list[TopicPartition]
    infos: dict[str, wire.TopicInfo]
    committed: dict[TopicPartition, int]
    """By the group, of whatever topics."""


class Step(enum.Enum):
    """What the consumer's thread has to do."""

    NOTHING = enum.auto()
    WAIT = enum.auto()
    COMMIT = enum.auto()
    """`commit_soon` its positions."""
    GIVE_UP = enum.auto()
    """What it has, and then `join`."""
    TAKE_OVER = enum.auto()
    """What `assigned` says, and then say `took_over`."""


class _Phase(enum.Enum):
    OUT = enum.auto()
    JOINING = enum.auto()
    MEMBER = enum.auto()


class Membership:
    """One consumer's membership of `options.group`.

    Args:
        connection: to the brokers.
        options: checked.
        topics: what is subscribed to.
        wake: called, from the membership's thread, when `calls` was set.
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
        """There is something to do: ask `next_step`."""
        self.polled_at = time.monotonic()
        """When the consumer was asked for records last."""
        self.is_polled = False
        """It is being asked right now."""
        self.committed: dict[TopicPartition, int] = {}
        """As far as is known here."""
        self.member_id = ""
        self._connection = connection
        self._topics = topics
        self._wake = wake
        self._changed = threading.Condition()
        self._committing = threading.Lock()
        """One commit at a time: an older one must not come after a newer."""
        self._phase = _Phase.OUT
        self._generation = -1
        self._assigned: Assigned | None = None
        self._must_rejoin = False
        self._is_lost = False
        self._failure: errors.SparklogError | None = None
        self._is_final = False
        """The failure is raised by every call from now on."""
        self._join_is_wanted = False
        self._to_commit: dict[TopicPartition, int] | None = None
        self._is_ending = False
        self._has_left = False
        self._subscribed: list[str] = []
        """What this generation knows that we want."""
        self._counts: dict[str, int] | None = None
        """As leader: how many partitions each topic had when they were assigned."""
        self._heartbeat_at = self._commit_at = self._look_at = 0.0
        self._thread: threading.Thread | None = None
        _memberships.add(self)

    # -------------------------------------------------------------------------- for the consumer

    def next_step(self) -> Step:
        """Raises what has ended the membership, once; the step after that joins anew."""
        with self._changed:
            if self._is_lost or self._must_rejoin:
                return Step.GIVE_UP
            if self._failure is not None:
                failure = self._failure
                if not self._is_final:
                    self._failure = None
                raise failure.with_traceback(None)
            if self._phase is _Phase.OUT:
                return Step.GIVE_UP
            if self._phase is _Phase.JOINING:
                return Step.WAIT
            if self._assigned is not None:
                return Step.TAKE_OVER
            if self._is_commit_due():
                return Step.COMMIT
            self.calls = False
            return Step.NOTHING

    @property
    def is_member(self) -> bool:
        """Or was until it was lost, and has not given up its partitions yet."""
        return self._phase is _Phase.MEMBER

    @property
    def is_lost(self) -> bool:
        """The group has gone on without this member: nothing can be committed any more."""
        return self._is_lost

    @property
    def assigned(self) -> Assigned:
        """What is to be taken over."""
        assert self._assigned is not None
        return self._assigned

    def join(self) -> None:
        """What it had is given up: on to the next generation."""
        with self._changed:
            self._must_rejoin = self._is_lost = False
            self._assigned = None
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
            self._assigned = None
            self._commit_at = time.monotonic() + self.options.auto_commit_seconds

    def wait(self, deadline: float | None) -> bool:
        """Until there is another step than to wait; False: not by `deadline`, monotonic seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._phase is not _Phase.JOINING, _left_seconds(deadline)
            )

    def commit_soon(self, offsets: dict[TopicPartition, int]) -> None:
        """Has them committed in the background; a failure is logged, and tried again later."""
        with self._changed:
            self._commit_at = time.monotonic() + self.options.auto_commit_seconds
            if offsets:
                self._to_commit = offsets
                self._changed.notify_all()

    def wait_for_commit(self, deadline: float | None) -> bool:
        """Until what was handed over is committed, or has failed; False: not by `deadline`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._to_commit is None or self._is_ending, _left_seconds(deadline)
            )

    def commit(
        self, offsets: Mapping[TopicPartition, int], *, timeout_seconds: float | None = None
    ) -> None:
        """Returns when they are durable.

        Raises:
            errors.MemberFenced: the group has gone on without this member.
            errors.GroupRefused: of the partitions, there is one that does not exist.
            errors.Retriable: no answer in time, and no effect.
            errors.OutcomeUnknown: the same, and perhaps an effect.
            errors.BadRequest: it has not joined yet.
        """
        with self._committing:
            with self._changed:
                self._to_commit = None  # it is older
                self._changed.notify_all()
                if self._is_lost:
                    raise self._fenced("UNKNOWN_MEMBER_ID")
                if self._phase is _Phase.JOINING:
                    raise errors.GroupBusy(group=self.options.group, error="REBALANCE_IN_PROGRESS")
                if self._phase is _Phase.OUT:
                    raise errors.BadRequest(
                        reason=f"not in group {self.options.group!r}: poll first, which joins it"
                    )
                request = self._commit_request(offsets)
            try:
                self._connection.action("groups.commit", request, timeout_seconds=timeout_seconds)
            except errors.MemberFenced as error:
                self._lose(error)
                raise
            self._note(offsets)

    def fetch_committed(self) -> dict[TopicPartition, int]:
        """What the group has committed, of whatever topics."""
        request = wire.GroupName(group=self.options.group)
        return _offsets(self._connection.action("groups.offsets", request))

    def close(self) -> None:
        """Leaves the group, unless it is a static member, and ends the thread."""
        with self._changed:
            self._is_ending = self._is_final = True
            self._failure = errors.BadRequest(reason="the consumer is closed")
            self._must_rejoin = self._is_lost = False
            self.calls = True
            phase, self._phase = self._phase, _Phase.OUT
            self._changed.notify_all()
        if phase is not _Phase.OUT:
            self._leave()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limits.GROUP_CLOSE_SECONDS)

    def abandon(self) -> None:
        """As `close`, in its own time; a finalizer may call it anywhere, so it takes no lock."""
        self._is_ending = True

    def after_fork(self) -> None:
        """In a child, which has no such thread."""
        self._changed = threading.Condition()
        self._committing = threading.Lock()
        self._thread = None
        self._phase = _Phase.OUT
        self._must_rejoin = self._is_lost = False
        self._to_commit = None
        self._failure = errors.BadRequest(reason="this consumer belongs to the parent process")
        self._is_final = self._has_left = self._is_ending = self.calls = True

    # -------------------------------------------------------------------------- the other thread

    def _run(self) -> None:
        while not self._is_ending:
            try:
                self._work()
            except Exception as error:
                # A fault of ours must not leave anybody waiting.
                _log.exception("a membership failed")
                self._fail(errors.SparklogError(reason=f"the membership failed: {error!r}"))
        self._leave()

    def _work(self) -> None:
        with self._changed:
            if not (self._is_ending or self._join_is_wanted or self._to_commit is not None):
                self._changed.wait(self._idle_seconds())
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

    def _idle_seconds(self) -> float:
        if self._phase is not _Phase.MEMBER or self._is_lost:
            return self.options.heartbeat_seconds
        next_at = min(self._heartbeat_at, self._look_at)
        if self.options.auto_commit and not self.calls:
            next_at = min(next_at, self._commit_at)
        return max(next_at - time.monotonic(), 0.0)

    def _stay(self) -> None:
        options = self.options
        if self._heartbeat_at <= time.monotonic():
            self._heartbeat_at = time.monotonic() + options.heartbeat_seconds
            self._heartbeat()
        if self._look_at <= time.monotonic():
            self._look_at = time.monotonic() + options.metadata_age_seconds
            self._look()
        if self._is_commit_due() and not self.calls:
            self._call()
        idle_seconds = time.monotonic() - self.polled_at
        if not self.is_polled and idle_seconds > options.max_poll_interval_seconds:
            _log.warning(
                "the consumer was not polled for %.0f s, more than max_poll_interval_seconds:"
                " it leaves group %r, and joins again when it is polled",
                idle_seconds,
                options.group,
            )
            self._leave()
            self._lose(self._fenced("UNKNOWN_MEMBER_ID"))

    def _is_commit_due(self) -> bool:
        return self.options.auto_commit and self._commit_at <= time.monotonic()

    def _heartbeat(self) -> None:
        request = wire.GroupHeartbeat(
            group=self.options.group,
            member_id=self.member_id,
            instance_id=self.options.instance_id,
            generation=self._generation,
        )
        try:
            state: wire.GroupState = self._attempt("groups.heartbeat", request)
        except errors.MemberFenced as error:
            self._lose(error)
        except errors.SparklogError as error:
            # Whether it was too late, the next one tells.
            _log.warning("no heartbeat for group %r: %s", self.options.group, error)
        else:
            if state.rebalancing:
                self._call_to_rejoin("its members are assigned anew")

    def _look(self) -> None:
        """Begins a new generation where the topics have changed."""
        try:
            if self._topics.names(self._connection) != self._subscribed:
                self._call_to_rejoin("other topics match its pattern")
            elif self._counts is not None and self._count(self._counts) != self._counts:
                self._call_to_rejoin("partitions of its topics were added or deleted")
        except errors.SparklogError as error:
            _log.warning("cannot look at the topics of group %r: %s", self.options.group, error)

    # -------------------------------------------------------------------------- joining

    def _join(self) -> None:
        backoff = self._connection.backoff()
        while not self._is_ending:
            try:
                assigned = self._join_once()
            except errors.MemberFenced as error:
                if _is_replaced(error):
                    self._fail(error)
                    return
                if error.error == "UNKNOWN_MEMBER_ID":
                    self.member_id = ""
            except errors.SparklogError as error:
                if not may_pass(error):
                    self._fail(error)
                    return
                # A group whose members come and go is no trouble.
                level = logging.DEBUG if isinstance(error, errors.GroupBusy) else logging.WARNING
                _log.log(level, "joining group %r again: %s", self.options.group, error)
            else:
                self._joined(assigned)
                return
            self._pause(backoff)

    def _join_once(self) -> Assigned:
        """Waits until the next generation has begun."""
        options, names = self.options, self._topics.names(self._connection)
        metadata = assign.encode_subscription(names)
        request = wire.JoinGroup(
            group=options.group,
            member_id=self.member_id,
            instance_id=options.instance_id,
            client_id=options.client_id,
            client_host=socket.gethostname(),
            session_timeout_ms=round(options.session_timeout_seconds * 1e3),
            rebalance_timeout_ms=round(options.max_poll_interval_seconds * 1e3),
            protocol_type=assign.PROTOCOL_TYPE,
            protocols=[
                wire.GroupProtocol(name=name, metadata=metadata) for name in options.assignors
            ],
            member_id_required=True,
        )
        patience_seconds = options.max_poll_interval_seconds + limits.GROUP_ANSWER_SECONDS
        joined: wire.JoinedGroup = self._attempt("groups.join", request, patience_seconds)
        self._learn_id(joined.member_id)
        if joined.generation < 0:
            request = msgspec.structs.replace(request, member_id=joined.member_id)
            joined = self._attempt("groups.join", request, patience_seconds)
            self._learn_id(joined.member_id)
        counts, assignments = self._assign(joined)
        sync = wire.SyncGroup(
            group=options.group,
            member_id=joined.member_id,
            instance_id=options.instance_id,
            generation=joined.generation,
            assignments=assignments,
        )
        synced: wire.SyncedGroup = self._attempt("groups.sync", sync, patience_seconds)
        assigned = self._prepared(assign.decode_assignment(synced.assignment))
        self._generation, self._subscribed, self._counts = joined.generation, names, counts
        return assigned

    def _learn_id(self, member_id: str) -> None:
        with self._changed:
            self.member_id, self._has_left = member_id, False

    def _assign(self, joined: wire.JoinedGroup) -> tuple[dict[str, int] | None, dict[str, bytes]]:
        """As the leader: how many partitions there are, and what each member gets."""
        if not joined.members:  # which only the leader is told
            return None, {}
        members = [
            assign.Member(
                member_id=each.member_id,
                instance_id=each.instance_id,
                topics=frozenset(assign.decode_subscription(each.metadata)),
            )
            for each in joined.members
        ]
        counts = self._count({topic for member in members for topic in member.topics})
        if joined.leader != joined.member_id:  # it came back, and the assignment stands (KIP-814)
            return counts, {}
        found = assign.ASSIGNORS[joined.protocol](counts, members)
        return counts, {
            member_id: assign.encode_assignment(partitions)
            for member_id, partitions in found.items()
        }

    def _count(self, topics: Iterable[str]) -> dict[str, int]:
        """The partitions of each topic; 0 where there is no such topic."""
        counts = {}
        for topic in topics:
            try:
                counts[topic] = len(describe(self._connection, topic).partitions)
            except errors.UnknownTopic:
                counts[topic] = 0
        return counts

    def _prepared(self, partitions: list[TopicPartition]) -> Assigned:
        # First what is committed: the ends that are learned after it are beyond.
        request = wire.GroupName(group=self.options.group)
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
        now = time.monotonic()
        self._heartbeat_at = now + self.options.heartbeat_seconds
        self._look_at = now + self.options.metadata_age_seconds
        with self._changed:
            if self._is_ending:
                return
            self._assigned = assigned
            self._phase = _Phase.MEMBER
            # Who joined in a poll that has returned since has as long as after that poll.
            self.polled_at = now
            self._changed.notify_all()
        self._call()

    # -------------------------------------------------------------------------- other events

    def _call(self) -> None:
        """Never under the lock: the consumer may hold the feed's."""
        self.calls = True
        self._wake()

    def _call_to_rejoin(self, why: str) -> None:
        _log.info("group %r: %s", self.options.group, why)
        with self._changed:
            self._must_rejoin = self._phase is _Phase.MEMBER
        self._call()

    def _lose(self, error: errors.MemberFenced) -> None:
        """The member is none any more."""
        if _is_replaced(error):
            self._fail(error)
            return
        _log.warning("%s; it joins again", error)
        with self._changed:
            if self._phase is _Phase.MEMBER:
                self._is_lost = True
            if error.error == "UNKNOWN_MEMBER_ID":
                self.member_id = ""
            self._changed.notify_all()
        self._call()

    def _fail(self, error: errors.SparklogError) -> None:
        with self._changed:
            if self._is_ending:
                return
            self._failure = error
            # A process that has its place would be pushed out in turn.
            self._is_final = isinstance(error, errors.MemberFenced)
            self._is_lost = self._phase is _Phase.MEMBER
            self._phase = _Phase.OUT
            if self._is_final:
                self.member_id = ""
            self._to_commit = None
            self._changed.notify_all()
        self._call()

    def _commit(self, offsets: dict[TopicPartition, int]) -> None:
        """What the consumer has handed over."""
        backoff = self._connection.backoff()
        deadline = time.monotonic() + self._answer_seconds
        while not self._is_ending:
            try:
                with self._committing:
                    if self._to_commit is not offsets:  # overtaken
                        return
                    self._attempt("groups.commit", self._commit_request(offsets))
                    self._note(offsets)
                break
            except errors.MemberFenced as error:
                self._lose(error)
                break
            except errors.SparklogError as error:
                _log.warning("a commit of group %r failed: %s", self.options.group, error)
                if not may_pass(error) or time.monotonic() > deadline:
                    break
            self._pause(backoff)
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
        request = wire.LeaveGroup(group=self.options.group, member_id=member_id)
        try:
            self._connection.action(
                "groups.leave", request, timeout_seconds=limits.GROUP_CLOSE_SECONDS
            )
        except errors.SparklogError as error:
            _log.info("group %r was not left in order: %s", self.options.group, error)

    # -------------------------------------------------------------------------- words

    @property
    def _answer_seconds(self) -> float:
        """How long an answer may take: then there is still time to ask again."""
        return self.options.session_timeout_seconds / 3

    def _attempt(
        self, name: str, request: msgspec.Struct, timeout_seconds: float | None = None
    ) -> Any:
        seconds = self._answer_seconds if timeout_seconds is None else timeout_seconds
        return self._connection.attempt(name, request, timeout_seconds=seconds)

    def _pause(self, backoff: Backoff) -> None:
        with self._changed:
            if not self._is_ending:
                self._changed.wait(backoff.next_seconds())

    def _commit_request(self, offsets: Mapping[TopicPartition, int]) -> wire.CommitOffsets:
        return wire.CommitOffsets(
            group=self.options.group,
            member_id=self.member_id,
            instance_id=self.options.instance_id,
            generation=self._generation,
            offsets=[
                wire.GroupOffset(topic=topic, partition=number, offset=offset)
                for (topic, number), offset in offsets.items()
            ],
        )

    def _note(self, offsets: Mapping[TopicPartition, int]) -> None:
        with self._changed:
            self.committed = {**self.committed, **offsets}

    def _fenced(self, error: str) -> errors.MemberFenced:
        return errors.MemberFenced(group=self.options.group, member_id=self.member_id, error=error)


def _is_replaced(error: errors.MemberFenced) -> bool:
    """Whether another process has this one's place, as the same static member."""
    return bool(error.error == "FENCED_INSTANCE_ID")


def _offsets(found: wire.GroupOffsets) -> dict[TopicPartition, int]:
    return {(each.topic, each.partition): each.offset for each in found.offsets}


def _left_seconds(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


# ------------------------------------------------------------------------------ forks

_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for membership in list(_memberships):
        membership.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
