"""Users of the Flight listener: logins, and ACLs for every call.

Promises: a native client with exactly the rights of docs/security.md works, and is refused anything
else; a user that was removed or disabled loses its streams within a second; other Flight clients
log in with a password; a flood of clients without a login does not disturb those that have one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

import sparklog
from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.cli import app
from sparklog.client import credentials
from sparklog.client.connection import Connection, ask
from sparklog.client.credentials import ClientCredentials
from sparklog.formats import flight_messages
from sparklog.formats.flight_messages import Empty
from sparklog.security import users
from sparklog.security.acl import Acl, Operation, ResourceType
from sparklog.security.credentials import Security
from sparklog.security.state import Mode
from tests.support.acls import acl
from tests.support.certificates import Authority
from tests.support.secured import Secured
from tests.support.users import PASSWORD, add_alice, change_users
from tests.support.waiting import wait_until

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
ALICE: Final = "User:alice"


def of_alice(resource: ResourceType, name: str, operation: Operation, **more: Any) -> Acl:
    """Returns an ACL that allows something to alice."""
    return acl(resource, name, operation, principal=ALICE, **more)


PRODUCER: Final = [of_alice(TOPIC, "t", each) for each in (Operation.WRITE, Operation.CREATE)]
CONSUMER: Final = [of_alice(TOPIC, "t", Operation.READ), of_alice(GROUP, "g", Operation.READ)]


@pytest.fixture(name="secured")
def _secured(tmp_path: Path, authority: Authority) -> Iterator[Secured]:
    found = Secured(tmp_path, authority)
    with found.agent:
        yield found


def test_users_work_with_exactly_their_rights(secured: Secured) -> None:
    """Produce, consume in a group, and read; nothing else."""
    secured.set_acls(*PRODUCER, *CONSUMER)
    with sparklog.connect(secured.root) as root:
        root.create_topic("other", 1)
    with secured.connect() as log:
        log.create_topic("t", partitions=2)
        assert log.topics() == ["t"]
        with log.producer() as producer:
            for number in range(20):
                producer.send("t", b"%d" % number, partition=number % 2)
        with log.consumer("t", group="g", follow=False) as consumer:
            assert len([*consumer]) == 20
        assert log.read("t").num_rows == 20
        refused: list[Callable[[], object]] = [
            lambda: log.create_topic("u", 1),
            lambda: log.delete_topic("t"),
            lambda: log.describe("other"),
            lambda: log.describe("missing"),
            lambda: [*log.consumer("t", group="h", follow=False)],
            lambda: [*log.consumer("other", follow=False)],
        ]
        for each in refused:
            with pytest.raises(errors.NotAuthorized, match="User:alice at 127"):
                each()
        with log.producer() as producer, pytest.raises(errors.TopicNotAuthorized):
            producer.send("other", b"1").result(timeout=10)
        cluster = log.connection.action("cluster")
        assert [(each.address, each.pid, each.host) for each in cluster.brokers] == [
            (secured.address, 0, "")
        ]


def test_a_client_without_a_login_is_refused(secured: Secured, monkeypatch: Any) -> None:
    """Also with a wrong password, as another user, or over a connection without TLS."""
    monkeypatch.setattr("sparklog.broker.login_failures.FAILURE_SECONDS", (0.0, 0.0))
    with pytest.raises(errors.NotAuthenticated, match="the listener asks for a login"):
        secured.connect(secured.anonymous).topics()
    for name, password in (("alice", "wrong"), ("bob", PASSWORD)):
        secured.password.write_text(password)
        security = Security(ca=secured.security.ca, user=name, password_file=str(secured.password))
        secured.agent.listeners.flight._server._logged_at = -1e9  # type: ignore[union-attr]
        with (
            capture_logs() as logs,
            pytest.raises(errors.NotAuthenticated, match="the user name or the password is wrong"),
        ):
            secured.connect(security)
        (line,) = (each for each in logs if each["event"] == "a login has failed")
        assert line["reason"].startswith(f"user '{name}': the password is wrong")
    plain = secured.address.removeprefix("tls://").replace("127.0.0.1", "localhost")
    with pytest.raises(errors.BadOption, match="a login needs TLS: connect to tls://"):
        ClientCredentials(secured.security).token_source(plain)


def test_other_flight_clients_log_in_with_a_password(secured: Secured, monkeypatch: Any) -> None:
    """As Flight SQL's drivers do: `Basic`, and a bearer token from then on."""
    monkeypatch.setattr("sparklog.broker.login_failures.FAILURE_SECONDS", (0.0, 0.0))
    client = flight.FlightClient(
        f"grpc+{secured.address}", tls_root_certs=Path(secured.security.ca or "").read_bytes()
    )
    with client:
        for _ in range(2):  # the second time, the password is remembered
            header = client.authenticate_basic_token("alice", PASSWORD)
            options = flight.FlightCallOptions(headers=[header])
            (reply,) = client.do_action(flight.Action("topics.list", b"{}"), options)
            assert flight_messages.decode(flight_messages.TopicNames, reply.body).topics == []
        with pytest.raises(pa.ArrowException, match="the user name or the password is wrong"):
            client.authenticate_basic_token("alice", "wrong")
        with pytest.raises(pa.ArrowException, match="the listener asks for a login"):
            list(client.list_actions())


