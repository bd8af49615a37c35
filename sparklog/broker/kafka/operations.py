"""Authorized operations in replies, as bit fields (KIP-430).

A request has an option for them, which older versions lack; without it they are `NOT_REQUESTED`.
"""

from __future__ import annotations

from typing import Final

from sparklog.broker.kafka.messages import Request
from sparklog.security.acl import Operation, ResourceType

NOT_REQUESTED: Final = -(2**31)


def on_cluster(request: Request) -> int:
    """Returns the operations allowed on the cluster; as in Kafka, none without DESCRIBE."""
    if not getattr(request.body, "include_cluster_authorized_operations", False):
        return NOT_REQUESTED
    access = request.access
    return access.authorized_operations() if access.may(Operation.DESCRIBE) else 0


def on_topic(request: Request, name: str) -> int:
    """Returns the operations allowed on a topic, in reply to Metadata."""
    if not getattr(request.body, "include_topic_authorized_operations", False):
        return NOT_REQUESTED
    return request.access.authorized_operations(ResourceType.TOPIC, name)


def on_group(request: Request, group_id: str) -> int:
    """Returns the operations allowed on a group, in reply to DescribeGroups."""
    if not getattr(request.body, "include_authorized_operations", False):
        return NOT_REQUESTED
    return request.access.authorized_operations(ResourceType.GROUP, group_id)
