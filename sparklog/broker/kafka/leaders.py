"""Partitions that another broker leads or that are moving, and their leaders (KIP-951).

A client that has asked the wrong broker backs off before it retries, longer each time. So a request
for a partition that this broker does not serve is rejected only after a read of the metadata, and
not while the partition is moving to or from this broker. The error then names the leader and its
address, so that the client can ask it next without a metadata request.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

from sparklog import errors
from sparklog.broker.broker import Broker
from sparklog.broker.groups.committed_offsets import TopicPartition
from sparklog.broker.kafka.messages import Fields
from sparklog.broker.kafka.registry import HandlerContext, WorkerPool
from sparklog.broker.kafka.topics import nodes
from sparklog.listeners import Listener

MOVE_WAIT_SECONDS = 0.25  # for which a request waits for a moving partition


class Leader(NamedTuple):
    """The broker that leads a partition, and its leader epoch."""

    broker: int
    epoch: int

    def fields(self) -> Fields:
        """Returns the fields of `current_leader`."""
        return {"leader_id": self.broker, "leader_epoch": self.epoch}


async def settle(context: HandlerContext, partitions: Collection[TopicPartition]) -> None:
    """Waits until the leaders of partitions that this broker does not serve are known.

    Returns after `MOVE_WAIT_SECONDS` regardless: the request's other partitions wait too. If all of
    them have just been handed over, their leaders are known without reading the metadata.
    """
    broker = context.broker
    if not broker.is_member:
        return
    deadline = time.monotonic() + MOVE_WAIT_SECONDS
    are_resigned = all(
        broker.partitions.has_resigned(topic, number) for topic, number in partitions
    )
    if not are_resigned and not _are_moving(broker, partitions):
        # Raises `MetadataChanged` if the client knew more than this broker.
        with suppress(errors.SparklogError):
            await context.run_blocking(
                WorkerPool.PROOF, broker.metadata.prove, broker.metadata.looks
            )
    while _are_moving(broker, partitions) and (left := deadline - time.monotonic()) > 0:
        await context.wait_for_leaders(left)


def _are_moving(broker: Broker, partitions: Iterable[TopicPartition]) -> bool:
    return any(broker.partitions.is_moving(topic, number) for topic, number in partitions)


def leader_of(broker: Broker, topic: str, number: int) -> Leader | None:
    """Returns the leader of a partition if that is another broker and is up."""
    with suppress(errors.Invalid):
        leader = Leader(*broker.partitions.leader_of(topic, number))
        if leader.broker != broker.broker_id and leader.broker in broker.members.up():
            return leader
    return None


def endpoints(
    context: HandlerContext, listener: Listener, leaders: Iterable[Leader | None]
) -> list[Fields]:
    """Returns the `node_endpoints` of a reply that names these leaders, each leader once."""
    wanted = {each.broker for each in leaders if each is not None}
    if not wanted:
        return []
    return [
        {"node_id": each.broker, "host": each.host, "port": each.port, "rack": each.rack}
        for each in nodes(context.broker, listener)
        if each.broker in wanted
    ]
