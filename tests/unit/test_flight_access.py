"""Admission of Flight calls, and the rights that actions need, without a broker.

Promises: only valid tokens are accepted, and a refusal follows a look; each action needs the rights
of its row, and no action lacks a row; a reply names no topic or group that the client may not see;
open streams end with the user or the right.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import msgspec
import pytest
from structlog.testing import capture_logs

from sparklog import errors
from sparklog.broker.audit import Audit
from sparklog.broker.authentication import Authentication, Identity
from sparklog.broker.authorization import Authorization
from sparklog.broker.flight.caller import Caller
from sparklog.broker.flight.gate import AuthorizedStream, Gate
from sparklog.broker.flight.rights import RIGHTS, check_rights, shown
from sparklog.broker.oauth import TokenVerifier
from sparklog.broker.refused_work import RefusedWork
from sparklog.broker.security_watch import SecurityWatch
from sparklog.clock import ManualClock
from sparklog.formats import flight_messages as fm
from sparklog.formats import group_messages as gm
from sparklog.formats.schema_messages import TopicSchemas
from sparklog.listeners import Listener
from sparklog.security import users
from sparklog.security.acl import Acl, Operation, PatternType, ResourceType
from sparklog.security.jwt import JwtRejected, JwtSubject, UnknownKey
from sparklog.security.login_method import LoginMethod
from sparklog.security.state import Mode
from sparklog.security.x500 import CertificatePrincipal
from sparklog.storage.metadata.model import BrokerRegistration, ClusterMetadata
from sparklog.storage.metadata.processes import Process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.root_credentials import RootCredentials
from sparklog.storage.security_store import SecurityStore
from tests.support.acls import acl, set_acls, watch_of
from tests.support.users import add_alice, change_users

CLUSTER, GROUP, TOPIC = ResourceType.CLUSTER, ResourceType.GROUP, ResourceType.TOPIC
ALICE: Final = "User:alice"


@dataclass
class World:
    """A root with the user alice, ACLs that are enforced, and a gate of broker 1 in epoch 7."""

    clock: ManualClock = field(default_factory=ManualClock)
    store: MemoryStore = field(init=False)
    watch: SecurityWatch = field(init=False)
    authorization: Authorization = field(init=False)
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        set_acls(self.store)
        add_alice(self.store)
        self.watch = watch_of(self.store, self.clock, RefusedWork(self.clock))
        self.metadata = MetadataStore(self.store, clock=self.clock)
        chain_id = self.metadata.refresh().security
        self.watch.chain_id = lambda: chain_id
        self.authorization = Authorization(self.watch, clock=self.clock)
        self.gate = Gate(self.authorization, broker=1, epoch=7, clock=self.clock)

    @property
    def alice(self) -> Identity:
        user = self.watch.state.users["alice"]
        return Identity("alice", user.id, user.epoch)

    def set_acls(self, *acls: Acl, mode: Mode = Mode.ENFORCE, **more: Any) -> None:
        """Replaces the ACLs, as another broker does: this one has not looked yet."""
        set_acls(self.store, acls, mode=mode, **more)

    def caller(self, **more: Any) -> Caller:
        given: dict[str, Any] = {"peer": "10.0.0.7:5000", "identity": self.alice, **more}
        return Caller(self.authorization, **given)

    def root_token(self, *, epoch: int = 7, address: str = "127.0.0.1:9", host: str = "") -> str:
        """Returns the token that a program with the root's keys sends; empty if it sends none."""

        def register(known: ClusterMetadata) -> ClusterMetadata:
            process = Process(host=host)
            brokers = {1: BrokerRegistration(epoch=epoch, flight=address, process=process)}
            return msgspec.structs.replace(known, brokers=brokers)

        self.metadata.refresh()
        self.metadata.change(register)
        credentials = RootCredentials(self.store, lambda: self.metadata.current, clock=self.clock)
        source = credentials.token_source(address)
        return source() if source is not None else ""


