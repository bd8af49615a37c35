"""DescribeClientQuotas (48): the quotas that a filter selects (KIP-546).

The checks of a filter, their codes and their texts are those of Kafka's `ClientQuotasImage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, LazyArray, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.security.acl import Operation
from sparklog.security.quota import IP, TYPES, QuotaEntity, QuotaKey
from sparklog.security.quotas import ANY, matches

_COMPONENTS_MAX: Final = 16
"""Components of a filter that are examined; more than the types are an error."""
_EXACT: Final = 0
_WITHOUT_NAME: Final[Mapping[int, tuple[str, object]]] = {
    1: ("MATCH_TYPE_DEFAULT", None),
    2: ("MATCH_TYPE_SPECIFIED", ANY),
}
"""Kafka's name of a match type, and what it selects."""


@serves(48, "describe_client_quotas", max_version=1, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    try:
        await request.access.check(Operation.DESCRIBE_CONFIGS)
        if len(body.components) > _COMPONENTS_MAX:
            raise errors.BadRequest(reason=f"a filter has at most {len(TYPES)} components")
        _check_types(each.entity_type for each in body.components)
        wanted = {each.entity_type: _wanted(each) for each in body.components}
    except (errors.NotAuthorized, errors.BadRequest) as error:
        return _reply(code_of(error), str(error), None)
    unknown = sorted(wanted.keys() - TYPES)
    if unknown:
        return _reply(ErrorCode.unsupported_version, f"Unsupported entity type {unknown[0]}", None)
    quotas = context.security_admin.state.quotas if context.security_admin is not None else {}
    found = [
        each
        async for each in context.scheduler.iterate(quotas.items())
        if matches(each[0], wanted, is_strict=body.strict)
    ]
    return _reply(ErrorCode.none, None, LazyArray(_entry, found))


def _check_types(types: Iterable[str]) -> None:
    """Raises `BadRequest` for types that a filter cannot combine."""
    seen: set[str] = set()
    for each in types:
        if not each:
            raise errors.BadRequest(reason="Invalid empty entity type.")
        if each in seen:
            reason = f"Entity type {each} cannot appear more than once in the filter."
            raise errors.BadRequest(reason=reason)
        seen.add(each)
    if IP in seen and len(seen & TYPES) > 1:
        reason = "Invalid entity filter component combination. IP filter component should not be"
        raise errors.BadRequest(reason=f"{reason} used with user or clientId filter component.")


def _wanted(component: Any) -> object:
    """Returns the name that a component selects. Raises `BadRequest`."""
    kind, name = component.match_type, component.match
    if kind == _EXACT:
        if name is None:
            reason = "Request specified MATCH_TYPE_EXACT, but set match string to null."
            raise errors.BadRequest(reason=reason)
        return name
    known = _WITHOUT_NAME.get(kind)
    if known is None:
        raise errors.BadRequest(reason=f"Unknown match type {kind}")
    if name is not None:
        reason = f"Request specified {known[0]}, but also specified a match string."
        raise errors.BadRequest(reason=reason)
    return known[1]


def _reply(code: ErrorCode, message: str | None, entries: Any) -> Reply:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "entries": entries,
    }


def _entry(found: tuple[QuotaEntity, Mapping[QuotaKey, float]]) -> Fields:
    entity, values = found
    return {
        "entity": [
            {"entity_type": kind, "entity_name": name} for kind, name in entity.parts.items()
        ],
        "values": [{"key": key.value, "value": value} for key, value in values.items()],
    }
