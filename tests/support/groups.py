"""Idle members of consumer groups: they join, and are assigned partitions by the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparklog.client.consumer.assignors import encode_assignment
from sparklog.formats.group_messages import GroupProtocol, JoinGroup, LeaveGroup, SyncGroup
from tests.support.flights import BrokerClient
from tests.support.live import LiveBroker


@contextmanager
def join(
    broker: LiveBroker,
    group: str,
    partitions: Sequence[tuple[str, int]] = (),
    **details: Any,
) -> Iterator[str]:
    """Yields the id of the only member of the group, to which the partitions are assigned."""
    with BrokerClient(broker.address) as client:
        joining = JoinGroup(
            group=group,
            session_timeout_ms=60_000,
            rebalance_timeout_ms=60_000,
            protocols=[GroupProtocol(name="range")],
            **details,
        )
        joined = client.action("groups.join", joining)
        client.action(
            "groups.sync",
            SyncGroup(
                group=group,
                generation=joined.generation,
                member_id=joined.member_id,
                instance_id=joining.instance_id,
                assignments={joined.member_id: encode_assignment(partitions)},
            ),
        )
        leaving = LeaveGroup(
            group=group, member_id=joined.member_id, instance_id=joining.instance_id
        )
        yield joined.member_id
        client.action("groups.leave", leaving)
