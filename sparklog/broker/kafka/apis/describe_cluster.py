"""DescribeCluster (60): the cluster's id and its brokers (KIP-700, KIP-919, KIP-1073).

The broker that answers is named as the controller (see `metadata`). There are no controller
endpoints.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.operations import on_cluster
from sparklog.broker.kafka.registry import HandlerContext, Reply, serves
from sparklog.broker.kafka.times import NO_TIME
from sparklog.broker.kafka.topics import nodes

_BROKERS: Final = 1
_CONTROLLERS: Final = 2


@serves(60, "describe_cluster", max_version=2, is_repeatable=True)
async def _handle(context: HandlerContext, request: Request) -> Reply:
    body = request.body
    cluster = context.broker.cluster()
    code, message = ErrorCode.none, None
    endpoint_type = getattr(body, "endpoint_type", _BROKERS)
    if endpoint_type == _CONTROLLERS:
        code, message = ErrorCode.mismatched_endpoint_type, "this is a broker, not a controller"
    elif endpoint_type != _BROKERS:
        code, message = (
            ErrorCode.unsupported_endpoint_type,
            f"endpoint type {endpoint_type} is unknown",
        )
    brokers = [
        {
            "broker_id": each.broker,
            "host": each.host,
            "port": each.port,
            "rack": each.rack,
            "is_fenced": False,
        }
        for each in nodes(context.broker, request.listener)
    ]
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "endpoint_type": _BROKERS,
        "cluster_id": cluster.cluster_id,
        "controller_id": -1 if code else context.broker.broker_id,
        "brokers": () if code else brokers,
        "cluster_authorized_operations": on_cluster(request),
    }
