"""The connection to brokers that break, move and refuse."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sparklog import errors, limits
from sparklog.client import connection as connection_module
from sparklog.client.connection import (
    BACKOFF_FIRST_SECONDS,
    RECONNECT_ATTEMPTS,
    RECONNECT_MAX_SECONDS,
    Backoff,
    Connection,
    RetryLog,
)
from sparklog.client.flight_client import failure_of
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages, group_messages
from tests.support.forks import said_in_child
from tests.support.leaders import FIRST, OTHER, Leaders
from tests.support.live import LiveBroker


@contextmanager
def _listening(answer: bytes | None, port: int = 0) -> Iterator[str]:
    """The address of a port that answers anything with `answer`; None: with nothing, ever."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            try:
                while True:
                    peer, _ = server.accept()
                    peers.append(peer)
                    if answer is not None:
                        peer.recv(64)
                        peer.sendall(answer)
                        peer.close()
            except OSError:
                return

        peers: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for peer in peers:
                peer.close()


def test_actions_are_typed(broker: LiveBroker) -> None:
    """An action takes and gives the structs that `flight_messages` names."""
    with Connection.to(broker.address) as connection:
        created = connection.action(
            "topics.create", flight_messages.CreateTopic(topic="t", partitions=3)
        )
        assert isinstance(created, flight_messages.TopicInfo)
        assert connection.action("topics.list") == flight_messages.TopicNames(topics=["t"])


def test_refusals_keep_their_facts(broker: LiveBroker) -> None:
    """An error of the broker arrives as the same class with the same facts, and at once."""
    clock = ManualClock()
    with Connection.to(broker.address, clock=clock) as connection:
        with pytest.raises(errors.UnknownTopic) as raised:
            connection.action("topics.describe", flight_messages.TopicName(topic="nope"))
        assert raised.value.facts == {"topic": "nope", "hint": ""}
        assert clock.monotonic() == 0.0


def test_retriable_refusals_are_tried_again(broker: LiveBroker) -> None:
    """An action is repeated, with growing waits, until it is not refused any more."""
    broker.fail_next("action", count=4, error=errors.BrokerClosing(broker=0))
    clock = ManualClock()
    with Connection.to(broker.address, clock=clock, jitter=lambda: 1.0) as connection:
        assert connection.action("topics.list").topics == []
    waited_seconds = BACKOFF_FIRST_SECONDS * (1 + 2 + 4 + 8)
    assert clock.monotonic() == pytest.approx(waited_seconds)


def test_what_took_its_time_is_not_tried_again(broker: LiveBroker) -> None:
    """A request whose timeout the broker has used is not repeated."""
    broker.fail_next("action", error=errors.TimedOut(what="publishing", timeout_seconds=1.0))
    with (
        Connection.to(broker.address, clock=ManualClock()) as connection,
        pytest.raises(errors.TimedOut),
    ):
        connection.action("publish.now", flight_messages.PublishNow(timeout_seconds=1.0))
    assert broker.names() == ["publish.now"]


def test_time_for_retries_ends(broker: LiveBroker) -> None:
    """A refusal that lasts longer than the time for retries is raised."""
    failure = errors.StorageUnavailable(operation="put", path="x", reason="y")
    broker.fail_next("action", count=1_000, error=failure)
    clock = ManualClock()
    with Connection.to(broker.address, clock=clock) as connection:
        with pytest.raises(errors.StorageUnavailable):
            connection.action("topics.list", timeout_seconds=5.0)
        assert 3.0 <= clock.monotonic() <= 5.0


def test_a_broker_that_moved_is_found() -> None:
    """After a break `resolve` is called again, and the call continues at the new address."""
    with LiveBroker() as first, LiveBroker() as second:
        addresses = [first.address, second.address]
        second.create("on-the-second")
        with Connection(lambda: addresses[0], clock=ManualClock()) as connection:
            assert connection.action("topics.list").topics == []
            first.crash()
            addresses.pop(0)
            assert connection.action("topics.list").topics == ["on-the-second"]
            assert connection.address == second.address


@pytest.mark.parametrize("cause", [OSError("no more files"), LookupError("EIO")])
def test_a_broker_that_cannot_be_looked_for(cause: Exception) -> None:
    """A failure of `resolve` is raised at once as a `SparklogError` with its cause."""

    def resolve() -> str:
        raise cause

    with Connection(resolve) as connection, pytest.raises(errors.SparklogError) as raised:
        connection.action("topics.list")
    assert raised.value.__cause__ is cause
    assert str(cause) in str(raised.value)


