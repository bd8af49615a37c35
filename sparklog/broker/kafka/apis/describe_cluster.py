"""DescribeCluster (60): the cluster's id and its broker (KIP-700, KIP-919, KIP-1073).

Clients see one broker, this one, which is the controller too. There are no controller endpoints.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.operations import NOT_REQUESTED, ON_CLUSTER
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_BROKERS: Final = 1
_CONTROLLERS: Final = 2


@serves(60, "describe_cluster", max_version=2)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    cluster = context.broker.cluster()
    broker = cluster.brokers[0].broker
    code, message = ErrorCode.none, None
    endpoint_type = getattr(body, "endpoint_type", _BROKERS)
    if endpoint_type == _CONTROLLERS:
        code, message = ErrorCode.mismatched_endpoint_type, "this is a broker, not a controller"
    elif endpoint_type != _BROKERS:
        code, message = (
            ErrorCode.unsupported_endpoint_type,
            f"endpoint type {endpoint_type} is unknown",
        )
    node = {"broker_id": broker, "host": context.host, "port": context.port, "rack": None}
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "endpoint_type": _BROKERS,
        "cluster_id": cluster.cluster_id,
        "controller_id": -1 if code else broker,
        "brokers": () if code else [{**node, "is_fenced": False}],
        "cluster_authorized_operations": (
            ON_CLUSTER if body.include_cluster_authorized_operations else NOT_REQUESTED
        ),
    }