def test_a_user_that_is_removed_loses_its_streams(secured: Secured) -> None:
    """A tail that waits, and a producer; so does one whose right is gone."""
    secured.set_acls(*PRODUCER, *CONSUMER)
    with secured.connect() as log:
        log.create_topic("t", partitions=1)
        consumer = log.consumer("t")
        producer = log.producer(delivery_timeout_seconds=2.0)
        producer.send("t", b"1").result(timeout=10)
        assert next(iter(consumer)).value == b"1"
        flight_listener = secured.agent.listeners.flight
        assert flight_listener is not None
        assert flight_listener.stream_count == 2
        began = time.monotonic()
        secured.set_acls(*PRODUCER)
        wait_until(lambda: flight_listener.stream_count == 1, "the tail is not ended")
        with pytest.raises(errors.TopicNotAuthorized):
            consumer.poll(timeout=10)
        change_users(secured.store, users.removed("alice"))
        wait_until(lambda: flight_listener.stream_count == 0, "the producer's stream is not ended")
        assert time.monotonic() - began < 10.0  # of a busy machine; each takes less than a second
        with pytest.raises(errors.NotAuthenticated):
            producer.send("t", b"2").result(timeout=10)
        with contextlib.suppress(errors.SparklogError):
            producer.close()
        consumer.close()


def test_a_token_ends_with_its_user(secured: Secured) -> None:
    """A later user of the same name cannot use it. A changed password keeps it, except if cut."""
    token = credentials.log_in(secured.address, secured.security)

    def is_served() -> bool:
        client = flight.FlightClient(
            f"grpc+{secured.address}", tls_root_certs=Path(secured.security.ca or "").read_bytes()
        )
        with client:
            headers = [(b"authorization", token.encode())]
            try:
                list(client.list_actions(flight.FlightCallOptions(headers=headers)))
            except pa.ArrowException:
                return False
            return True

    assert is_served()
    known = users.credentials_of("another password")
    change_users(secured.store, users.with_credentials("alice", known))
    assert is_served()
    change_users(secured.store, users.with_credentials("alice", known, cut=True))
    wait_until(lambda: not is_served(), "the token is still accepted")
    change_users(secured.store, users.with_credentials("alice", users.credentials_of(PASSWORD)))
    secured.agent._access.watch.refresh()
    token = credentials.log_in(secured.address, secured.security)
    assert is_served()
    change_users(secured.store, users.removed("alice"))
    add_alice(secured.store)
    wait_until(lambda: not is_served(), "the token is still accepted")


def test_a_token_for_tasks_only_reads_its_topics(secured: Secured) -> None:
    """It can be passed to the executors of a job, and cannot be exchanged for another."""
    with secured.connect() as log:
        for name in ("t", "u"):
            log.create_topic(name, partitions=1)
        with log.producer() as producer:
            producer.send("t", b"1")
        request = flight_messages.NewToken(topics=["t"])
        issued = log.connection.action("tokens.new", request)
    with Connection.to(
        secured.address, credentials=Passed(secured.anonymous, issued.authorization)
    ) as tasks:
        info = tasks.action("topics.describe", flight_messages.TopicName(topic="t"))
        assert info.partitions[0].end == 1
        ticket = flight_messages.ReadTicket(topic="t", partition=0, start=0, end=1)
        assert tasks.channel().read(ticket).read_all().num_rows == 1
        for name, message in (
            ("topics.describe", flight_messages.TopicName(topic="u")),
            ("topics.delete", flight_messages.TopicName(topic="t")),
            ("status", Empty()),
        ):
            with pytest.raises(errors.NotAuthorized):
                tasks.action(name, message)
        with pytest.raises(errors.TokenOutOfScope, match="only reads records"):
            tasks.action("publish.now", flight_messages.PublishNow(topics=["t"]))
        with pytest.raises(errors.NotAuthenticated, match="cannot be exchanged"):
            tasks.action("tokens.new", request)


