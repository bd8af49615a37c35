"""Quotas of Kafka clients: what a broker answers, and for how long it reads nothing more."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest
from kio.schema.errors import ErrorCode

from sparklog.broker import quotas as quotas_module
from sparklog.broker.agent import Agent
from sparklog.broker.kafka import connection
from sparklog.broker.security_admin import CHANGED_QUOTAS
from sparklog.formats import consumer_offsets
from sparklog.security.acl import CLUSTER_NAME, Operation, ResourceType
from sparklog.security.state import Mode
from tests.contract.test_acl_enforcement import members
from tests.support.acls import acl
from tests.support.comparing import metadata_fields
from tests.support.kafkarequests import (
    CREATE_TOPICS,
    batch,
    create,
    create_fields,
    fetch_fields,
    produce,
    produce_fields,
)
from tests.support.kafkas import Frames, broker, frames
from tests.support.quota_cases import ALTER, CASES, DESCRIBE, altered, described, entry
from tests.support.secured import follow_acls, forget_use, set_quota
from tests.support.waiting import wait_until

CREATE_PARTITIONS, DELETE_TOPICS, METADATA = 37, 20, 3
TOPIC: Final = "orders"
QUOTA: Final = 1_000_000
NONE: Final = dt.timedelta(0)
CLIENT: Final = {"client-id": "frames"}
"""The clients of `Frames`."""


@pytest.fixture(name="agent", scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with broker(tmp_path_factory.mktemp("root")) as agent, frames(agent) as client:
        create(client, TOPIC)
        yield agent


@pytest.fixture(name="client")
def _client(agent: Agent) -> Iterator[Frames]:
    with frames(agent) as client:
        yield client
    for entity, values in dict(agent._access.watch.state.quotas).items():
        set_quota(agent, entity.parts, **dict.fromkeys(values))
    forget_use(agent)


def produced(client: Frames, size: int, topic: str = TOPIC) -> tuple[Any, float]:
    """Produces a record of so many bytes. Returns the throttle time, and the seconds it took."""
    begun = time.monotonic()
    reply = client.ask(0, 9, produce_fields(topic, 0, batch([bytes(size)])))
    ((found,),) = (each.partition_responses for each in reply.responses)
    assert found.error_code is ErrorCode.none
    return reply.throttle_time, time.monotonic() - begun


# ------------------------------------------------------------------------------ requests


def test_requests_are_checked_as_in_kafka(agent: Agent) -> None:
    """Promise: each case of `CASES`, which another test compares with a real Kafka."""
    with frames(agent) as client:
        for case in CASES:
            found = case.outcome_of(client.ask(case.key, 1, case.fields))
            assert found == (case.codes, case.quotas), case.what
    assert agent._access.watch.state.author.host == "127.0.0.1"


def test_what_is_not_supported_is_refused(client: Frames) -> None:
    """Promise: a quota without effect is not accepted, and a request with too many sets none."""
    (found,) = client.ask(ALTER, 1, altered({"user": "x"}, request_percentage=50.0)).entries
    assert found.error_code is ErrorCode.invalid_request
    assert "is not supported" in found.error_message
    many = [
        entry({"user": f"user-{number}"}, producer_byte_rate=1.0)
        for number in range(CHANGED_QUOTAS + 1)
    ]
    results = client.ask(ALTER, 1, {"entries": many, "validate_only": False}).entries
    assert {each.error_code for each in results} == {ErrorCode.invalid_request}
    assert len(results) == len(many)


def test_quotas_are_changed_by_those_who_may(agent: Agent, client: Frames) -> None:
    """Promise: while ACLs are observed or enforced, a change needs ALTER_CONFIGS on the cluster."""
    change = altered({"user": "x"}, producer_byte_rate=1.0)
    allowed = acl(ResourceType.CLUSTER, CLUSTER_NAME, Operation.ALTER_CONFIGS)
    for mode, acls, code in (
        (Mode.OBSERVE, [], ErrorCode.cluster_authorization_failed),
        (Mode.OBSERVE, [allowed], ErrorCode.none),
        (Mode.OFF, [], ErrorCode.none),
    ):
        follow_acls(agent, *acls, mode=mode)
        (found,) = client.ask(ALTER, 1, change).entries
        assert found.error_code is code, (mode, acls)


# ------------------------------------------------------------------------------ throttles


def test_a_producer_is_throttled(agent: Agent, client: Frames) -> None:
    """The reply names the time, and the next request is read when it is over."""
    assert produced(client, 100_000)[0] == NONE
    set_quota(agent, CLIENT, producer_byte_rate=QUOTA // 10)
    assert produced(client, 990_000)[0] == NONE
    begun = time.monotonic()
    throttle_time, _ = produced(client, 210_000)  # for 2 s, less the time since the first request
    assert NONE < throttle_time <= dt.timedelta(seconds=2)
    produced(client, 1)
    assert time.monotonic() - begun > throttle_time.total_seconds()


def test_a_new_connection_is_throttled_too(agent: Agent, client: Frames) -> None:
    """Promise: a client does not evade its quota by a connection for each request."""
    set_quota(agent, CLIENT, producer_byte_rate=QUOTA // 20)
    begun = time.monotonic()
    throttle_time, _ = produced(client, 600_000)  # for 2 s, less the time until the reply
    assert throttle_time > NONE
    with frames(agent) as other:
        other.ask(DESCRIBE, 1, described())
        produced(other, 1)
        assert time.monotonic() - begun > throttle_time.total_seconds()


def test_a_change_ends_throttles(agent: Agent, client: Frames) -> None:
    """A client that is throttled for minutes continues once its quota is raised."""
    set_quota(agent, CLIENT, producer_byte_rate=1_000)
    assert produced(client, 500_000)[0] > dt.timedelta(minutes=5)
    set_quota(agent, CLIENT, producer_byte_rate=QUOTA)
    throttle_time, seconds = produced(client, 1)
    assert throttle_time == NONE
    assert seconds < 30


def test_a_throttled_client_is_not_stalled(
    agent: Agent, client: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is throttled is not closed as an idle one; one whose client leaves ends."""
    set_quota(agent, CLIENT, producer_byte_rate=1_000)
    assert produced(client, 100_000)[0] > dt.timedelta(minutes=1)
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.1)
    listener = agent.listeners.kafka
    assert listener is not None
    (served,) = [each for each in listener._connections.values() if each.throttle.is_on]
    checked = threading.Event()

    def check() -> None:
        for _ in range(3):
            served.check_progress(1.0)
        checked.set()

    listener._loop.call_soon_threadsafe(check)
    assert checked.wait(10)
    assert served.throttle.is_on
    assert not served._stream.transport.is_closing()
    assert not served._grants
    client.close()
    wait_until(lambda: not served.throttle.is_on, "the end of the throttle")


