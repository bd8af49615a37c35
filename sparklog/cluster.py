"""An operator's view of a cluster, through its root or the addresses of its brokers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec

from sparklog import errors, limits
from sparklog.client import connection
from sparklog.clock import Clock
from sparklog.formats.flight_messages import (
    NO_ACTION,
    NO_OTHER_BROKER,
    BalanceCluster,
    BalanceReply,
    BrokerDescription,
    BrokerStatus,
    ClusterDescription,
    DescribeCluster,
    DrainBroker,
    Empty,
    LogLevel,
    PartitionMove,
    UpgradeReply,
)
from sparklog.security.credentials import Credentials
from sparklog.storage.metadata import identity, overview
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.metadata.identity import Answer
from sparklog.storage.metadata.liveness import Leader, LeaderState, Sighting
from sparklog.storage.metadata.overview import ENDED, SERVING, BrokerState
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.root_credentials import RootCredentials

_ANSWER_SECONDS: Final = 60.0
"""A broker that describes the cluster may have to watch a silent one for some seconds."""
_ASKED_AT_ONCE: Final = 32
_LOOK_SECONDS: Final = 0.25
"""Between two polls of a changing cluster."""

Waits = Callable[[Sequence[Leader], float], object]
"""Called with brokers whose liveness takes time to determine, and the maximum wait for it."""


class View(Protocol):
    """Describes a cluster each time it is asked."""

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        """Returns all brokers and what they lead; with `topics`, the leaders of each topic."""
        ...

    @property
    def credentials(self) -> Credentials | None:
        """For requests to brokers; None: those of the environment."""
        ...


class RootView:
    """Describes the cluster of a root from its files. Starts no broker, and changes nothing."""

    def __init__(self, store: Store, clock: Clock, *, waits: Waits) -> None:
        """Raises `NotARoot`, `FormatTooNew`, `CorruptObject`, and the store's errors."""
        self._cluster_id = open_cluster(store, clock=clock, create=False).cluster_id
        self._store = store
        self._clock = clock
        self._waits = waits
        self._metadata = MetadataStore(store, clock=clock)
        self._credentials = RootCredentials(store, lambda: self._metadata.current, clock=clock)
        self._ask = partial(connection.ask, credentials=self._credentials.without_tokens())
        self._asked: set[tuple[int, int]] = set()
        """Live brokers, with their epochs, already asked whether they serve this root."""

    @property
    def credentials(self) -> Credentials | None:
        return self._credentials

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        """Raises `CorruptObject` and the store's errors."""
        metadata, sightings = overview.look(
            self._store,
            self._clock,
            newest=self._metadata.refresh,
            waits=self._waits,
            answers=identity.answers(
                self._store, self._ask, timeout_seconds=limits.PROBE_TIMEOUT_SECONDS
            ),
        )
        for broker in self._of_the_original(sightings.values()):
            sightings[broker] = replace(sightings[broker], state=LeaderState.DEAD)
        return overview.describe(
            metadata,
            sightings,
            cluster_id=self._cluster_id,
            root=self._store.uri,
            clock=self._clock,
            with_topics=topics,
        )

    def _of_the_original(self, sightings: Iterable[Sighting]) -> list[int]:
        """Returns the brokers that serve another root, of which this one is a copy.

        Their heartbeats in the copy are as recent as the copy itself.
        """
        leaders = [
            each.leader
            for each in sightings
            if each.state is not LeaderState.DEAD
            and (each.leader.broker, each.leader.epoch) not in self._asked
        ]
        if not leaders:
            return []

        def ask_one(leader: Leader) -> Answer:
            asked = identity.ask_broker(
                self._store, leader, self._ask, timeout_seconds=limits.PROBE_TIMEOUT_SECONDS
            )
            return asked.answer

        with ThreadPoolExecutor(min(len(leaders), _ASKED_AT_ONCE)) as pool:
            answers = list(zip(leaders, pool.map(ask_one, leaders), strict=True))
        self._asked |= {
            (each.broker, each.epoch) for each, found in answers if found in identity.LIVES
        }
        return [each.broker for each, found in answers if found is Answer.ORIGINAL]