class Passed(ClientCredentials):
    """The credentials of a task: a token, and no password."""

    def __init__(self, security: Security, token: str) -> None:
        super().__init__(security)
        self.token = token

    def token_source(self, _address: str) -> Any:
        return lambda: self.token

    def new_token_source(self, _address: str) -> None:
        return None


def test_staged_batches_of_others_are_not_shown(secured: Secured) -> None:
    """One error, whether they exist or not, which does not name their topics."""
    secured.set_acls()
    with sparklog.connect(secured.root) as log:
        log.create_topic("hidden", partitions=1)
    staged = secured.root / "staging" / "q" / "1"
    staged.mkdir(parents=True)
    (staged / "manifest.json").write_text("{}")
    with secured.connect() as log:
        for batch in (1, 2):
            request = flight_messages.AppendStaged(manifest=f"staging/q/{batch}/manifest.json")
            with pytest.raises(errors.TopicNotAuthorized) as raised:
                log.connection.action("batches.append_staged", request)
            assert raised.value.name == f"of {request.manifest}"


def test_programs_with_access_to_the_root_need_no_user(secured: Secured) -> None:
    """ACLs do not apply to them."""
    secured.set_acls()
    with sparklog.connect(secured.root) as log:
        log.create_topic("t", partitions=1)
        assert log.topics() == ["t"]


def test_members_of_a_cluster_accept_the_same_login(tmp_path: Path, authority: Authority) -> None:
    """Partitions and groups of all members, and requests of members among themselves."""
    secured = Secured(tmp_path, authority)
    secured.set_acls(*PRODUCER, *CONSUMER)
    second = Agent(msgspec.structs.replace(secured.agent.settings, id=1), ask=ask)
    with secured.agent, second:
        with secured.connect() as log:
            log.create_topic("t", partitions=4)
            with log.producer() as producer:
                for number in range(40):
                    producer.send("t", b"%d" % number, partition=number % 4)
            with log.consumer("t", group="g", follow=False) as consumer:
                assert len([*consumer]) == 40
            leaders = {each.leader for each in log.describe("t").partitions}
            assert leaders == {0, 1}
        for command in (["cluster", "balance"], ["status"], ["broker", "drain", "--id", "1"]):
            done = CliRunner().invoke(app, [*command, "--root", str(secured.root)])
            assert done.exit_code == 0, (command, done.output)


def test_observed_refusals_are_served(secured: Secured) -> None:
    """And logged; only what cannot be undone is refused."""
    secured.set_acls(mode=Mode.OBSERVE)
    with capture_logs() as logs, secured.connect() as log:
        log.create_topic("t", partitions=1)
        with pytest.raises(errors.ClusterNotAuthorized):
            log.connection.action("cluster.upgrade")
    noted = [(each["operation"], each["name"]) for each in logs if "would not" in each["event"]]
    assert noted == [("CREATE", "t")]


def test_clients_without_a_login_leave_room_for_others(
    tmp_path: Path, authority: Authority
) -> None:
    """The oldest of a crowd makes room, and each has ten seconds and three calls."""
    secured = Secured(tmp_path, authority)
    with secured.agent as agent:
        listener = agent.listeners.flight
        assert listener is not None
        server = listener._server
        with contextlib.ExitStack() as stack:
            host, _, port = secured.address.removeprefix("tls://").partition(":")
            for _ in range(server.bounds.unadmitted + 20):
                stack.enter_context(socket.create_connection((host, int(port)), 10))
            with secured.connect() as log:
                assert log.topics() == []
                assert len(server._connections) <= server.bounds.unadmitted + 5
            client = flight.FlightClient(
                f"grpc+{secured.address}",
                tls_root_certs=Path(secured.security.ca or "").read_bytes(),
            )
            with client:
                for _ in range(3):
                    with pytest.raises(pa.ArrowException, match="the listener asks for a login"):
                        list(client.list_actions())
                wait_until(
                    lambda: all(
                        each.admission.calls_without_login < 3 for each in [*server._connections]
                    ),
                    "a client that continues is not closed",
                )
