"""InitProducerId (22): a new id for an idempotent producer (KIP-98, KIP-360).

Every request returns a new id with epoch 0, even for a producer that already has one.
Transactional producers are rejected.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.kafka.error_codes import code_of
from sparklog.broker.kafka.messages import Fields, Request
from sparklog.broker.kafka.registry import HandlerContext, Reply, WorkerPool, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.formats import flight_messages


@serves(22, "init_producer_id", max_version=5)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    if request.body.transactional_id is not None:
        return _fields(ErrorCode.invalid_request)
    try:
        await request.access.check_idempotent_write()
    except errors.NotAuthorized as error:
        return _fields(code_of(error))
    try:
        # A producer that asks again has given up its old batches, and starts new sequences.
        return _fields(ErrorCode.none, (await _new_producer(context)).producer_id)
    except errors.SparklogError as error:
        return _fields(code_of(error))


def _fields(code: ErrorCode, producer_id: int = -1) -> Fields:
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "producer_id": producer_id,
        "producer_epoch": -1 if code else 0,
    }


async def _new_producer(context: HandlerContext) -> flight_messages.ProducerIdentity:
    """Returns an id. Many requests share one wait for storage, and occupy no threads for it."""
    identity = context.broker.producer_ids.new_if_at_hand()
    if identity is None:
        async with context.producer_id_lock:
            identity = context.broker.producer_ids.new_if_at_hand()
            if identity is None:
                identity = await context.run_blocking(
                    WorkerPool.CONTROL, context.broker.producer_ids.new
                )
    return identity
