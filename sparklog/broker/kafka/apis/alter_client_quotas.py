"""AlterClientQuotas (49): sets and removes quotas (KIP-546).

The checks and their codes are those of Kafka's `ClientQuotaControlManager`. Of two alterations of
the same entity in a request, none is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.security_admin import CHANGED_QUOTAS
from sparklog.security.acl import Operation
from sparklog.security.quota import TYPES, QuotaEntity
from sparklog.security.quotas import changed, entity_of
from sparklog.security.users import Change

_Parts = tuple[tuple[str, str | None], ...]
"""Types and names of an entity, sorted."""
_PARTS_MAX: Final = 16
"""Parts of an entity that are examined; more than the types are an error."""
_Outcomes = dict[_Parts, errors.SparklogError | None]


@serves(49, "alter_client_quotas", max_version=1)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    entries = request.body.entries
    places = [_parts_of(each) async for each in context.scheduler.iterate(entries)]
    try:
        await request.access.check_security_change(Operation.ALTER_CONFIGS)
        if context.security_admin is None:
            raise errors.BadRequest(reason="this listener changes no quotas")
        if (
            len(entries) > CHANGED_QUOTAS
            or sum(max(len(each.ops), 1) for each in entries) > CHANGED_QUOTAS
        ):
            reason = f"one request changes at most {CHANGED_QUOTAS:,} quotas"
            raise errors.BadRequest(reason=reason)
        outcomes, changes = _checked(places, entries)
        if changes:
            change = partial(
                context.security_admin.change_quotas,
                request.access.administrator,
                only_checks=request.body.validate_only,
            )
            made = await context.run_blocking(WorkerPool.CHANGE, change, changes)
            outcomes |= {tuple(sorted(each.parts.items())): error for each, error in made.items()}
    except errors.SecurityNotRead:
        raise
    except errors.SparklogError as error:
        outcomes = dict.fromkeys(places, error)
    return {
        "throttle_time": NO_TIME,
        "entries": [
            {
                "error_code": ErrorCode.none if error is None else code_of(error),
                "error_message": None if error is None else str(error),
                "entity": [{"entity_type": kind, "entity_name": name} for kind, name in place],
            }
            async for place, error in context.scheduler.iterate(outcomes.items())
        ],
    }


def _parts_of(entry: Any) -> _Parts:
    if len(entry.entity) > _PARTS_MAX:
        raise errors.BadRequest(reason=f"an entity has at most {len(TYPES)} parts")
    return tuple(sorted({each.entity_type: each.entity_name for each in entry.entity}.items()))


def _checked(
    places: Sequence[_Parts], entries: Sequence[Any]
) -> tuple[_Outcomes, dict[QuotaEntity, Change]]:
    """Returns the errors of invalid alterations, and the changes of the others."""
    counts = Counter(places)
    outcomes: _Outcomes = {}
    changes: dict[QuotaEntity, Change] = {}
    for place, entry in zip(places, entries, strict=True):
        outcomes[place] = None
        try:
            if counts[place] > 1:
                reason = f"Ignoring duplicate entity {dict(place)}"
                raise errors.BadRequest(reason=reason)
            if len({each.key for each in entry.ops}) < len(entry.ops):
                reason = f"Duplicate quota key, not updating quota for this entity {dict(place)}"
                raise errors.BadRequest(reason=reason)
            entity = entity_of(dict(place))
            values = {each.key: None if each.remove else each.value for each in entry.ops}
            changes[entity] = changed(entity, values)
        except errors.BadRequest as error:
            outcomes[place] = error
    return outcomes, changes
