"""The rights that each action of the Flight listener needs: those of its counterpart in Kafka.

Every action of `flight_messages.ACTIONS` has a row. Kafka's documentation lists the operations that
each request needs; an action without a counterpart needs those that come closest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from sparklog.broker.flight.caller import Caller
from sparklog.formats import flight_messages, group_messages
from sparklog.formats.schema_messages import RegistryInfo
from sparklog.formats.topic_names import MIRROR_SOURCE
from sparklog.security.acl import Operation, ResourceType

_CLUSTER, _GROUP, _TOPIC = ResourceType.CLUSTER, ResourceType.GROUP, ResourceType.TOPIC

Check = Callable[[Caller, Any], None]
"""Raises `NotAuthorized` unless a client may send this request."""


def _to_all(_caller: Caller, _request: msgspec.Struct) -> None:
    """Allows the action to every client that is admitted."""


def _on_cluster(operation: Operation, *, also_observed: bool = False) -> Check:
    """`also_observed`: refused while ACLs are only observed, too: it cannot be undone."""

    def check(caller: Caller, _request: msgspec.Struct) -> None:
        caller.check(operation, also_observed=also_observed)

    return check


def _on_topic(operation: Operation, *, or_cluster: Operation | None = None) -> Check:
    def check(caller: Caller, request: Any) -> None:
        caller.check(operation, _TOPIC, [request.topic], or_cluster=or_cluster)

    return check


def _on_group(operation: Operation) -> Check:
    def check(caller: Caller, request: Any) -> None:
        caller.check(operation, _GROUP, [request.group])

    return check


def _commit(caller: Caller, request: group_messages.CommitOffsets) -> None:
    caller.check(Operation.READ, _GROUP, [request.group])
    caller.check(Operation.READ, _TOPIC, [each.topic for each in request.offsets])


def _forget(caller: Caller, request: group_messages.ForgetOffsets) -> None:
    caller.check(Operation.DELETE, _GROUP, [request.group])
    caller.check(Operation.READ, _TOPIC, [each.topic for each in request.partitions])


def _log_level(caller: Caller, request: flight_messages.LogLevel) -> None:
    caller.check(Operation.ALTER_CONFIGS if request.level else Operation.DESCRIBE_CONFIGS)


def _publish(caller: Caller, request: flight_messages.PublishNow) -> None:
    if request.topics is not None:  # otherwise those that the client may write to
        caller.check(Operation.WRITE, _TOPIC, request.topics)


RIGHTS: Final[Mapping[str, Check]] = {
    "broker.drain": _on_cluster(Operation.ALTER, also_observed=True),
    "broker.log_level": _log_level,
    "cluster": _to_all,  # to others than administrators, the addresses only
    "cluster.balance": _on_cluster(Operation.ALTER, also_observed=True),
    "cluster.describe": _on_cluster(Operation.DESCRIBE),
    "cluster.move": _on_cluster(Operation.ALTER, also_observed=True),
    "cluster.upgrade": _on_cluster(Operation.ALTER, also_observed=True),
    "figures": _on_cluster(Operation.DESCRIBE),
    "root.prove": _to_all,  # before it is trusted with a token
    "status": _on_cluster(Operation.DESCRIBE),
    "topics.list": _to_all,  # without those that the client may not describe
    "topics.create": _on_topic(Operation.CREATE, or_cluster=Operation.CREATE),
    "topics.describe": _on_topic(Operation.DESCRIBE),
    "topics.schemas": _on_topic(Operation.READ),
    "topics.alter": _on_topic(Operation.ALTER_CONFIGS),
    "topics.add_partitions": _on_topic(Operation.ALTER),
    "topics.delete": _on_topic(Operation.DELETE),
    "topics.compact": _on_topic(Operation.ALTER),
    "records.delete": _on_topic(Operation.DELETE),
    "offsets.for_times": _on_topic(Operation.DESCRIBE),
    "offsets.lag": _on_cluster(Operation.CLUSTER_ACTION),  # names topics by their ids
    "producers.new": lambda caller, _: caller.check_idempotent_write(),
    "batches.append_staged": _to_all,  # judged by the topics of its manifest
    "publish.now": _publish,
    "tokens.new": _to_all,  # limited to topics that ACLs allow when they are used
    "groups.join": _on_group(Operation.READ),
    "groups.sync": _on_group(Operation.READ),
    "groups.heartbeat": _on_group(Operation.READ),
    "groups.leave": _on_group(Operation.READ),
    "groups.commit": _commit,
    "groups.forget": _forget,
    "groups.offsets": _on_group(Operation.DESCRIBE),  # without topics that may not be described
    "groups.find": _on_group(Operation.DESCRIBE),
    "groups.list": _to_all,  # without those that the client may not describe
    "groups.describe": _on_group(Operation.DESCRIBE),
    "groups.delete": _on_group(Operation.DELETE),
}


def check_rights(name: str, caller: Caller, request: msgspec.Struct) -> None:
    """Raises `NotAuthorized` unless a client may send the request of an action."""
    RIGHTS[name](caller, request)


# ------------------------------------------------------------------------------ replies

_Shown = Callable[[Caller, Any], msgspec.Struct]
"""Returns the part of a reply that a client may see."""


def _may_describe(caller: Caller, topic: str) -> bool:
    return caller.may(Operation.DESCRIBE, _TOPIC, topic)


def _addresses(caller: Caller, reply: flight_messages.ClusterInfo) -> flight_messages.ClusterInfo:
    if caller.may(Operation.DESCRIBE):
        return reply
    brokers = [
        flight_messages.BrokerInfo(
            broker=each.broker, epoch=each.epoch, address=each.address, kafka=each.kafka
        )
        for each in reply.brokers
    ]
    return msgspec.structs.replace(reply, brokers=brokers)


def _topic(caller: Caller, reply: flight_messages.TopicInfo) -> flight_messages.TopicInfo:
    if not _may_describe(caller, reply.topic):  # it may have existed before its creation
        return flight_messages.TopicInfo(topic=reply.topic, topic_id="")
    if caller.may(Operation.DESCRIBE_CONFIGS, _TOPIC, reply.topic):
        return reply
    config = {key: value for key, value in reply.config.items() if key == MIRROR_SOURCE}
    return msgspec.structs.replace(reply, config=config, publish_interval_seconds=-1.0)


def _names(caller: Caller, reply: flight_messages.TopicNames) -> flight_messages.TopicNames:
    names = [each for each in reply.topics if _may_describe(caller, each)]
    return msgspec.structs.replace(reply, topics=names)


def _groups(caller: Caller, reply: group_messages.GroupList) -> group_messages.GroupList:
    if caller.may(Operation.DESCRIBE):
        return reply
    groups = [each for each in reply.groups if caller.may(Operation.DESCRIBE, _GROUP, each.group)]
    return msgspec.structs.replace(reply, groups=groups)


def _offsets(caller: Caller, reply: group_messages.GroupOffsets) -> group_messages.GroupOffsets:
    # After a look: a client without an offset would read the partition from its start or its end.
    hidden = caller.denied(Operation.DESCRIBE, _TOPIC, (each.topic for each in reply.offsets))
    offsets = [each for each in reply.offsets if each.topic not in hidden]
    return msgspec.structs.replace(reply, offsets=offsets)


def _status(caller: Caller, reply: flight_messages.BrokerStatus) -> flight_messages.BrokerStatus:
    return msgspec.structs.replace(
        reply,
        held_back=[each for each in reply.held_back if _may_describe(caller, each.topic)],
        kept_records=[each for each in reply.kept_records if _may_describe(caller, each.topic)],
        registry=None if reply.registry is None else _registry(caller, reply.registry),
    )


def _registry(caller: Caller, found: RegistryInfo) -> RegistryInfo:
    waiting = [each for each in found.waiting if _may_describe(caller, each.topic)]
    return msgspec.structs.replace(found, waiting=waiting)


def _figures(caller: Caller, reply: flight_messages.BrokerFigures) -> flight_messages.BrokerFigures:
    return msgspec.structs.replace(
        reply, topics=[each for each in reply.topics if _may_describe(caller, each.topic)]
    )


def _description(
    caller: Caller, reply: flight_messages.ClusterDescription
) -> flight_messages.ClusterDescription:
    leaders = reply.leaders
    if leaders is not None:
        leaders = {name: each for name, each in leaders.items() if _may_describe(caller, name)}
    lost = [each for each in reply.lost if _may_describe(caller, each.topic)]
    return msgspec.structs.replace(reply, leaders=leaders, lost=lost)


_SHOWN: Final[Mapping[str, _Shown]] = {
    "cluster": _addresses,
    "cluster.describe": _description,
    "figures": _figures,
    "groups.list": _groups,
    "groups.offsets": _offsets,
    "status": _status,
    "topics.add_partitions": _topic,
    "topics.alter": _topic,
    "topics.compact": _topic,
    "topics.create": _topic,
    "topics.describe": _topic,
    "topics.list": _names,
}


def shown(name: str, caller: Caller, reply: msgspec.Struct) -> msgspec.Struct:
    """Returns the part of the reply to an action that the client may see."""
    show = _SHOWN.get(name) if caller.is_limited else None
    return show(caller, reply) if show is not None else reply
