"""Logins frame by frame, at a broker of ours and at a real Kafka: both answer the same.

Kafka's jars come from Maven's repositories; where they cannot be got, the test says so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from sparklog.security import users
from sparklog.settings import KafkaSettings
from sparklog.storage.objects import open_store
from tests.support.kafkas import Frames, broker
from tests.support.users import PASSWORD, add_alice, change_users

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(300)]

JAAS: Final = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required username=admin password=x"
    f' user_admin=x user_bob=x user_alice="{PASSWORD}";'
)
KAFKA: Final = {
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": JAAS,
    "connection.failed.authentication.delay.ms": "0",
}
SOFTWARE: Final = {"client_software_name": "x", "client_software_version": "1"}
RIGHT: Final = f"\0alice\0{PASSWORD}".encode()
Step = tuple[str, Any]
"""A step of a client: the name of a method of `Client`, and its argument."""

VERSIONS: Final[Step] = ("versions", SOFTWARE)
PLAIN: Final[Step] = ("handshake", "PLAIN")
METADATA: Final[Step] = ("metadata", None)
LOGINS: Final[dict[str, list[Step]]] = {
    "usual": [VERSIONS, PLAIN, ("token", RIGHT), METADATA],
    "without versions": [PLAIN, ("token", RIGHT), METADATA],
    "as of old": [VERSIONS, ("old_handshake", "PLAIN"), ("raw", RIGHT), METADATA],
    "with its own name": [PLAIN, ("token", b"alice" + RIGHT), METADATA],
    "versions again after it": [PLAIN, ("token", RIGHT), VERSIONS],
    "a token after it": [PLAIN, ("token", RIGHT), ("token", RIGHT), METADATA],
    "wrong password": [PLAIN, ("token", b"\0alice\0wrong"), METADATA],
    "wrong password, as of old": [("old_handshake", "PLAIN"), ("raw", b"\0alice\0wrong")],
    "unknown user": [PLAIN, ("token", b"\0nobody\0wrong")],
    "another name": [PLAIN, ("token", b"bob" + RIGHT)],
    "no password": [PLAIN, ("token", b"\0alice\0")],
    "malformed": [PLAIN, ("token", b"alice")],
    "unknown mechanism": [VERSIONS, ("handshake", "SCRAM-SHA-1"), PLAIN],
    "versions twice": [VERSIONS, VERSIONS],
    "versions within it": [PLAIN, VERSIONS],
    "two handshakes": [PLAIN, PLAIN],
    "a token first": [("token", RIGHT)],
    "a request first": [METADATA],
    "a request after versions": [VERSIONS, METADATA],
    "an unknown version": [("unknown_versions", None), VERSIONS, PLAIN],
    "a malformed name": [("versions", {**SOFTWARE, "client_software_name": "-"}), VERSIONS],
}

LOGIN: Final[list[Step]] = [PLAIN, ("token", RIGHT)]
SESSIONS: Final[dict[str, list[Step]]] = {
    "none again": [METADATA, METADATA],
    "again": [*LOGIN, METADATA],
    "twice in a second": [*LOGIN, PLAIN, METADATA],
    "as of old": [("old_handshake", "PLAIN"), ("raw", RIGHT), METADATA],
    "versions first": [VERSIONS, *LOGIN, METADATA],
    "versions within it": [PLAIN, VERSIONS],
    "two handshakes": [PLAIN, PLAIN],
    "a token without a handshake": [("token", RIGHT), METADATA],
    "wrong password": [PLAIN, ("token", b"\0alice\0wrong"), METADATA],
    "another user": [PLAIN, ("token", b"\0bob\0x"), METADATA],
    "another mechanism": [("handshake", "SCRAM-SHA-256"), ("token", b"n,,n=alice,r=x"), METADATA],
    "a request after the end": [("wait", 3.1), METADATA],
    "a token after the end": [("wait", 3.1), ("token", RIGHT)],
}
"""After a first login. Two differences are left out: Kafka answers other requests within a login
before it closes the connection, and it does not answer a handshake for an unknown mechanism."""


class Client(Frames):
    """A client whose replies are reduced to the part that both brokers must agree on."""

    def do(self, step: Step) -> object:
        """Returns the reply to one step; None if the broker closes the connection instead."""
        try:
            return getattr(self, step[0])(step[1])
        except (AssertionError, OSError):
            return None

    def versions(self, fields: dict[str, str]) -> object:
        """ApiVersions, which lists the requests of a login."""
        found = self.ask(18, 3, fields)
        listed = {each.api_key for each in found.api_keys}
        return found.error_code, {17, 18, 36} <= listed

    def unknown_versions(self, _: None) -> object:
        """ApiVersions of a version that no broker has."""
        frame = bytearray(self.frame(18, 3, 1, SOFTWARE))
        frame[6:8] = (99).to_bytes(2, "big")
        self._socket.sendall(frame)
        found = self.reply(18, 0, self._read(int.from_bytes(self._read(4), "big")))
        return found.error_code, [each.api_key for each in found.api_keys]

    def handshake(self, mechanism: str, version: int = 1) -> object:
        """SaslHandshake."""
        found = self.ask(17, version, {"mechanism": mechanism})
        return found.error_code, found.mechanisms

    def old_handshake(self, mechanism: str) -> object:
        """SaslHandshake of version 0, after which tokens have no request around them."""
        return self.handshake(mechanism, 0)

    def token(self, token: bytes) -> object:
        """SaslAuthenticate, without the message of an error."""
        found = self.ask(36, 2, {"auth_bytes": token})
        return found.error_code, bool(found.error_message), found.auth_bytes, found.session_lifetime

    def raw(self, token: bytes) -> object:
        """A token without a request around it."""
        self._socket.sendall(len(token).to_bytes(4, "big") + token)
        return self._read(int.from_bytes(self._read(4), "big"))

    def wait(self, seconds: float) -> object:
        """Lets time pass, as a session ends by the clock."""
        time.sleep(seconds)
        return True

    def metadata(self, _: None) -> object:
        """A request that needs a login."""
        return bool(self.ask(3, 1, {"topics": ()}).brokers)


@contextlib.contextmanager
def both(folder: Path, settings: dict[str, str], **ours: Any) -> Iterator[tuple[str, str]]:
    """Listeners with PLAIN and the users alice and bob: ours, and Kafka's."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    store = open_store(str(folder / "root"), {})
    add_alice(store)
    change_users(store, users.added("bob", users.credentials_of("x")))
    kafka = KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0", **ours)
    with (
        KafkaProcess(found.broker, folder / "kafka", settings, protocol="SASL_PLAINTEXT") as theirs,
        broker(folder / "root", kafka=kafka) as agent,
    ):
        yield agent.kafka_address, theirs.address


