"""Two addresses of one broker that share its partitions, as brokers of a cluster do.

Refusals are `NotLeader`; everything else is the real broker's.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import msgspec

from sparklog import errors
from sparklog.broker.acceptors import Acceptor
from sparklog.broker.flight.hooks import Request
from sparklog.broker.flight.listener import FlightListener
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.clock import SystemClock
from sparklog.formats import flight_messages
from sparklog.listeners import parse
from sparklog.settings import GroupSettings
from sparklog.storage.objects import MemoryStore
from tests.support.brokers import Rig

FIRST, OTHER = 1, 7


class Leaders:
    """Brokers `FIRST`, which leads all partitions at first, and `OTHER`, with topics t and t4."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.rig = Rig(MemoryStore(clock), clock, broker=FIRST)
        self.led_by: dict[tuple[str, int], int] = defaultdict(lambda: FIRST)
        self.addresses: dict[int, str] = {}
        self.requests: dict[int, list[Request]] = {FIRST: [], OTHER: []}
        self._groups = Coordinator(self.rig.broker, settings=GroupSettings(), clock=clock)
        self._listeners: dict[int, FlightListener] = {}
        self.fault: Callable[[Request], None] = lambda _: None
        for number in (FIRST, OTHER):
            self.start(number)
        for topic, partitions in (("t", 1), ("t4", 4)):
            self.rig.create(topic, partitions)

    def start(self, number: int) -> None:
        """Starts a broker; the metadata names it from then on."""
        listening = socket.create_server(("127.0.0.1", 0))
        self.addresses[number] = f"127.0.0.1:{listening.getsockname()[1]}"
        acceptor = Acceptor(listener=parse(self.addresses[number])[0], listening=listening)
        broker: Any = _Facade(self)
        self._listeners[number] = FlightListener(
            broker, self._groups, [acceptor], hooks=_Led(self, number)
        )

    def stop(self, number: int) -> None:
        """Ends a broker: cuts its connections, and refuses new ones."""
        del self.addresses[number]
        listener = self._listeners.pop(number)
        listener.cut_connections()
        listener.close()

    def appended(self, number: int) -> set[int]:
        """Partitions of the batches that a broker has appended."""
        return {each.partition for each in self.requests[number] if each.name == "append"}

    def tailed(self, number: int) -> set[int]:
        """The partitions that a broker has sent to consumers."""
        return {each.partition for each in self.requests[number] if each.name == "tail"}

    def fill(self, topic: str, rows: int, partition: int = 0) -> None:
        """Appends values "0", "1", ... from the partition's end on."""
        end = self.rig.end(topic, partition)
        values = [b"%d" % i for i in range(end, end + rows)]
        self.rig.append(values, topic=topic, partition=partition)

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [value for _, value in self.rig.read(topic, partition)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rig.broker.close()
        for number in list(self._listeners):
            self.stop(number)


class _Facade:
    """The broker, whose metadata names both addresses."""

    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders
        topics = leaders.rig.broker.topics
        self.topics = SimpleNamespace(
            **{name: getattr(topics, name) for name in dir(topics) if not name.startswith("_")}
        )
        self.topics.describe = self._describe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leaders.rig.broker, name)

    def cluster(self, _listener: str = "") -> flight_messages.ClusterInfo:
        brokers = [
            flight_messages.BrokerInfo(broker=number, epoch=1, address=address)
            for number, address in self._leaders.addresses.items()
        ]
        return msgspec.structs.replace(self._leaders.rig.broker.cluster(), brokers=brokers)

    def _describe(self, topic: str) -> flight_messages.TopicInfo:
        info = self._leaders.rig.broker.topics.describe(topic)
        partitions = [
            msgspec.structs.replace(each, leader=self._leaders.led_by[topic, each.partition])
            for each in info.partitions
        ]
        return msgspec.structs.replace(info, partitions=partitions)


class _Led:
    """Refuses requests for partitions that the other broker leads."""

    def __init__(self, leaders: Leaders, number: int) -> None:
        self._leaders = leaders
        self._number = number

    def before(self, request: Request, /) -> None:
        self._leaders.fault(request)
        leader = self._leaders.led_by[request.topic, request.partition]
        if request.name in ("append", "tail") and leader != self._number:
            raise errors.NotLeader(
                topic=request.topic,
                partition=request.partition,
                leader=leader,
            )
        self._leaders.requests[self._number].append(request)

    def after(self, request: Request, /) -> None: ...
