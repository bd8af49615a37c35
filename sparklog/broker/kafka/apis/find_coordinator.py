"""FindCoordinator (10): who keeps a group (KIP-699). Of transactions and share groups, nobody."""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Each, Fields, Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME

_GROUP: Final = 0


@serves(10, "find_coordinator", last=6)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    found = await _found(door, getattr(body, "key_type", _GROUP))
    keys = getattr(body, "coordinator_keys", ())
    return {
        "throttle_time": NO_TIME,
        **found,
        "coordinators": Each(lambda key: {"key": key, **found}, keys),
    }


async def _found(door: Door, key_type: int) -> Fields:
    try:
        if key_type != _GROUP:
            raise errors.BadRequest(reason="transactions and share groups are not to be had here")
        await door.blocking(Work.CONTROL, door.groups.open)
    except errors.SparklogError as error:
        code = code_of(error)
        if isinstance(error, errors.Retriable):
            code = ErrorCode.coordinator_not_available
        return {
            "error_code": code,
            "error_message": str(error),
            "node_id": -1,
            "host": "",
            "port": -1,
        }
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "node_id": door.core.broker,
        "host": door.host,
        "port": door.port,
    }
