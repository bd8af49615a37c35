"""The actions of the Flight listener, as calls to the broker and its groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from sparklog.broker.broker import Broker
from sparklog.broker.flight import group_calls
from sparklog.broker.flight.caller import Caller
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.formats import flight_messages
from sparklog.security.acl import Operation, ResourceType

Action: TypeAlias = Callable[[Any, Caller], group_calls.Answer]
"""Answers the request of a client."""


def actions(broker: Broker, groups: Coordinator) -> Mapping[str, Action]:
    """Returns the actions that clients can request, by name."""

    def delete(request: flight_messages.TopicName, caller: Caller) -> flight_messages.Empty:
        broker.topics.delete(request.topic, client=caller.name)
        return flight_messages.Empty()

    def append_staged(
        request: flight_messages.AppendStaged, caller: Caller
    ) -> flight_messages.AppendStagedReply:
        return broker.staged.append(
            request, lambda topics: caller.check(Operation.WRITE, ResourceType.TOPIC, topics)
        )

    def publish(request: flight_messages.PublishNow, caller: Caller) -> flight_messages.Empty:
        if request.topics is None and caller.is_limited:
            writable = functools.partial(caller.may, Operation.WRITE, ResourceType.TOPIC)
            topics = [name for name in broker.topics.names() if writable(name)]
            request = msgspec.structs.replace(request, topics=topics)
        broker.publishing.publish(request)
        return flight_messages.Empty()

    def logged(change: Callable[..., group_calls.Answer]) -> Action:
        """Passes on the client's address, which the change logs."""
        return lambda request, caller: change(request, client=caller.name)

    of_all: dict[str, Callable[[Any], group_calls.Answer]] = {
        "cluster.balance": broker.cluster_admin.balance,
        "cluster.move": broker.cluster_admin.move,
        "cluster.describe": broker.cluster_admin.describe,
        "cluster.upgrade": lambda _: broker.cluster_admin.upgrade(),
        "broker.drain": _silently(broker.cluster_admin.drain),
        "root.prove": broker.prove_root,
        "status": lambda _: broker.status(),
        "figures": lambda _: broker.figures(),
        "topics.list": lambda _: flight_messages.TopicNames(topics=broker.topics.names()),
        "topics.describe": lambda request: broker.topics.describe(request.topic),
        "topics.compact": lambda request: broker.topics.compact(request.topic),
        "records.delete": broker.deletion.delete,
        "offsets.for_times": broker.offsets_for_times,
        "offsets.lag": broker.lags.answer,
        "producers.new": lambda _: broker.producer_ids.new(),
        **group_calls.actions(groups),
    }
    return {
        **{name: _of_anyone(action) for name, action in of_all.items()},
        "cluster": lambda _, caller: broker.cluster(caller.listener),
        "batches.append_staged": append_staged,
        "publish.now": publish,
        "broker.log_level": logged(broker.cluster_admin.log_level),
        "topics.create": logged(broker.topics.create),
        "topics.alter": logged(broker.topics.alter),
        "topics.add_partitions": logged(broker.topics.add_partitions),
        "topics.delete": delete,
    }


def _of_anyone(action: Callable[[Any], group_calls.Answer]) -> Action:
    return lambda request, _: action(request)


def _silently(work: Callable[[Any], None]) -> Callable[[Any], flight_messages.Empty]:
    def answer(request: Any) -> flight_messages.Empty:
        work(request)
        return flight_messages.Empty()

    return answer
