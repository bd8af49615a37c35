"""Requests of Kafka clients that administer topics, groups or brokers, for the audit.

One line has all resources of a request with the same outcome. Resources that ACLs refuse have lines
of their own already (`Authorization.note_denied`). Changes of users and ACLs are versions of the
security state, which name their authors (`Audit.changed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from sparklog.broker.audit import Audit
from sparklog.broker.audit_events import ITEMS_NAMED, request_of, text
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import Reply
from sparklog.broker.kafka.resources import ResourceType
from sparklog.broker.kafka.scheduler import LoopScheduler
from sparklog.security import acl

_TOPIC: Final = acl.ResourceType.TOPIC.name
_GROUP: Final = acl.ResourceType.GROUP.name
_NOT_AUTHORIZED: Final = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.group_authorization_failed,
        ErrorCode.cluster_authorization_failed,
    }
)


class _Outcome(NamedTuple):
    """The outcome of a request for one resource."""

    resource: str
    name: str
    code: ErrorCode
    details: Mapping[str, Any] | None = None


def _named(array: str, key: str, resource: str) -> Callable[[Any, Fields], Iterator[_Outcome]]:
    """Returns the outcomes of a reply that has an array with a name and an error code each."""

    def outcomes(_body: Any, reply: Fields) -> Iterator[_Outcome]:
        for each in reply[array]:
            yield _Outcome(resource, each[key] or "", each["error_code"])

    return outcomes


def _created_partitions(body: Any, reply: Fields) -> Iterator[_Outcome]:
    counts = {each.name: each.count for each in body.topics}
    for each in reply["results"]:
        details = {"partitions": counts[each["name"]]}
        yield _Outcome(_TOPIC, each["name"], each["error_code"], details)


def _altered(body: Any, reply: Fields) -> Iterator[_Outcome]:
    configs = {(each.resource_type, each.resource_name): each.configs for each in body.resources}
    for each in reply["responses"]:
        kind, name = each["resource_type"], each["resource_name"]
        values = [*configs[kind, name]][:ITEMS_NAMED]
        details = {text(one.name): one.value and text(one.value) for one in values}
        is_known = kind in {*ResourceType}
        resource = ResourceType(kind).name if is_known else str(kind)
        yield _Outcome(resource, name, each["error_code"], details)


def _of_partitions(array: str, value: str) -> Callable[[Any, Fields], Iterator[_Outcome]]:
    """Returns the outcomes of a reply that has an error code for each partition.

    `value`: of the partitions without an error, for the details; empty for none.
    """

    def outcomes(_body: Any, reply: Fields) -> Iterator[_Outcome]:
        for topic in reply[array]:
            partitions = defaultdict[ErrorCode, dict[str, Any]](dict)
            for each in topic["partitions"]:
                code, number = each["error_code"], str(each["partition_index"])
                partitions[code][number] = each[value] if value else None
            for code, found in partitions.items():
                shown = dict([*found.items()][:ITEMS_NAMED])
                details = shown if value else {"partitions": [*map(int, shown)]}
                yield _Outcome(_TOPIC, topic["name"], code, details)

    return outcomes


def _deleted_offsets(body: Any, reply: Fields) -> Iterator[_Outcome]:
    code = reply["error_code"]
    topics = [text(each.name) for each in body.topics[:ITEMS_NAMED]]
    yield _Outcome(_GROUP, body.group_id, code, {"topics": topics})


_Outcomes = Callable[[Any, Fields], Iterable[_Outcome]]
AUDITED: Final[Mapping[int, tuple[str, _Outcomes]]] = {
    19: ("CreateTopics", _named("topics", "name", _TOPIC)),
    20: ("DeleteTopics", _named("responses", "name", _TOPIC)),
    21: ("DeleteRecords", _of_partitions("topics", "low_watermark")),
    33: ("AlterConfigs", _altered),
    37: ("CreatePartitions", _created_partitions),
    42: ("DeleteGroups", _named("results", "group_id", _GROUP)),
    44: ("IncrementalAlterConfigs", _altered),
    45: ("AlterPartitionReassignments", _of_partitions("responses", "")),
    47: ("OffsetDelete", _deleted_offsets),
}
"""The name in the audit, and the outcomes for a request and its reply, by API key."""


async def note_request(
    audit: Audit, request: Request, reply: Reply | Awaitable[Reply], scheduler: LoopScheduler
) -> None:
    """Notes a request that was handled, if it is one of `AUDITED` and not only a check.

    One with many resources is examined in turns.
    """
    known = AUDITED.get(request.api_key)
    if known is None or not isinstance(reply, Mapping):
        return
    if getattr(request.body, "validate_only", False):
        return
    action, outcomes_of = known
    same = defaultdict[tuple[str, ErrorCode], list[_Outcome]](list)
    async for each in scheduler.iterate(outcomes_of(request.body, reply)):
        if each.code not in _NOT_AUTHORIZED:
            same[each.resource, each.code].append(each)
    for (resource, code), found in same.items():
        details = {text(each.name): each.details for each in found[:ITEMS_NAMED] if each.details}
        _note(audit, request, action, code.name.upper(), resource, found, details)


def note_created(audit: Audit, request: Request, topic: str) -> None:
    """Notes a topic that was created since a client has asked for it."""
    created = [_Outcome(_TOPIC, topic, ErrorCode.none)]
    _note(audit, request, "Metadata", "NONE", _TOPIC, created, {})


def _note(
    audit: Audit,
    request: Request,
    action: str,
    outcome: str,
    resource: str,
    found: Iterable[_Outcome],
    details: Mapping[str, Any],
) -> None:
    audit.note(
        request_of(
            action,
            outcome,
            request.access.principal,
            (each.name for each in found),
            listener=request.listener.name,
            host=request.client_host.lstrip("/"),
            resource=resource,
            details=details,
        )
    )
