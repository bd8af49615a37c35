"""Actions of Flight clients that administer topics, groups or brokers, for the audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Final, NamedTuple

from sparklog.broker.audit import Audit
from sparklog.broker.audit_events import ITEMS_NAMED, request_of, text
from sparklog.broker.flight.actions import Action
from sparklog.broker.flight.caller import Caller
from sparklog.broker.flight.gate import Gate
from sparklog.broker.flight.group_calls import Answer
from sparklog.formats import flight_messages
from sparklog.security.acl import ResourceType


class _Subject(NamedTuple):
    """The resource of an action, and what it does with it."""

    resource: ResourceType
    name: str = ""
    details: Mapping[str, Any] = {}


def _topic(*fields: str) -> Callable[[Any], _Subject]:
    """Returns the subject of an action on a topic. `fields`: of its request, for the details."""

    def subject(request: Any) -> _Subject:
        details = {name: _shown(getattr(request, name)) for name in fields}
        return _Subject(ResourceType.TOPIC, request.topic, details)

    return subject


def _shown(value: Any) -> Any:
    """Returns a value of a request, its texts and its length bounded."""
    if isinstance(value, dict):
        return {_shown(key): _shown(each) for key, each in [*value.items()][:ITEMS_NAMED]}
    return text(value) if isinstance(value, str) else value


def _cluster(_request: Any) -> _Subject:
    return _Subject(ResourceType.CLUSTER)


def _balance(request: flight_messages.BalanceCluster) -> _Subject | None:
    return None if request.dry_run else _cluster(request)


def _move(request: flight_messages.MovePartitions) -> _Subject:
    moves = [f"{each.topic}-{each.partition} to {each.target}" for each in request.moves]
    return _Subject(ResourceType.CLUSTER, details={"moves": [*map(text, moves[:ITEMS_NAMED])]})


def _drain(request: flight_messages.DrainBroker) -> _Subject:
    return _Subject(ResourceType.CLUSTER, details={"broker": request.broker})


def _log_level(request: flight_messages.LogLevel) -> _Subject | None:
    if not request.level:
        return None
    return _Subject(ResourceType.CLUSTER, details={"level": request.level})


def _group(request: Any) -> _Subject:
    return _Subject(ResourceType.GROUP, request.group)


AUDITED: Final[Mapping[str, Callable[[Any], _Subject | None]]] = {
    "broker.drain": _drain,
    "broker.log_level": _log_level,
    "cluster.balance": _balance,
    "cluster.move": _move,
    "cluster.upgrade": _cluster,
    "groups.delete": _group,
    "groups.forget": _group,
    "records.delete": _topic("offsets"),
    "topics.add_partitions": _topic("partitions"),
    "topics.alter": _topic("config"),
    "topics.compact": _topic(),
    "topics.create": _topic("config"),
    "topics.delete": _topic(),
}
"""The subject of a request, by the name of the action; None if it changes nothing."""


def audited(actions: Mapping[str, Action], gate: Gate | None) -> Mapping[str, Action]:
    """Returns the actions, of which some are noted in the audit, if there is one."""
    audit = gate.authorization.audit if gate is not None else None
    if audit is None:
        return actions
    return {
        name: partial(_noted, audit, name, action) if name in AUDITED else action
        for name, action in actions.items()
    }


def _noted(audit: Audit, name: str, action: Action, caller: Caller, request: Any) -> Answer:
    """Answers a request, and notes its outcome."""
    subject = AUDITED[name](request)
    if subject is None:
        return action(caller, request)
    note = partial(_note, audit, name, caller, subject)
    try:
        answer = action(caller, request)
    except BaseException as error:
        note(error)
        raise
    if isinstance(answer, Future):
        answer.add_done_callback(lambda done: note(_error_of(done)))
    else:
        note(None)
    return answer


def _error_of(done: Future[Any]) -> BaseException | None:
    return CancelledError() if done.cancelled() else done.exception()


def _note(
    audit: Audit, action: str, caller: Caller, subject: _Subject, error: BaseException | None
) -> None:
    audit.note(
        request_of(
            action,
            type(error).__name__ if error is not None else "NONE",
            caller.principal,
            [subject.name] if subject.name else [],
            listener=caller.listener,
            host=caller.host,
            resource=subject.resource.name,
            details=subject.details,
        )
    )