def test_no_broker_there() -> None:
    """If no broker listens, the error names the address after the time for retries."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with (
        Connection.to(address, clock=ManualClock()) as connection,
        pytest.raises(errors.BrokerUnavailable, match=address),
    ):
        connection.action("topics.list", timeout_seconds=1.0)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "console"),
        (b"", "Kafka"),
        (b"\x00\x00\x00\x0a\x00\x00\x00\x00\x00\x23", "Kafka"),
    ],
)
def test_wrong_port(answer: bytes, hint: str) -> None:
    """A port that is not Flight's is refused at once, with a hint at what it may be."""
    with _listening(answer) as address, Connection.to(address) as connection:
        with pytest.raises(errors.WrongPort, match=hint) as raised:
            connection.action("topics.list")
        assert raised.value.address == address


def test_silent_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that never says anything may be a broker that hangs: unavailable, with a hint."""
    monkeypatch.setattr(limits, "PROBE_TIMEOUT_SECONDS", 0.05)
    with (
        _listening(None) as address,
        Connection.to(address) as connection,
        pytest.raises(errors.BrokerUnavailable, match="not its Flight port"),
    ):
        connection.action("topics.list", timeout_seconds=0.05)


def test_a_port_that_was_found_may_be_wrong(broker: LiveBroker) -> None:
    """A broker ends just when it is found, or another program has its port: the next one is found.

    Only of an address that a caller has chosen is it an error.
    """
    with _listening(b"") as wrong:
        addresses = iter([wrong, broker.address])
        with Connection(lambda: next(addresses), clock=ManualClock()) as connection:
            assert connection.action("topics.list").topics == []
            assert connection.address == broker.address


@pytest.mark.parametrize("answer", [b"", b"\x00\x00\x12"])
@pytest.mark.parametrize("several", [False, True])
def test_a_broker_that_stops_while_a_client_connects(answer: bytes, *, several: bool) -> None:
    """A connection without an answer is tried again where a broker has answered before."""
    with LiveBroker() as broker:
        addresses = f"{broker.address},{broker.address}" if several else broker.address
        with Connection.to(addresses, clock=ManualClock()) as connection:
            assert connection.action("topics.list").topics == []
            broker.crash()
            with (
                _listening(answer, int(broker.address.rpartition(":")[2])),
                pytest.raises(errors.BrokerUnavailable, match="without a response"),
            ):
                connection.action("topics.list", timeout_seconds=1.0)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":80", "host:http"])
def test_bad_address(address: str) -> None:
    """An address that is not host:port is refused."""
    with Connection.to(address) as connection, pytest.raises(errors.BadOption):
        connection.action("topics.list")


def test_another_address_serves_after_a_break() -> None:
    """After a break the addresses are tried again in their order."""
    with LiveBroker() as first, LiveBroker() as second:
        second.create("on-the-second")
        addresses = f"{first.address},{second.address}"
        with Connection.to(addresses, clock=ManualClock()) as connection:
            assert connection.action("topics.list").topics == []
            first.crash()
            assert connection.action("topics.list").topics == ["on-the-second"]


def test_several_wrong_ports() -> None:
    """Addresses that are all wrong ports are refused together, without another attempt."""
    with (
        _listening(b"") as one,
        _listening(b"HTTP/1.1 400\r\n\r\n") as two,
        Connection.to(f"{one},{two}") as connection,
        pytest.raises(errors.WrongPort, match=f"{one}: .*Kafka.*; {two}: .*console"),
    ):
        connection.action("topics.list")


def test_lost_answer_to_a_change(broker: LiveBroker) -> None:
    """A change that is refused after an answer was lost may be one's own doing, and says so."""
    broker.fail_next("action", path="topics.create", answer_only=True)
    with (
        Connection.to(broker.address, clock=ManualClock()) as connection,
        pytest.raises(errors.OutcomeUnknown, match="already exists"),
    ):
        connection.action("topics.create", flight_messages.CreateTopic(topic="t"))
    with Connection.to(broker.address) as connection:
        assert connection.action("topics.list").topics == ["t"]