@pytest.fixture
def world() -> World:
    """ACLs are enforced, and there are none."""
    return World()


def call(
    token: str = "",
    peer: str = "127.0.0.1:5000",
    protocol: str = "SASL_SSL",
    address: str = "127.0.0.1:9",
    principal: CertificatePrincipal | None = None,
    is_of_known_client: bool = False,
) -> Any:
    """Returns a call as far as the gate looks at it."""
    listener = Listener("ANY", protocol, address.removeprefix("tls://"))
    return SimpleNamespace(
        peer=peer,
        authorization=token,
        listener=listener,
        principal=principal,
        is_of_known_client=is_of_known_client,
    )


# ------------------------------------------------------------------------------ tokens


def test_tokens_of_programs_with_access_to_the_root(world: World) -> None:
    """They are for one broker and epoch, for minutes, and cannot be read on the way."""
    assert world.gate.admit(call(world.root_token(), protocol="PLAINTEXT")).is_root
    over_tls = world.root_token(address="tls://127.0.0.1:9")
    assert world.gate.admit(call(over_tls, peer="10.0.0.7:5000")).is_root
    refused = [
        call(world.root_token(epoch=6), protocol="PLAINTEXT"),
        call(world.root_token()),  # of another listener of the same broker
        call(over_tls, address="10.0.0.9:9"),
        call(world.root_token(), peer="10.0.0.7:5000", protocol="PLAINTEXT"),
        call(world.root_token(), peer="[2001:db8::1]:5000", protocol="PLAINTEXT"),
    ]
    for each in refused:
        with pytest.raises(errors.NotAuthenticated):
            world.gate.admit(each)
    token = world.root_token()
    world.clock.advance(400.0)
    world.watch.refresh()
    with pytest.raises(errors.NotAuthenticated, match="expired"):
        world.gate.admit(call(token, protocol="PLAINTEXT"))
    assert world.authorization.denied == len(refused) + 1


def test_tokens_are_not_sent_over_the_network(world: World) -> None:
    """Only to this machine, or over TLS."""
    assert world.root_token()
    assert not world.root_token(address="10.0.0.7:8815")
    assert not world.root_token(address="broker.example:8815")
    assert not world.root_token(address="localhost:8815"), "another program may listen at ::1"
    assert world.root_token(address="tls://broker.example:8815")
    assert not world.root_token(host="elsewhere"), "another program may listen there on this host"


def test_tokens_of_users(world: World) -> None:
    """They are those of one root and user, for an hour, and cannot be changed."""
    token = world.gate.login_token(world.alice)
    caller = world.gate.admit(call(token))
    assert (caller.principal, caller.is_root, caller.is_for_tasks) == (ALICE, False, False)
    assert world.gate.recognises(call(token))
    other = World()
    others = [
        token[:-4] + "AAA=",
        token.replace("sl1.", "sl2."),
        token + "." + token,
        other.gate.login_token(other.alice),
        world.gate.login_token(world.alice._replace(id="older")),
        world.gate.login_token(world.alice._replace(name="bob")),
        "Bearer x",
        "Basic eDp5",
        "",
        "Bearer sl1." + "A" * 5_000,
    ]
    for each in others:
        assert not world.gate.recognises(call(each))
        with pytest.raises(errors.NotAuthenticated):
            world.gate.admit(call(each))
    world.clock.advance(3_601.0)
    world.watch.refresh()
    with pytest.raises(errors.NotAuthenticated, match="log in again"):
        world.gate.admit(call(token))


@pytest.fixture(name="oauth")
def _oauth(world: World) -> mock.Mock:
    """The issuer's part of the broker: the token `x.y.z` is that of the client app."""
    verifier = mock.Mock(spec=TokenVerifier)
    verifier.remembered.return_value = None
    verifier.verify.return_value = JwtSubject("app", world.clock.now_us() / 1e6 + 60)
    done: Future[None] = Future()
    done.set_result(None)
    verifier.newer_keys.return_value = done
    world.gate._authentication = Authentication(world.watch, verifier)
    return verifier