def test_a_client_that_has_left_is_not_throttled(agent: Agent, client: Frames) -> None:
    """Promise: a connection does not outlive its client by the throttles of the requests that
    have been received.
    """
    listener = agent.listeners.kafka
    assert listener is not None
    set_quota(agent, CLIENT, producer_byte_rate=100)
    client.ask(DESCRIBE, 1, described())
    opened = listener.counts.connections_opened
    with frames(agent) as gone:
        unanswered = {**produce_fields(TOPIC, 0, batch([bytes(2_000)])), "acks": 0}
        gone._socket.sendall(b"".join(gone.frame(0, 9, 1, unanswered) for _ in range(10)))
    wait_until(lambda: listener.counts.connections_opened > opened, "the connection")
    fixtures = 2
    wait_until(lambda: listener.connection_count <= fixtures, "the end of the connection")


def test_a_client_that_leaves_at_once_is_throttled(agent: Agent, client: Frames) -> None:
    """Promise: a connection that ends with its first request evades no quota: it is not served."""
    set_quota(agent, CLIENT, producer_byte_rate=1_000)
    assert produced(client, 100_000)[0] > dt.timedelta(minutes=1)
    with frames(agent) as leaving:
        leaving._socket.sendall(leaving.frame(0, 9, 1, produce_fields(TOPIC, 0, batch([b"x"]))))
        leaving._socket.shutdown(socket.SHUT_WR)
        assert leaving._socket.recv(1) == b""