@pytest.mark.parametrize(
    ("name", "request_", "failure"),
    [
        ("topics.list", None, errors.BrokerUnavailable),
        ("topics.delete", flight_messages.TopicName(topic="t"), errors.OutcomeUnknown),
    ],
)
def test_no_answer_at_all(
    broker: LiveBroker, name: str, request_: Any, failure: type[Exception]
) -> None:
    """A question without an answer is a broker unavailable; a change may have taken effect."""
    broker.fail_next("action", count=1_000)
    with (
        Connection.to(broker.address, clock=ManualClock()) as connection,
        pytest.raises(failure),
    ):
        connection.action(name, request_, timeout_seconds=0.2)


def test_leaders_are_found() -> None:
    """The channel to a broker that leads goes to its own address; to the only one, where it was."""
    with Leaders() as leaders:
        leaders.led_by["t4", 1] = OTHER
        with Connection.to(leaders.addresses[FIRST]) as connection:
            connection.learn_leaders(
                connection.action("topics.describe", flight_messages.TopicName(topic="t4"))
            )
            assert connection.channel(OTHER).address == leaders.addresses[OTHER]
            assert connection.channel(FIRST).address == leaders.addresses[FIRST]
            assert connection.channel(-1).address == leaders.addresses[FIRST]


def test_a_coordinator_that_is_down_is_forgotten() -> None:
    """Requests of its groups go to the broker in use, which names another coordinator."""
    with Leaders() as leaders, Connection.to(leaders.addresses[FIRST]) as connection:
        assert set(connection.brokers()) == {FIRST, OTHER}
        connection._coordinators["g"] = OTHER
        address = leaders.addresses.pop(OTHER)
        assert connection.brokers() == [FIRST]
        assert connection.action("groups.find", group_messages.GroupName(group="g"))
        leaders.addresses[OTHER] = address


def test_closed(broker: LiveBroker) -> None:
    """A closed connection says that it is closed."""
    connection = Connection.to(broker.address)
    connection.close()
    with pytest.raises(errors.BadRequest, match="closed"):
        connection.action("topics.list")


def test_backoff_grows_to_a_bound() -> None:
    """Waits double up to the bound, and never are shorter than half of it."""
    backoff = Backoff(jitter=lambda: 0.0)
    busy = errors.GroupBusy(group="g", error="REBALANCE_IN_PROGRESS")
    waits = [backoff.next_seconds(busy) for _ in range(2_000)]
    assert waits[:3] == [BACKOFF_FIRST_SECONDS * each for each in (0.5, 1.0, 2.0)]
    assert waits[-1] == limits.BACKOFF_MAX_SECONDS / 2
    backoff.reset()
    assert backoff.next_seconds(busy) == waits[0]


def test_a_broker_that_is_away_is_soon_tried_again() -> None:
    """An attempt to reach it costs little; one that is away for long is tried less often."""
    backoff = Backoff(jitter=lambda: 1.0)
    away = errors.BrokerUnavailable(address="a:1", reason="refused")
    waits = [backoff.next_seconds(away) for _ in range(RECONNECT_ATTEMPTS)]
    assert max(waits) == RECONNECT_MAX_SECONDS
    assert 30.0 <= sum(waits) <= 60.0
    assert backoff.next_seconds(away) == limits.BACKOFF_MAX_SECONDS
    backoff.reset()
    assert backoff.next_seconds(away) == BACKOFF_FIRST_SECONDS


def test_retries_are_logged_seldom() -> None:
    """Several failures each second are one line in ten seconds."""
    clock = ManualClock()
    log = RetryLog(clock)
    logged = 0
    for _ in range(250):
        logged += log.is_due()
        clock.advance(0.1)
    assert logged == 3


def test_foreign_exceptions_are_not_hidden() -> None:
    """A failure of another kind than the transport is reported with the broker's message."""
    failure = failure_of(OSError("something odd"), "host:1")
    assert type(failure) is errors.UnexpectedError
    assert "something odd" in str(failure)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_with_an_open_channel(broker: LiveBroker) -> None:
    """A child of a process with open channels is refused by name, and never hangs in gRPC."""
    with Connection.to(broker.address) as connection:
        connection.action("topics.list")
        assert "forked" in said_in_child(lambda: connection.action("topics.list"))
        assert connection.action("topics.list").topics == []
    assert not connection_module._forked