TOKEN: Final = "Bearer x.y.z"


def test_tokens_of_an_issuer(world: World, oauth: mock.Mock) -> None:
    """They are recognised at once if they were verified before, and end with their expiry."""
    assert not world.gate.recognises(call(TOKEN))
    oauth.verify.assert_not_called()
    caller = world.gate.admit(call("bearer  x.y.z"))
    oauth.verify.assert_called_once_with("x.y.z")
    assert (caller.principal, caller.is_root) == ("User:app", False)
    oauth.remembered.return_value = oauth.verify.return_value
    assert world.gate.recognises(call(TOKEN))
    assert world.gate.admit(call(TOKEN)).identity == caller.identity
    oauth.verify.assert_called_once()
    with pytest.raises(errors.NotAuthenticated, match="accepted over TLS"):
        world.gate.admit(call(TOKEN, peer="10.0.0.7:1", protocol="SASL_PLAINTEXT"))

    assert caller.identity is not None
    token = world.gate.task_token(caller.identity, ["t"], seconds=86_400)
    tasks = world.gate.admit(call(token))
    assert tasks.is_for_tasks
    assert tasks.identity is not None
    assert tasks.identity.ends_at == int(caller.identity.ends_at)
    world.clock.advance(61)
    world.watch.refresh()
    with pytest.raises(errors.NotAuthenticated, match="expired"):
        world.gate.admit(call(token))


def test_streams_with_tokens_of_an_issuer(world: World, oauth: mock.Mock) -> None:
    """An open stream ends with its token, though neither users nor ACLs have changed."""
    world.set_acls(acl(TOPIC, "t", Operation.READ, principal="User:app"))
    world.watch.refresh()
    caller, ended = world.gate.admit(call(TOKEN)), []
    stream = AuthorizedStream(
        caller=caller, operation=Operation.READ, topics=("t",), cut=lambda: ended.append(1)
    )
    with world.gate.watched(stream):
        world.clock.advance(59)
        world.watch.refresh()
        world.gate.check_streams()
        assert not ended
        world.clock.advance(1)
        world.gate.check_streams()
        assert ended


def test_tokens_of_an_issuer_that_are_refused(world: World, oauth: mock.Mock) -> None:
    """The client learns the cause, the log more, and no look at the users is spent on it."""
    oauth.verify.side_effect = JwtRejected("it has expired", ", 7 s ago")
    looks = world.watch.looks
    with (
        capture_logs() as lines,
        pytest.raises(errors.NotAuthenticated, match=r"OAuth token is refused: it has expired\.$"),
    ):
        world.gate.admit(call(TOKEN))
    assert lines[0]["reason"] == "its OAuth token: it has expired, 7 s ago"
    assert world.watch.looks == looks
    oauth.verify.side_effect = None
    oauth.verify.return_value = JwtSubject("alice", 1e10)
    with pytest.raises(errors.NotAuthenticated, match="its client is not permitted"):
        world.gate.admit(call(TOKEN))
    assert world.watch.looks > looks
    oauth.remembered.side_effect = errors.TokenKeysNotRead(reason="gone")
    assert not world.gate.recognises(call(TOKEN))
    with pytest.raises(errors.TokenKeysNotRead):
        world.gate.admit(call(TOKEN))


def test_the_audit_has_tokens_of_an_issuer(world: World, oauth: mock.Mock) -> None:
    """It has a login for each token that is verified, and none for those that were before."""
    world.authorization.audit = audit = mock.Mock(spec=Audit)
    world.gate.admit(call(TOKEN))
    audit.logged_in.assert_called_once_with(
        listener="ANY",
        mechanism="OAUTHBEARER",
        principal="User:app",
        host="127.0.0.1",
        is_repeated=True,
    )
    oauth.remembered.return_value = oauth.verify.return_value
    world.gate.admit(call(TOKEN))
    audit.logged_in.assert_called_once()


