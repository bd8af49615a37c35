"""InitProducerId (22): an id for an idempotent producer (KIP-98, KIP-360)."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog import errors, wire
from sparklog.broker.kafka.codes import code_of
from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.registry import Door, Reply, Work, serves
from sparklog.broker.kafka.times import NO_TIME


@serves(22, "init_producer_id", last=5)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    producer_id, code = -1, ErrorCode.none
    if body.transactional_id is not None:
        code = ErrorCode.invalid_request
    else:
        try:
            # Also for one that has an id already: what it wrote under that is complete or lost,
            # and a new id begins its sequences anew.
            producer_id = (await _new_producer(door)).producer_id
        except errors.SparklogError as error:
            code = code_of(error)
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "producer_id": producer_id,
        "producer_epoch": -1 if code else 0,
    }


async def _new_producer(door: Door) -> wire.ProducerIdentity:
    """Waits for storage once for many; those that wait meanwhile take no thread."""
    found = door.core.producer_at_hand()
    if found is None:
        async with door.ids:
            found = door.core.producer_at_hand()
            if found is None:
                found = await door.blocking(Work.CONTROL, door.core.new_producer)
    return found
