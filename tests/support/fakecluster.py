"""Brokers of a cluster that exist only behind a client's connection, with functions as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sparklog import errors
from sparklog.client import connection as connections
from sparklog.client import probing
from sparklog.client.connection import Connection
from sparklog.formats import flight_messages

Answer = Callable[[int, str, Any], Any]
"""Answers an action, given the broker's id, the action's name and the request."""


class FakeCluster:
    """Brokers by address; those in `dead` do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, addresses: Mapping[str, int]) -> None:
        self.at = dict(addresses)
        self.dead: set[int] = set()
        self.others: set[str] = set()
        """Addresses at which another program listens."""
        self.leaders: list[int] = []
        self.topic_id = "old"
        self.asked: list[tuple[int, str]] = []
        self.answer: Answer = lambda _broker, _name, _request: None
        self.tail: Callable[[int, Any], Any] = lambda _broker, _request: None
        self.read: Callable[[int, Any], Any] = lambda _broker, _ticket: None
        monkeypatch.setattr(
            connections, "Channel", lambda address, _tokens: _Channel(self, address)
        )
        for module in (connections, probing):
            monkeypatch.setattr(module, "probe", lambda address, *_: self.broker_at(address))

    def connect(self, addresses: str, *, timeout_seconds: float = 10.0) -> Connection:
        return Connection.to(addresses, timeout_seconds=timeout_seconds)

    def broker_at(self, address: str) -> int:
        """Returns the broker at that address. Raises as a probe does."""
        if address in self.others:
            raise errors.WrongPort(address=address, reason="it does not speak gRPC")
        broker = self.at.get(address)
        if broker is None or broker in self.dead:
            raise errors.BrokerUnavailable(address=address, reason="refused")
        return broker

    def topic(self, asked: int) -> flight_messages.TopicInfo:
        """Topic t, as one of its brokers describes it: only with offsets of partitions it leads."""
        return flight_messages.TopicInfo(
            topic="t",
            topic_id=self.topic_id,
            config={},
            partitions=[
                flight_messages.PartitionInfo(
                    partition=number,
                    leader=leader,
                    leader_epoch=0,
                    start=0 if asked == leader else -1,
                    end=100 if asked == leader else -1,
                    published=0,
                )
                for number, leader in enumerate(self.leaders)
            ],
            table_uri="",
            table_version=0,
            table_files=0,
            table_bytes=0,
            max_record_bytes=1 << 20,
        )

    def act(self, broker: int, name: str, request: Any) -> Any:
        self.asked.append((broker, name))
        if name == "cluster":
            return flight_messages.ClusterInfo(
                cluster_id="c",
                root="r",
                version="1",
                brokers=[
                    flight_messages.BrokerInfo(broker=each, epoch=1, address=address)
                    for address, each in self.at.items()
                    if each not in self.dead
                ],
            )
        if name == "topics.describe":
            return self.topic(broker)
        return self.answer(broker, name, request)


class _Channel:
    """The methods of a channel that clients call."""

    def __init__(self, cluster: FakeCluster, address: str) -> None:
        self._cluster = cluster
        self.address = address

    def action(self, name: str, request: Any, *, timeout_seconds: float) -> Any:
        del timeout_seconds
        return self._cluster.act(self._cluster.broker_at(self.address), name, request)

    def tail(self, request: Any) -> Any:
        return self._cluster.tail(self._cluster.broker_at(self.address), request)

    def read(self, ticket: Any) -> Any:
        return self._cluster.read(self._cluster.broker_at(self.address), ticket)

    def close(self) -> None:
        pass