class BrokerView:
    """Describes a cluster by asking one of its brokers, and another if that does not answer."""

    def __init__(self, addresses: str) -> None:
        """`addresses`: `host:port`, or several, separated by commas."""
        self._given = addresses.split(",")
        self._known: list[str] = []

    @property
    def credentials(self) -> Credentials | None:
        return None

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        """Raises `BrokerUnavailable` if no broker answers, and `WrongPort`."""
        request = DescribeCluster(topics=topics)
        failures: list[errors.SparklogError] = []
        for address in dict.fromkeys([*self._known, *self._given]):
            try:
                found: ClusterDescription = ask(address, "cluster.describe", request)
            except errors.SparklogError as error:
                # A closing listener may look like another program's port.
                if not (connection.is_of_the_broker(error) or isinstance(error, errors.WrongPort)):
                    raise
                failures.append(error)
                continue
            serving = [each.address for each in found.brokers if each.state in SERVING]
            self._known = [address, *serving]
            return found
        if len(failures) == 1:
            raise failures[0]
        reasons = "; ".join(str(each.facts.get("reason", each)) for each in failures)
        raise errors.BrokerUnavailable(address=",".join(self._given), reason=reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A broker that has stopped, and the outcome for its partitions."""

    moved: Mapping[int, int]
    """The number of partitions that each other broker now leads, by its id."""
    left: int
    """Partitions that no other broker has taken over."""
    had_stopped: bool = False
    """True if the broker had already shut down cleanly."""
    epoch: int = -1
    """The epoch in which a supervisor has restarted it; -1: no restart was seen."""


def drain(
    view: View,
    clock: Clock,
    broker: int,
    *,
    alone: bool = False,
    timeout_seconds: float = 120.0,
    progress: Callable[[int], object] = lambda _partitions: None,
) -> Drained:
    """Stops a broker, and returns once others lead its partitions.

    If it is the only one and `alone` is true, its partitions wait for the next broker. Raises
    `CannotDrain`; and `TimedOut` if the broker has not stopped in time, or others have not taken
    over its partitions: both continue.

    `progress` is called repeatedly with the number of partitions that the broker leads.
    """
    before = view.describe(topics=True)
    target = _to_drain(before, broker, alone=alone)
    if _has_stopped(before, target):
        return Drained(moved={}, left=target.partitions, had_stopped=True)
    deadline = clock.monotonic() + timeout_seconds
    progress(target.partitions)
    if target.state not in (BrokerState.DRAINING, BrokerState.STOPPED):
        request = DrainBroker(
            cluster_id=before.cluster_id, broker=broker, epoch=target.epoch, alone=alone
        )
        ask(target.address, "broker.drain", request, credentials=view.credentials)
    left = target.partitions
    while True:
        try:
            now = view.describe(topics=True)
        except errors.WrongPort:
            pass  # its listener is closing
        except errors.Retriable as error:
            if connection.is_of_the_broker(error) and not _others_up(before, broker):
                return Drained(moved={}, left=left)  # it was the only one that could answer
        else:
            known = next(each for each in now.brokers if each.broker == broker)
            left = known.partitions
            progress(left)
            if _has_ended(now, target):
                is_new = known.epoch != target.epoch
                moved = _moved(before, now, broker)
                return Drained(moved=moved, left=left, epoch=known.epoch if is_new else -1)
        if clock.monotonic() >= deadline:
            raise errors.TimedOut(
                what=f"the drain of broker {broker} (partitions left: {left})",
                timeout_seconds=timeout_seconds,
            )
        clock.sleep(_LOOK_SECONDS)


def log_level(
    view: View, broker: int, level: Literal["", "debug", "info", "warning", "error"] = ""
) -> str:
    """Returns the level of a broker's log lines, after setting it if a level is given.

    Empty if the broker's program has configured its own logging. Raises `BadRequest` if the broker
    is not running or refuses, and what `View.describe` and `ask` raise.
    """
    found = {each.broker: each for each in view.describe().brokers if each.state not in ENDED}
    if broker not in found:
        ids = ", ".join(map(str, found)) or "none"
        reason = f"Broker {broker} is not running; the ids of running brokers: {ids}"
        raise errors.BadRequest(reason=reason)
    request = LogLevel(broker=broker, level=level)
    reply: LogLevel = ask(
        found[broker].address, "broker.log_level", request, credentials=view.credentials
    )
    return reply.level


def _to_drain(cluster: ClusterDescription, broker: int, *, alone: bool) -> BrokerDescription:
    """Returns the broker. Raises `CannotDrain`."""
    found = {each.broker: each for each in cluster.brokers}
    target = found.get(broker)
    if target is None:
        ids = ", ".join(map(str, found)) or "none"
        reason = f"the cluster has no broker with this id; its brokers are {ids}"
    elif target.state == BrokerState.STOPPED:
        return target
    elif target.state == BrokerState.DEAD:
        reason = "it is already dead; the others lead its partitions, and there is nothing to do"
    elif not alone and not _others_up(cluster, broker):
        reason = NO_OTHER_BROKER
    else:
        return target
    raise errors.CannotDrain(broker=broker, reason=reason)


def _has_ended(cluster: ClusterDescription, target: BrokerDescription) -> bool:
    """Returns whether the broker has stopped and the others have replaced it.

    They fence its log, and take over the partitions that it could not hand over.
    """
    known = next(each for each in cluster.brokers if each.broker == target.broker)
    if known.epoch != target.epoch:
        return True  # a supervisor has restarted it
    return known.state in ENDED and _is_replaced(cluster, target)


def _has_stopped(cluster: ClusterDescription, target: BrokerDescription) -> bool:
    return target.state == BrokerState.STOPPED and _is_replaced(cluster, target)


def _is_replaced(cluster: ClusterDescription, target: BrokerDescription) -> bool:
    known = next(each for each in cluster.brokers if each.broker == target.broker)
    own = target.broker, target.epoch
    is_fenced = all(each.fenced for each in cluster.epochs if (each.broker, each.epoch) == own)
    return (is_fenced and not known.partitions) or not _others_up(cluster, target.broker)


def _others_up(cluster: ClusterDescription, broker: int) -> bool:
    return any(each.state == BrokerState.UP and each.broker != broker for each in cluster.brokers)


def await_security(
    view: View, version: int, clock: Clock, *, timeout_seconds: float
) -> dict[int, str]:
    """Waits until the brokers that are up go by a version of the users and ACLs, or a newer one.

    Returns the brokers that do not in time, with the reason; also those of an older release. Raises
    what `View.describe` raises.
    """
    deadline = clock.monotonic() + timeout_seconds
    left = {each.broker: each.address for each in _up(view.describe())}
    while True:
        reasons: dict[int, str] = {}
        for broker, address in left.items():
            try:
                status: BrokerStatus = ask(address, "status", Empty(), credentials=view.credentials)
            except errors.SparklogError as error:
                reasons[broker] = str(error)
                continue
            if status.security_version < version:
                reasons[broker] = f"it goes by version {status.security_version}, not {version}"
        left = {broker: left[broker] for broker in reasons}
        if not reasons or clock.monotonic() >= deadline:
            return reasons
        clock.sleep(_LOOK_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """The number of partitions that each broker leads before and after the moves."""

    before: Mapping[int, int]
    after: Mapping[int, int]
    moved: int
    """Partitions whose leader has changed."""
    left: Sequence[PartitionMove] = ()
    """Moves that would balance the brokers, but that were not made."""


def plan(view: View) -> Balanced:
    """Returns the result of `balance`, as far as a broker can predict it. Moves nothing."""
    cluster = view.describe()
    before = _loads(cluster)
    moves = _plan(cluster, view.credentials)
    after = Counter(before)
    after.subtract(each.leader for each in moves)
    after.update(each.target for each in moves)
    return Balanced(before=before, after=after, moved=0, left=moves)


def balance(
    view: View,
    clock: Clock,
    *,
    timeout_seconds: float = 120.0,
    progress: Callable[[int], object] = lambda _moved: None,
) -> Balanced:
    """Balances the brokers: asks each to hand over partitions, until none has any to hand over.

    Waits for starting brokers: they receive partitions only once they serve. Raises
    `BrokerUnavailable` if no broker is up or starting; and, once the time is over, the error of a
    broker that could not be asked, or `TimedOut`.

    `progress` is called after each round of moves with the number of partitions that have moved so
    far.
    """
    before = view.describe(topics=True)
    deadline = clock.monotonic() + timeout_seconds
    now, moved = before, 0
    while True:
        failure: errors.SparklogError | None = None
        in_round = 0
        starting = [each.broker for each in now.brokers if each.state == BrokerState.STARTING]
        up = [each for each in now.brokers if each.state == BrokerState.UP]
        for each in up if starting else _members_up(now):
            try:
                reply: BalanceReply = ask(
                    each.address, "cluster.balance", BalanceCluster(), credentials=view.credentials
                )
                in_round += reply.moved
            except errors.Retriable as error:
                failure = error
        moved += in_round
        if in_round:
            progress(moved)
        if not in_round and failure is None and not starting:
            break
        if clock.monotonic() >= deadline:
            if failure is not None:
                raise failure
            what = f"balancing the brokers, after {moved} partitions"
            if starting:
                what += f", while these are starting: {', '.join(map(str, starting))}"
            raise errors.TimedOut(what=what, timeout_seconds=timeout_seconds)
        if failure is not None or (starting and not in_round):
            clock.sleep(_LOOK_SECONDS)
        now = view.describe()
    after = view.describe(topics=True)
    return Balanced(
        before=_loads(before),
        after=_loads(after),
        moved=sum(
            then != leader
            for name, leaders in (before.leaders or {}).items()
            for then, leader in zip(leaders, (after.leaders or {}).get(name, []), strict=False)
        ),
        left=_plan(after, view.credentials),
    )


def upgrade(view: View) -> UpgradeReply:
    """Raises the feature level of a root to the highest that all of its brokers support.

    Raises `BrokerUnavailable` if no broker is up or answers.
    """
    failures: list[errors.SparklogError] = []
    for each in _members_up(view.describe()):
        try:
            reply: UpgradeReply = ask(
                each.address, "cluster.upgrade", Empty(), credentials=view.credentials
            )
            return reply
        except errors.Retriable as error:  # the next one sees the level as it is by then
            failures.append(error)
    raise failures[-1]


def _up(cluster: ClusterDescription) -> list[BrokerDescription]:
    return [each for each in cluster.brokers if each.state == BrokerState.UP]


def _members_up(cluster: ClusterDescription) -> list[BrokerDescription]:
    """Raises `BrokerUnavailable` if there is none."""
    found = _up(cluster)
    if not found:
        raise errors.BrokerUnavailable(address=cluster.root, reason="no broker is up; start one")
    return found


def _plan(cluster: ClusterDescription, credentials: Credentials | None) -> list[PartitionMove]:
    """Returns the moves according to one broker that answers: all brokers see the same moves."""
    failures: list[errors.SparklogError] = []
    for each in _members_up(cluster):
        try:
            reply: BalanceReply = ask(
                each.address,
                "cluster.balance",
                BalanceCluster(dry_run=True),
                credentials=credentials,
            )
            return reply.moves
        except errors.Retriable as error:
            failures.append(error)
    raise failures[-1]


def _loads(cluster: ClusterDescription) -> dict[int, int]:
    """Returns the number of partitions of each broker that is up, or leads any."""
    return {
        each.broker: each.partitions
        for each in cluster.brokers
        if each.partitions or each.state not in ENDED
    }


def _moved(before: ClusterDescription, after: ClusterDescription, broker: int) -> dict[int, int]:
    """Returns how many of the broker's partitions each other broker leads afterwards."""
    found: Counter[int] = Counter()
    for name, leaders in (before.leaders or {}).items():
        later = (after.leaders or {}).get(name, [])
        places = zip(leaders, later, strict=False)  # a topic may have been created again
        found.update(now for then, now in places if then == broker != now)
    return dict(found)


def ask(
    address: str,
    action: str,
    request: msgspec.Struct,
    *,
    timeout_seconds: float = _ANSWER_SECONDS,
    credentials: Credentials | None = None,
) -> Any:
    """Returns the reply from the broker at `host:port` to an action.

    `credentials`: None: those of the environment.

    Raises `BrokerUnavailable`, `WrongPort`, and any failure that it replies: `BadRequest` if its
    release does not support the action.
    """
    try:
        return connection.ask(
            address, action, request, timeout_seconds=timeout_seconds, credentials=credentials
        )
    except errors.BadRequest as error:
        if not error.reason.startswith(NO_ACTION):
            raise
        reason = (
            f"The broker at {address} runs an older release, which cannot do this: update it, or"
            " name the root or another broker"
        )
        raise errors.BadRequest(reason=f"{reason}.") from error
