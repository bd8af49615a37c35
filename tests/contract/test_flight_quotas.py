"""Quotas of native clients: they wait in their calls, and other clients do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow.flight as flight
import pytest

from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.formats import flight_messages
from sparklog.settings import FlightSettings, KafkaSettings
from tests.support.flights import BrokerClient
from tests.support.kafkas import broker
from tests.support.secured import set_quota
from tests.support.waiting import wait_until

QUOTA: Final = 100_000
VALUE: Final = "x" * 500_000
"""A record of five seconds; two fit into an empty window."""
ANONYMOUS: Final = {"user": "ANONYMOUS"}
NATIVE: Final = {"client-id": "sparklog"}


@pytest.fixture(name="agent", scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    settings = FlightSettings(listen="127.0.0.1:0", max_streams=2)
    root = tmp_path_factory.mktemp("root")
    with broker(root, flight=settings, kafka=KafkaSettings(listen="")) as agent:
        yield agent


@pytest.fixture(name="client")
def _client(agent: Agent) -> Iterator[BrokerClient]:
    with BrokerClient(agent.address) as client:
        client.action("topics.create", flight_messages.CreateTopic(topic="t", if_absent=True))
        yield client
    for entity, values in dict(agent._access.watch.state.quotas).items():
        set_quota(agent, entity.parts, **dict.fromkeys(values))


def waiting(agent: Agent) -> int:
    """Returns how many calls wait."""
    assert agent.listeners.flight is not None
    throttles = agent.listeners.flight._throttles
    assert throttles is not None
    return throttles.waiting


def test_an_appending_client_waits(agent: Agent, client: BrokerClient) -> None:
    """The append that exceeds the quota is acked and its call waits, until quotas change.

    One of two streams may wait; another is refused.
    """
    set_quota(agent, ANONYMOUS, producer_byte_rate=QUOTA)
    done = threading.Event()

    def append() -> None:
        with BrokerClient(agent.address) as other:
            for _ in range(3):
                other.append([VALUE], topic="t")
        done.set()

    thread = threading.Thread(target=append)
    thread.start()
    wait_until(lambda: waiting(agent) == 1, "the call waits")
    assert client.read(0, 1, topic="t").num_rows == 1, "others are not slowed"
    assert client.action("topics.list", flight_messages.Empty()) is not None
    with pytest.raises((flight.FlightError, errors.TooManyStreams), match="throttled streams"):
        client.append([VALUE], topic="t")
    assert not done.is_set()
    set_quota(agent, ANONYMOUS, producer_byte_rate=None)
    thread.join(30)
    assert done.is_set()
    assert waiting(agent) == 0


def test_a_reading_client_waits(agent: Agent, client: BrokerClient) -> None:
    """A call gets the records within its quota at once, and a tail the next ones later."""
    for _ in range(4):
        client.append([VALUE], topic="t")
    set_quota(agent, NATIVE, consumer_byte_rate=QUOTA)
    position = flight_messages.TailPosition(topic="t", partition=0, offset=0)
    tail = client.tail(
        flight_messages.TailRequest(positions=[position], heartbeat_ms=50, max_batch_rows=1)
    )
    rows = 0
    while rows < 3:
        batch, beside = next(tail)
        rows += batch.num_rows
        if rows == 3:
            assert not beside.idle
    idle = [next(tail)[1].idle for _ in range(3)]
    assert idle == [True] * 3, "heartbeats continue while it is throttled"
    begun = time.monotonic()
    set_quota(agent, NATIVE, consumer_byte_rate=None)
    assert next(batch for batch, beside in tail if not beside.idle).num_rows == 1
    assert time.monotonic() - begun < 20
    tail.close()  # type: ignore[attr-defined]


def test_another_call_waits_too(agent: Agent, client: BrokerClient) -> None:
    """Promise: a client does not evade its quota by a call for each batch."""
    client.append([VALUE], topic="t")
    end = client.describe("t").partitions[0].end
    quotas = agent._access.quotas
    for use, key, call in (
        (quotas.produced, "producer_byte_rate", lambda: client.append([VALUE], topic="t")),
        (quotas.consumed, "consumer_byte_rate", lambda: client.read(0, 1, topic="t")),
    ):
        set_quota(agent, ANONYMOUS, **{key: QUOTA})
        assert use("ANONYMOUS", "sparklog", 20 * QUOTA) > 0, "what another call has used"
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(call)
            wait_until(lambda: waiting(agent) == 1, "the call waits")
            assert client.describe("t").partitions[0].end == end
            assert not done.done()
            set_quota(agent, ANONYMOUS, **{key: None})
            done.result(30)
        end = client.describe("t").partitions[0].end
    set_quota(agent, ANONYMOUS, consumer_byte_rate=QUOTA)
    quotas.consumed("ANONYMOUS", "sparklog", 20 * QUOTA)
    position = flight_messages.TailPosition(topic="t", partition=0, offset=0)
    tail = client.tail(flight_messages.TailRequest(positions=[position], heartbeat_ms=50))
    assert [next(tail)[1].idle for _ in range(3)] == [True] * 3
    tail.close()  # type: ignore[attr-defined]


def test_mutations_of_native_clients(agent: Agent, client: BrokerClient) -> None:
    """Topics and partitions beyond the quota are refused, with the time to wait."""
    set_quota(agent, NATIVE, controller_mutation_rate=1.0)
    client.action("topics.create", flight_messages.CreateTopic(topic="many", partitions=20))
    refused = (
        ("topics.create", flight_messages.CreateTopic(topic="more")),
        ("topics.add_partitions", flight_messages.AddPartitions(topic="many", partitions=21)),
        ("topics.delete", flight_messages.TopicName(topic="many")),
    )
    for name, request in refused:
        with pytest.raises(errors.MutationQuotaExceeded) as error:
            client.action(name, request)
        assert 0 < error.value.throttle_ms < 10_000
    client.action("topics.list", flight_messages.Empty())