def test_a_consumer_is_throttled(agent: Agent, client: Frames) -> None:
    """A fetch beyond the quota gets a time and no records, which its session still gets later."""
    create(client, "fetched")
    for _ in range(3):
        produce(client, "fetched", 0, batch([bytes(900_000)]))
    set_quota(agent, CLIENT, consumer_byte_rate=QUOTA // 10)
    fields = fetch_fields("fetched", 0, 0)

    def fetched(offset: int, **session: int) -> tuple[Any, int]:
        fields["topics"][0]["partitions"][0]["fetch_offset"] = offset
        reply = client.ask(1, 12, {**fields, "forgotten_topics_data": (), "rack_id": "", **session})
        assert reply.error_code is ErrorCode.none
        records = sum(
            len(each.records or b"") for one in reply.responses for each in one.partitions
        )
        return reply, records

    opened, size = fetched(0, session_id=0, session_epoch=0)
    assert 900_000 < size < 1_000_000, "what the quota allows at once"
    assert opened.throttle_time == NONE
    begun = time.monotonic()
    session = opened.session_id
    over, size = fetched(1, session_id=session, session_epoch=1)
    assert size > 900_000, "a whole batch, although it is too large"
    assert over.throttle_time > dt.timedelta(seconds=1)
    set_quota(agent, {"client-id": "another"}, consumer_byte_rate=1)  # ends the throttle
    empty, size = fetched(2, session_id=session, session_epoch=2)
    assert (size, empty.responses, empty.session_id) == (0, (), session)
    assert empty.throttle_time > dt.timedelta(seconds=1)
    assert time.monotonic() - begun < over.throttle_time.total_seconds()
    set_quota(agent, CLIENT, consumer_byte_rate=None)
    assert fetched(2, session_id=session, session_epoch=3)[1] > 900_000


def test_mutations_are_refused(agent: Agent, client: Frames) -> None:
    """Clients that know the error THROTTLING_QUOTA_EXCEEDED get it, and others are throttled."""
    set_quota(agent, CLIENT, controller_mutation_rate=0.1)
    exceeded, none = ErrorCode.throttling_quota_exceeded, ErrorCode.none
    checks = {**create_fields("checked", 50), "validate_only": True}
    assert client.ask(CREATE_TOPICS, 7, checks).topics[0].error_code is none
    first = client.ask(CREATE_TOPICS, 7, create_fields("many", 12))
    assert (first.topics[0].error_code, first.throttle_time) == (none, NONE)

    def again() -> None:
        set_quota(agent, {"client-id": "another"}, producer_byte_rate=time.time_ns())

    refused = client.ask(CREATE_TOPICS, 7, create_fields("more"))
    assert refused.topics[0].error_code is exceeded
    assert NONE < refused.throttle_time < dt.timedelta(minutes=2)
    again()
    exists = client.ask(CREATE_TOPICS, 7, create_fields("many"))
    assert exists.topics[0].error_code is ErrorCode.topic_already_exists
    widened: dict[str, Any] = {"topics": [{"name": "many", "count": 14, "assignments": None}]}
    widened |= {"timeout": dt.timedelta(seconds=5), "validate_only": False}
    assert client.ask(CREATE_PARTITIONS, 3, widened).results[0].error_code is exceeded
    again()
    deleted = {"topic_names": ["many"], "timeout": dt.timedelta(seconds=5)}
    assert client.ask(DELETE_TOPICS, 5, deleted).responses[0].error_code is exceeded
    again()
    old = client.ask(CREATE_PARTITIONS, 2, widened)
    assert (old.results[0].error_code, old.throttle_time > NONE) == (none, True)
    again()
    old = client.ask(DELETE_TOPICS, 4, deleted)
    assert old.responses[0].error_code is none
    assert old.throttle_time > dt.timedelta(seconds=10), "fourteen more partitions"


def test_an_internal_topic_is_created_under_a_quota(agent: Agent, client: Frames) -> None:
    """A client that asks for the topic of committed offsets gets it, as without quotas."""
    set_quota(agent, CLIENT, controller_mutation_rate=1_000.0)
    fields = metadata_fields([{"name": consumer_offsets.TOPIC}], allow_auto_topic_creation=True)
    (found,) = client.ask(METADATA, 9, fields).topics
    assert (found.error_code, found.is_internal) == (ErrorCode.none, True)


def test_connections_beyond_a_quota_wait(
    agent: Agent, client: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a connection beyond the quota of its address is served later, or closed."""
    set_quota(agent, {"ip": "127.0.0.1"}, connection_creation_rate=1)

    def connect() -> float:
        begun = time.monotonic()
        with frames(agent) as connected:
            connected.ask(DESCRIBE, 1, described())
        return time.monotonic() - begun

    assert any(connect() > 0.5 for _ in range(50))
    monkeypatch.setattr(quotas_module, "CONNECTION_THROTTLE_MAX_MS", 0)
    with pytest.raises((ConnectionError, AssertionError)):
        sum(connect() for _ in range(50))
    set_quota(agent, {"ip": "127.0.0.1"}, connection_creation_rate=None)


# ------------------------------------------------------------------------------ clients


def test_a_client_of_confluent_under_a_quota(agent: Agent, client: Frames) -> None:
    """Promise: a producer gets its quota, sees its throttles, and others are not slowed."""
    create(client, "limited")
    set_quota(agent, {"client-id": "limited"}, producer_byte_rate=QUOTA // 10)
    throttles: list[float] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": agent.kafka_address,
            "client.id": "limited",
            "throttle_cb": lambda event: throttles.append(event.throttle_time),
            "batch.size": 10_000,
            "linger.ms": 1,
        }
    )
    delivered: list[int] = []
    value = bytes(5_000)
    begun = time.monotonic()
    for _ in range(250):  # 1.25 MB, of which 1 MB fills the window
        producer.produce("limited", value, on_delivery=lambda error, _: delivered.append(not error))
        producer.poll(0)
    while not throttles and time.monotonic() - begun < 30:
        assert produced(client, 1_000)[0] == NONE, "others are not throttled"
        producer.poll(0)
    assert throttles
    assert not producer.flush(30)
    assert sum(delivered) == 250


# ------------------------------------------------------------------------------ a cluster


def test_a_quota_is_in_force_at_every_broker(tmp_path: Path) -> None:
    """Promise: the first quota of a root is in force at once where it was set, and at all brokers
    within a second of their clocks, for connections that are open.

    The bound is ten seconds here, as other tests share the machine.
    """
    with members(tmp_path, 3) as agents, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(frames(each)) for each in agents]
        names = map("t-{}".format, itertools.count())

        def is_refused(client: Frames) -> bool:
            reply = client.ask(CREATE_TOPICS, 7, create_fields(next(names)))
            return bool(reply.topics[0].error_code == ErrorCode.throttling_quota_exceeded)

        assert not any(map(is_refused, clients))
        change = altered({"user": None}, controller_mutation_rate=0.01)
        (found,) = clients[0].ask(ALTER, 1, change).entries
        assert found.error_code is ErrorCode.none
        (entry_found,) = clients[0].ask(DESCRIBE, 1, described()).entries
        assert entry_found.values[0].value == 0.01
        for each in clients:
            each.ask(CREATE_TOPICS, 7, create_fields(next(names)))  # overdraws where it is known
            wait_until(
                lambda each=each: is_refused(each),  # type: ignore[misc]
                "the quota is in force",
                patience_seconds=10.0,
            )