def test_a_new_token_of_a_known_client(world: World, oauth: mock.Mock) -> None:
    """It is recognised at once, for a bounded number of tokens in a second."""
    known = call(TOKEN, is_of_known_client=True)
    assert not world.gate.recognises(call(TOKEN))
    assert [world.gate.recognises(known) for _ in range(30)] == [True] * 19 + [False] * 11
    assert oauth.verify.call_count == 19
    world.clock.advance(1)
    oauth.verify.side_effect = UnknownKey("its key")
    assert not world.gate.recognises(known)
    oauth.newer_keys.assert_not_called()


def test_a_new_key_of_an_issuer(world: World, oauth: mock.Mock) -> None:
    """A call with it waits until the keys have been fetched again."""
    oauth.verify.side_effect = [UnknownKey("its key"), JwtSubject("app", 1e10)]
    assert world.gate.admit(call(TOKEN)).principal == "User:app"
    oauth.newer_keys.assert_called_once()


def test_tokens_of_an_issuer_without_one(world: World) -> None:
    """A broker without [oauth] accepts none."""
    with pytest.raises(errors.NotAuthenticated, match="no token of a broker"):
        world.gate.admit(call(TOKEN))


def test_certificates_of_clients(world: World) -> None:
    """A certificate names its principal, and a user only if that permits it, until it expires."""
    now_seconds = world.clock.now_us() / 1e6
    call_of = {
        name: call(protocol="SSL", principal=CertificatePrincipal(name, now_seconds + 60))
        for name in ("CN=app", "alice", "*")
    }
    caller = world.gate.admit(call_of["CN=app"])
    assert (caller.principal, caller.is_root) == ("User:CN=app", False)
    for name, reason in (("alice", "does not log in by certificate"), ("*", "is reserved")):
        with pytest.raises(errors.NotAuthenticated, match=reason):
            world.gate.admit(call_of[name])
    change_users(world.store, users.with_methods("alice", [LoginMethod.CERTIFICATE]))
    alice = world.gate.admit(call_of["alice"])  # after a look
    assert alice.identity is not None
    assert alice.identity.id == world.alice.id

    token = world.gate.login_token(alice.identity)
    assert world.gate.admit(call(token)).identity == alice.identity
    world.set_acls(acl(TOPIC, "t", Operation.READ, principal=ALICE))
    world.watch.refresh()
    ended: list[str] = []
    stream = AuthorizedStream(
        caller=alice, operation=Operation.READ, topics=("t",), cut=lambda: ended.append("cut")
    )
    with world.gate.watched(stream):
        world.gate.check_streams()
        assert not ended
        world.clock.advance(60)
        world.watch.refresh()
        world.gate.check_streams()
        assert ended == ["cut"]
    for late, reason in ((call_of["alice"], "certificate has expired"), (call(token), "expired")):
        with pytest.raises(errors.NotAuthenticated, match=reason):
            world.gate.admit(late)


def test_a_refused_token_follows_a_look(world: World) -> None:
    """A user that was enabled at another broker a moment ago is served by this one."""
    change_users(world.store, users.disabled("alice", True))
    world.watch.refresh()
    change_users(world.store, users.disabled("alice", False))
    token = world.gate.login_token(world.alice)
    assert not world.gate.recognises(call(token)), "this broker has not looked since"
    assert world.gate.admit(call(token)).principal == ALICE


def test_clients_without_a_login(world: World) -> None:
    """They are anonymous where no login is asked for, once an ACL allows them something."""
    with pytest.raises(errors.NotAuthenticated, match="asks for a login"):
        world.gate.admit(call())
    with pytest.raises(errors.NotAuthenticated, match="allow nothing without a login"):
        world.gate.admit(call(protocol="SSL"))
    world.set_acls(acl(TOPIC, "t", Operation.READ))
    anonymous = world.gate.admit(call(protocol="SSL"))
    anonymous.check(Operation.READ, TOPIC, ["t"])
    with pytest.raises(errors.TopicNotAuthorized, match="User:ANONYMOUS"):
        anonymous.check(Operation.WRITE, TOPIC, ["t"])
    world.set_acls(mode=Mode.OFF)
    anonymous.check(Operation.WRITE, TOPIC, ["t"])


