"""A cluster as its operator sees it, by its root or by the addresses of its brokers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from sparklog import errors
from sparklog.client.connection import Connection, is_of_the_broker
from sparklog.clock import Clock
from sparklog.formats.flight_messages import ClusterDescription, DescribeCluster
from sparklog.storage import overview
from sparklog.storage.cluster import open_cluster
from sparklog.storage.liveness import Leader
from sparklog.storage.metadata_store import MetadataStore
from sparklog.storage.objects import Store
from sparklog.storage.overview import SERVING, BrokerState

_ANSWER_SECONDS: Final = 60.0
"""A broker that describes the cluster may have to watch a silent one for some seconds."""

Waits = Callable[[Sequence[Leader], float], object]
"""Is called if it takes time to see whether brokers are alive: with these, and the longest wait."""


class View(Protocol):
    """Describes a cluster as often as it is asked."""

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        """Returns all brokers and what they lead; with `topics`, the leaders of each topic."""
        ...


class RootView:
    """Describes the cluster of a root from its files. Starts no broker, and changes nothing."""

    def __init__(self, store: Store, clock: Clock, *, waits: Waits) -> None:
        """Raises `NotARoot`, `FormatTooNew`, `CorruptObject`, and the errors of the store."""
        self._cluster_id = open_cluster(store, clock=clock, create=False).cluster_id
        self._store = store
        self._clock = clock
        self._waits = waits
        self._metadata = MetadataStore(store, clock=clock)

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        """Raises `CorruptObject` and the errors of the store."""
        metadata, sightings = overview.look(
            self._store, self._clock, newest=self._metadata.refresh, waits=self._waits
        )
        return overview.describe(
            metadata,
            sightings,
            cluster_id=self._cluster_id,
            root=self._store.uri,
            clock=self._clock,
            with_topics=topics,
        )


class BrokerView:
    """Describes a cluster by asking one of its brokers: another one once it does not answer."""

    def __init__(self, addresses: str) -> None:
        """`addresses`: `host:port`, or several, separated by commas."""
        self._given = addresses.split(",")
        self._known: list[str] = []

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        """Raises `BrokerUnavailable` if no broker answers, and `WrongPort`."""
        request = DescribeCluster(topics=topics)
        failures: list[errors.SparklogError] = []
        for address in dict.fromkeys([*self._known, *self._given]):
            try:
                found: ClusterDescription = ask(address, "cluster.describe", request)
            except errors.SparklogError as error:
                if not is_of_the_broker(error):
                    raise
                failures.append(error)
                continue
            serving = [each.address for each in found.brokers if each.state in SERVING]
            self._known = [address, *serving]
            return found
        raise failures[-1]


def ask(
    address: str, action: str, request: msgspec.Struct, *, timeout_seconds: float = _ANSWER_SECONDS
) -> Any:
    """Returns the reply of the broker at `host:port` to an action.

    Raises `BrokerUnavailable`, `WrongPort`, and the failure that it replies.
    """
    with Connection.to(address) as connection:
        return connection.channel().action(action, request, timeout_seconds=timeout_seconds)


def up(cluster: ClusterDescription) -> list[int]:
    """Returns the ids of the brokers that are up."""
    return [each.broker for each in cluster.brokers if each.state == BrokerState.UP]
