"""The actions of the Flight listener, as calls to the broker and its groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from sparklog import errors, limits
from sparklog.broker.broker import Broker
from sparklog.broker.flight import group_calls
from sparklog.broker.flight.caller import Caller
from sparklog.broker.flight.gate import Gate
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.formats import flight_messages
from sparklog.security.acl import Operation, ResourceType

Action: TypeAlias = Callable[[Caller, Any], group_calls.Answer]
"""Answers the request of a client."""


def actions(broker: Broker, groups: Coordinator, gate: Gate | None) -> Mapping[str, Action]:
    """Returns the actions that clients can request, by name. `gate`: issues tokens."""

    def delete(caller: Caller, request: flight_messages.TopicName) -> flight_messages.Empty:
        broker.topics.delete(request.topic, client=caller.name)
        return flight_messages.Empty()

    def append_staged(
        caller: Caller, request: flight_messages.AppendStaged
    ) -> flight_messages.AppendStagedReply:
        is_authorized = not caller.is_limited

        def authorize(topics: Iterable[str]) -> None:
            nonlocal is_authorized
            caller.check(Operation.WRITE, ResourceType.TOPIC, topics)
            is_authorized = True

        try:
            return broker.staged.append(request, authorize)
        except (errors.Invalid, errors.Corrupt):
            if is_authorized:
                raise
            # One error, so that it does not show whether the batch exists, nor its topics.
            raise caller.error(
                Operation.WRITE, ResourceType.TOPIC, f"of {request.manifest}"
            ) from None

    def publish(caller: Caller, request: flight_messages.PublishNow) -> flight_messages.Empty:
        if request.topics is None and caller.is_limited:
            writable = functools.partial(caller.may, Operation.WRITE, ResourceType.TOPIC)
            topics = [name for name in broker.topics.names() if writable(name)]
            request = msgspec.structs.replace(request, topics=topics)
        broker.publishing.publish(request)
        return flight_messages.Empty()

    def logged(change: Callable[..., group_calls.Answer]) -> Action:
        """Passes on the name of the client, its user and address, for the log."""
        return lambda caller, request: change(request, client=caller.name)

    without_caller: dict[str, Callable[[Any], group_calls.Answer]] = {
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
        "topics.schemas": broker.topics.schemas,
        "topics.compact": lambda request: broker.topics.compact(request.topic),
        "records.delete": broker.deletion.delete,
        "offsets.for_times": broker.offsets_for_times,
        "offsets.lag": broker.lags.answer,
        "producers.new": lambda _: broker.producer_ids.new(),
        **group_calls.actions(groups),
    }
    return {
        **{name: _ignoring_caller(action) for name, action in without_caller.items()},
        "cluster": lambda caller, _: broker.cluster(caller.listener),
        "groups.join": lambda caller, request: group_calls.join(groups, request, host=caller.host),
        "batches.append_staged": append_staged,
        "publish.now": publish,
        "tokens.new": functools.partial(_new_token, gate),
        "broker.log_level": logged(broker.cluster_admin.log_level),
        "topics.create": logged(broker.topics.create),
        "topics.alter": logged(broker.topics.alter),
        "topics.add_partitions": logged(broker.topics.add_partitions),
        "topics.delete": delete,
    }


def _new_token(
    gate: Gate | None, caller: Caller, request: flight_messages.NewToken
) -> flight_messages.IssuedToken:
    if caller.is_for_tasks:
        raise errors.NotAuthenticated(reason="a token for tasks cannot be exchanged for others")
    if sum(map(len, request.topics or ())) > limits.TOKEN_TOPIC_CHARACTERS:
        most = f"{limits.TOKEN_TOPIC_CHARACTERS:,} characters"
        raise errors.BadRequest(reason=f"the names of a token's topics have more than {most}")
    if gate is None or caller.identity is None:
        return flight_messages.IssuedToken(authorization="")
    token = gate.task_token(caller.identity, request.topics, seconds=limits.TOKEN_SECONDS)
    return flight_messages.IssuedToken(authorization=token)


def _ignoring_caller(action: Callable[[Any], group_calls.Answer]) -> Action:
    return lambda _, request: action(request)


def _silently(work: Callable[[Any], None]) -> Callable[[Any], flight_messages.Empty]:
    def answer(request: Any) -> flight_messages.Empty:
        work(request)
        return flight_messages.Empty()

    return answer
