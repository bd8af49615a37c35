"""Authorized operations in replies, as bit fields (KIP-430)."""

from __future__ import annotations

from typing import Final

from sparklog.broker.kafka.access import Access
from sparklog.security.acl import Operation

NOT_REQUESTED: Final = -(2**31)


def on_cluster(access: Access) -> int:
    """Returns the operations allowed on the cluster; as in Kafka, none without DESCRIBE."""
    return access.authorized_operations() if access.may(Operation.DESCRIBE) else 0
