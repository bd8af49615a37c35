"""DescribeCluster (60): its id and its brokers (KIP-700, KIP-919, KIP-1073)."""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from sparklog.broker.kafka.messages import Request
from sparklog.broker.kafka.operations import NOT_ASKED, ON_CLUSTER
from sparklog.broker.kafka.registry import Door, Reply, serves
from sparklog.broker.kafka.times import NO_TIME

_BROKERS: Final = 1
_CONTROLLERS: Final = 2


@serves(60, "describe_cluster", last=2)
async def _handle(door: Door, request: Request) -> Reply:
    body = request.body
    cluster = door.core.cluster()
    broker = cluster.brokers[0].broker
    code, message = ErrorCode.none, None
    asked = getattr(body, "endpoint_type", _BROKERS)
    if asked == _CONTROLLERS:
        code, message = ErrorCode.mismatched_endpoint_type, "this is a broker, and no controller"
    elif asked != _BROKERS:
        code, message = ErrorCode.unsupported_endpoint_type, f"endpoint type {asked} is unknown"
    known = {"broker_id": broker, "host": door.host, "port": door.port, "rack": None}
    return {
        "throttle_time": NO_TIME,
        "error_code": code,
        "error_message": message,
        "endpoint_type": _BROKERS,
        "cluster_id": cluster.cluster_id,
        "controller_id": -1 if code else broker,
        "brokers": () if code else [{**known, "is_fenced": False}],
        "cluster_authorized_operations": (
            ON_CLUSTER if body.include_cluster_authorized_operations else NOT_ASKED
        ),
    }