def test_while_the_security_state_is_not_read(world: World) -> None:
    """Only calls of group members are served, and those that show the state."""
    token = world.gate.login_token(world.alice)
    world.clock.advance(5.0)
    with pytest.raises(errors.SecurityNotRead):
        world.gate.admit(call(token))
    with pytest.raises(errors.SecurityNotRead):
        world.gate.check_fresh()
    world.gate.admit(call(token), needs_fresh=False)


def test_a_login_needs_a_state_that_can_be_read(world: World) -> None:
    """Also while ACLs are off: the user may have been removed meanwhile."""
    world.set_acls(mode=Mode.OFF)
    world.watch.refresh()
    token = world.gate.login_token(world.alice)
    world.clock.advance(5.0)
    with pytest.raises(errors.SecurityNotRead):
        world.gate.admit(call(token))
    world.gate.check_fresh()  # an open stream continues
    world.gate.admit(call(protocol="PLAINTEXT"))


def test_a_state_that_was_never_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may enforce anything, so nothing is served by it, not even to group members."""

    def unreadable(_: SecurityStore) -> None:
        raise errors.StorageUnavailable(operation="get", path="security", reason="a test")

    watch = SecurityWatch(
        world.store,
        clock=world.clock,
        follow_seconds=0.1,
        stale_seconds=5.0,
        refused=RefusedWork(world.clock),
    )
    watch.chain_id = world.watch.chain_id
    monkeypatch.setattr(SecurityStore, "look", unreadable)
    with pytest.raises(errors.StorageUnavailable):
        watch.refresh()
    gate = Gate(Authorization(watch, clock=world.clock), broker=1, epoch=7, clock=world.clock)
    with pytest.raises(errors.SecurityNotRead):
        gate.admit(call(protocol="PLAINTEXT"), needs_fresh=False)


# ------------------------------------------------------------------------------ streams


def test_streams_end_with_the_user_or_the_right(world: World) -> None:
    """Those of others continue, and all end while the state cannot be read."""
    world.set_acls(acl(TOPIC, "t", Operation.READ, principal=ALICE), super_users=["User:ANONYMOUS"])
    world.watch.refresh()
    cut: list[str] = []

    def stream(name: str, caller: Caller, topic: str = "t") -> AuthorizedStream:
        return AuthorizedStream(
            caller=caller,
            operation=Operation.READ,
            topics=(topic,),
            cut=lambda: cut.append(name),
        )

    anonymous = Caller(world.authorization, peer="10.0.0.7:5000")
    with (
        world.gate.watched(stream("alice", world.caller())),
        world.gate.watched(stream("anonymous", anonymous, "u")),
    ):
        world.gate.check_streams()
        assert cut == []
        change_users(world.store, users.removed("alice"))
        world.watch.refresh()
        world.gate.check_streams()
        assert cut == ["alice"]
        world.set_acls()
        world.watch.refresh()
        world.gate.check_streams()
        assert sorted(cut) == ["alice", "alice", "anonymous"]
        cut.clear()
        world.gate.check_streams()
        assert cut == [], "nothing has changed"
        world.clock.advance(5.0)
        world.gate.check_streams()
        assert sorted(cut) == ["alice", "anonymous"]
    cut.clear()
    world.gate.check_streams()
    assert cut == []


def test_a_stream_that_opens_during_a_change_is_checked(world: World) -> None:
    """The change may have been swept before the stream was known."""
    world.set_acls(acl(TOPIC, "t", Operation.READ, principal=ALICE))
    world.watch.refresh()
    world.gate.check_streams()
    stream = AuthorizedStream(
        caller=world.caller(), operation=Operation.READ, topics=("t",), cut=lambda: None
    )
    stream.check()
    world.set_acls()
    world.watch.refresh()
    with pytest.raises(errors.TopicNotAuthorized), world.gate.watched(stream):
        raise AssertionError("it is opened")


# ------------------------------------------------------------------------------ actions

NEEDED: Final[dict[str, tuple[msgspec.Struct, list[tuple[ResourceType, str, Operation]]]]] = {
    "broker.drain": (
        fm.DrainBroker(cluster_id="c", broker=1, epoch=1),
        [(CLUSTER, "kafka-cluster", Operation.ALTER)],
    ),
    "broker.log_level": (
        fm.LogLevel(broker=1, level="info"),
        [(CLUSTER, "kafka-cluster", Operation.ALTER_CONFIGS)],
    ),
    "cluster": (fm.Empty(), []),
    "cluster.balance": (fm.BalanceCluster(), [(CLUSTER, "kafka-cluster", Operation.ALTER)]),
    "cluster.describe": (fm.DescribeCluster(), [(CLUSTER, "kafka-cluster", Operation.DESCRIBE)]),
    "cluster.move": (fm.MovePartitions(moves=[]), [(CLUSTER, "kafka-cluster", Operation.ALTER)]),
    "cluster.upgrade": (fm.Empty(), [(CLUSTER, "kafka-cluster", Operation.ALTER)]),
    "figures": (fm.Empty(), [(CLUSTER, "kafka-cluster", Operation.DESCRIBE)]),
    "root.prove": (fm.ProveRoot(nonce="n"), []),
    "status": (fm.Empty(), [(CLUSTER, "kafka-cluster", Operation.DESCRIBE)]),
    "topics.list": (fm.Empty(), []),
    "topics.create": (fm.CreateTopic(topic="t"), [(TOPIC, "t", Operation.CREATE)]),
    "topics.describe": (fm.TopicName(topic="t"), [(TOPIC, "t", Operation.DESCRIBE)]),
    "topics.schemas": (TopicSchemas(topic="t", ids=[1]), [(TOPIC, "t", Operation.READ)]),
    "topics.alter": (
        fm.AlterTopic(topic="t", config={}),
        [(TOPIC, "t", Operation.ALTER_CONFIGS)],
    ),
    "topics.add_partitions": (
        fm.AddPartitions(topic="t", partitions=2),
        [(TOPIC, "t", Operation.ALTER)],
    ),
    "topics.delete": (fm.TopicName(topic="t"), [(TOPIC, "t", Operation.DELETE)]),
    "topics.compact": (fm.TopicName(topic="t"), [(TOPIC, "t", Operation.ALTER)]),
    "records.delete": (
        fm.DeleteRecords(topic="t", offsets={}),
        [(TOPIC, "t", Operation.DELETE)],
    ),
    "offsets.for_times": (
        fm.OffsetsForTimes(topic="t", timestamps_us={}),
        [(TOPIC, "t", Operation.DESCRIBE)],
    ),
    "offsets.lag": (
        fm.GroupPositions(positions=[]),
        [(CLUSTER, "kafka-cluster", Operation.CLUSTER_ACTION)],
    ),
    "producers.new": (fm.Empty(), [(TOPIC, "any", Operation.WRITE)]),
    "batches.append_staged": (fm.AppendStaged(manifest="m"), []),
    "publish.now": (fm.PublishNow(topics=["t"]), [(TOPIC, "t", Operation.WRITE)]),
    "tokens.new": (fm.NewToken(topics=["t"]), []),
    "groups.join": (
        gm.JoinGroup(group="g", session_timeout_ms=1, rebalance_timeout_ms=1, protocols=[]),
        [(GROUP, "g", Operation.READ)],
    ),
    "groups.sync": (
        gm.SyncGroup(group="g", member_id="m", generation=1),
        [(GROUP, "g", Operation.READ)],
    ),
    "groups.heartbeat": (
        gm.GroupHeartbeat(group="g", member_id="m", generation=1),
        [(GROUP, "g", Operation.READ)],
    ),
    "groups.leave": (gm.LeaveGroup(group="g", member_id="m"), [(GROUP, "g", Operation.READ)]),
    "groups.commit": (
        gm.CommitOffsets(group="g", offsets=[gm.GroupOffset(topic="t", partition=0, offset=1)]),
        [(GROUP, "g", Operation.READ), (TOPIC, "t", Operation.READ)],
    ),
    "groups.forget": (
        gm.ForgetOffsets(group="g", partitions=[gm.GroupPartition(topic="t", partition=0)]),
        [(GROUP, "g", Operation.DELETE), (TOPIC, "t", Operation.READ)],
    ),
    "groups.offsets": (gm.GroupName(group="g"), [(GROUP, "g", Operation.DESCRIBE)]),
    "groups.find": (gm.GroupName(group="g"), [(GROUP, "g", Operation.DESCRIBE)]),
    "groups.list": (fm.Empty(), []),
    "groups.describe": (gm.GroupName(group="g"), [(GROUP, "g", Operation.DESCRIBE)]),
    "groups.delete": (gm.GroupName(group="g"), [(GROUP, "g", Operation.DELETE)]),
}
"""A request of each action, and the rights that it needs together."""
ALSO_ENOUGH: Final[list[tuple[str, msgspec.Struct, tuple[ResourceType, str, Operation] | None]]] = [
    (
        "topics.create",
        fm.CreateTopic(topic="t"),
        (CLUSTER, "kafka-cluster", Operation.CREATE),
    ),
    ("producers.new", fm.Empty(), (CLUSTER, "kafka-cluster", Operation.IDEMPOTENT_WRITE)),
    (
        "broker.log_level",
        fm.LogLevel(broker=1),
        (CLUSTER, "kafka-cluster", Operation.DESCRIBE_CONFIGS),
    ),
    ("publish.now", fm.PublishNow(), None),  # of the topics that the client may write to
]
"""Requests of such actions that other rights allow too; None: that need none."""
IRREVERSIBLE: Final = {"broker.drain", "cluster.balance", "cluster.move", "cluster.upgrade"}


def test_every_action_has_a_row() -> None:
    """An action without one could not be served, and one without a line here is not tested."""
    assert RIGHTS.keys() == fm.ACTIONS.keys() == NEEDED.keys()


@pytest.mark.parametrize("name", NEEDED)
def test_actions_need_the_rights_of_their_rows(world: World, name: str) -> None:
    """All of them, and nothing else; while ACLs are observed, only final changes are refused."""
    request, needed = NEEDED[name]
    caller = world.caller()
    rights = [acl(*each, principal=ALICE) for each in needed]
    world.set_acls(*rights)
    check_rights(name, caller, request)
    for missing in rights:
        others = [each for each in rights if each != missing]
        unlike = [
            acl(missing.resource, missing.name, each, principal=ALICE)
            for each in (Operation.DESCRIBE_CONFIGS, Operation.IDEMPOTENT_WRITE)
            if (name, each) != ("producers.new", Operation.IDEMPOTENT_WRITE)
        ]
        world.set_acls(*others, *unlike)
        world.watch.refresh()
        with pytest.raises(errors.NotAuthorized):
            check_rights(name, caller, request)
        world.set_acls(mode=Mode.OBSERVE)
        world.watch.refresh()
        if name in IRREVERSIBLE:
            with pytest.raises(errors.ClusterNotAuthorized):
                check_rights(name, caller, request)
        else:
            check_rights(name, caller, request)


def test_an_offset_is_hidden_after_a_look_only(world: World) -> None:
    """A consumer without its offset would read records again, or skip them."""
    offsets = [gm.GroupOffset(topic=each, partition=0, offset=5) for each in ("t", "secret")]
    world.set_acls(acl(TOPIC, "t", Operation.READ, principal=ALICE))
    caller = world.caller()
    assert not caller.may(Operation.DESCRIBE, TOPIC, "t"), "this broker has not looked since"
    found = shown("groups.offsets", caller, gm.GroupOffsets(offsets=offsets))
    assert found == gm.GroupOffsets(offsets=offsets[:1])


def test_a_topic_that_exists_is_not_described_by_its_creation(world: World) -> None:
    """With CREATE on the cluster alone, and `if_absent`."""
    world.set_acls(acl(CLUSTER, "kafka-cluster", Operation.CREATE, principal=ALICE))
    world.watch.refresh()
    reply = fm.TopicInfo(topic="t", topic_id="i", table_uri="secret", config={"a": "secret"})
    assert shown("topics.create", world.caller(), reply) == fm.TopicInfo(topic="t", topic_id="")


@pytest.mark.parametrize(("name", "request_", "right"), ALSO_ENOUGH)
def test_other_rights_that_are_enough(
    world: World,
    name: str,
    request_: msgspec.Struct,
    right: tuple[ResourceType, str, Operation] | None,
) -> None:
    """Each of them alone."""
    if right is not None:
        with pytest.raises(errors.NotAuthorized):
            check_rights(name, world.caller(), request_)
        world.set_acls(acl(*right, principal=ALICE))
    check_rights(name, world.caller(), request_)


def test_replies_name_nothing_that_is_hidden(world: World) -> None:
    """Not in lists, nor in what operators see with DESCRIBE on the cluster alone."""
    seen = [
        acl(TOPIC, "t", Operation.DESCRIBE, principal=ALICE, pattern=PatternType.PREFIXED),
        acl(GROUP, "g", Operation.DESCRIBE, principal=ALICE),
    ]
    world.set_acls(*seen)
    world.watch.refresh()
    caller = world.caller()
    here = fm.BrokerInfo(broker=1, epoch=1, address="t1:1", host="secret", pid=1, log="secret")
    of_operators = fm.BrokerInfo(broker=1, epoch=1, address="a:1")
    group = gm.GroupInfo(group="secret", state="Stable")
    replies: dict[str, msgspec.Struct] = {
        "topics.list": fm.TopicNames(topics=["secret", "t1"]),
        "topics.describe": fm.TopicInfo(topic="t1", topic_id="i", config={"a": "secret"}),
        "groups.list": gm.GroupList(groups=[group, msgspec.structs.replace(group, group="g")]),
        "groups.offsets": gm.GroupOffsets(
            offsets=[gm.GroupOffset(topic=each, partition=0, offset=1) for each in ("secret", "t1")]
        ),
        "cluster": fm.ClusterInfo(cluster_id="c", root="r", version="v", brokers=[here]),
        "status": fm.BrokerStatus(
            cluster_id="c",
            root="r",
            broker=of_operators,
            uptime_seconds=1.0,
            held_back=[fm.HeldBack(topic=each, reason="r") for each in ("secret", "t1")],
            kept_records=[fm.KeptRecords(topic=each, reason="r") for each in ("secret", "t1")],
        ),
        "figures": fm.BrokerFigures(
            at_us=1,
            broker=of_operators,
            topics=[fm.TopicFigures(topic=each, partitions=1) for each in ("secret", "t1")],
        ),
        "cluster.describe": fm.ClusterDescription(
            cluster_id="c",
            root="r",
            controller=1,
            brokers=[],
            epochs=[],
            topics=1,
            partitions=1,
            lost_partitions=1,
            lost=[fm.LostPartition(topic=each, partition=0, leader=1) for each in ("secret", "t1")],
            leaders={"secret": [1], "t1": [1]},
        ),
    }
    lists = {"status": 2, "cluster.describe": 2}
    for name, reply in replies.items():
        text = msgspec.json.encode(shown(name, caller, reply)).decode()
        assert "secret" not in text, name
        assert text.count('"g"' if name == "groups.list" else "t1") == lists.get(name, 1), text
    world.set_acls(mode=Mode.OBSERVE)
    world.watch.refresh()
    assert all(shown(name, caller, reply) is reply for name, reply in replies.items())