@pytest.fixture(name="addresses", scope="module")
def _addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Listeners whose sessions do not end."""
    with both(tmp_path_factory.mktemp("sasl"), KAFKA, sasl_mechanisms="PLAIN") as found:
        yield found


@pytest.fixture(name="expiring", scope="module")
def _expiring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Listeners whose sessions end after three seconds."""
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    settings = KAFKA | {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config": scram,
        "connections.max.reauth.ms": "3000",
    }
    ours = {"sasl_mechanisms": "PLAIN,SCRAM-SHA-256", "connections_max_reauth_ms": 3_000}
    with both(tmp_path_factory.mktemp("expiring"), settings, **ours) as found:
        yield found


@pytest.mark.parametrize("login", LOGINS)
def test_a_kafka_answers_the_same(addresses: tuple[str, str], login: str) -> None:
    """Promise: each reply, or the end of the connection, is that of Kafka."""
    ours, theirs = (_replies(address, LOGINS[login]) for address in addresses)
    assert ours == theirs


@pytest.mark.parametrize("login", SESSIONS)
def test_a_kafka_answers_the_same_within_a_session(expiring: tuple[str, str], login: str) -> None:
    """Promise: so it is with logins on an open connection, and after the end of its session."""
    ours, theirs = (_replies(address, [*LOGIN, *SESSIONS[login]]) for address in expiring)
    assert ours == theirs


def _replies(address: str, steps: list[Step]) -> list[object]:
    """Returns the replies up to the first one that is missing."""
    replies: list[object] = []
    with contextlib.closing(Client(address)) as client:
        for step in steps:
            replies.append(client.do(step))
            if replies[-1] is None:
                break
    return replies
