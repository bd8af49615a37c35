"""Requests of a cluster's operator to one of its brokers."""

from __future__ import annotations

from collections.abc import Callable

from sparklog import limits
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.takeover import Leadership
from sparklog.clock import Clock
from sparklog.formats import flight_messages
from sparklog.storage import overview
from sparklog.storage.objects import Store


class ClusterAdmin:
    """Describes the cluster, as one of its brokers sees it. May be called from any thread."""

    def __init__(
        self,
        store: Store,
        metadata: LeaderMetadata,
        own: Leadership,
        *,
        clock: Clock,
        check_open: Callable[[], None],
    ) -> None:
        """`check_open` raises `BrokerClosing` once the broker stops."""
        self._store = store
        self._metadata = metadata
        self._own = own
        self._clock = clock
        self._check_open = check_open

    def describe(
        self, request: flight_messages.DescribeCluster
    ) -> flight_messages.ClusterDescription:
        """Returns all brokers and their states, which takes time if one is silent.

        Raises `BrokerFenced`, `BrokerClosing` and the errors of the store.
        """

        def pause() -> None:
            self._check_open()
            self._clock.sleep(limits.OVERVIEW_PAUSE_SECONDS)

        metadata, sightings = overview.look(
            self._store,
            self._clock,
            newest=self._metadata.reload,
            waits=lambda _leaders, _seconds: None,
            pause=pause,
        )
        return overview.describe(
            metadata,
            sightings,
            cluster_id=self._own.cluster.cluster_id,
            root=self._store.uri,
            clock=self._clock,
            with_topics=request.topics,
        )
