"""Users that Kafka clients add, change and remove (KIP-554)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kio.schema.errors import ErrorCode

from sparklog import errors
from sparklog.broker.agent import Agent
from sparklog.broker.kafka.messages import Fields
from sparklog.broker.kafka.scram_credentials import upsertion_of
from sparklog.broker.security_admin import CHANGED_USERS
from sparklog.listeners import Listener
from sparklog.security.acl import CLUSTER_NAME, Operation, ResourceType
from sparklog.security.state import Mode
from sparklog.storage.objects import LocalStore
from tests.support.acls import acl, set_acls
from tests.support.kafkas import Frames, broker, frames
from tests.support.scram_cases import ALTER, CASES, DESCRIBE, altered, described, upsertion
from tests.support.secured import follow_acls


@pytest.fixture(name="agent", scope="module")
def _agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    root = tmp_path_factory.mktemp("root")
    set_acls(LocalStore(root), mode=Mode.OFF)
    with broker(root) as agent:
        yield agent


@pytest.fixture(name="client")
def _client(agent: Agent) -> Iterator[Frames]:
    """An anonymous administrator of the users."""
    follow_acls(agent, acl(ResourceType.CLUSTER, CLUSTER_NAME, Operation.ALTER), mode=Mode.ENFORCE)
    with frames(agent) as client:
        yield client


def test_requests_are_checked_as_in_kafka(client: Frames) -> None:
    """Promise: each case of `CASES`, which another test compares with a real Kafka."""
    for case in CASES:
        found = case.outcome_of(client.ask(case.key, 0, case.fields))
        assert found == (case.codes, case.credentials), case.what
    every = client.ask(DESCRIBE, 0, {"users": None})
    assert [each.user for each in every.results] == ["carol"]


def test_users_are_changed_only_where_rights_are_evaluated(agent: Agent, client: Frames) -> None:
    """Promise: without ACLs everybody could change the password of everybody; the error says so."""
    follow_acls(agent, mode=Mode.OFF)
    (result,) = client.ask(ALTER, 0, altered(upsertion("mallory"))).results
    reply = client.ask(DESCRIBE, 0, described("carol"))
    for each in (result, reply):
        assert each.error_code is ErrorCode.security_disabled
        assert "sparklog security observe" in each.error_message
    follow_acls(agent, mode=Mode.OBSERVE)
    (result,) = client.ask(ALTER, 0, altered(upsertion("mallory"))).results
    assert result.error_code is ErrorCode.cluster_authorization_failed
    assert "mallory" not in agent._access.watch.state.users


def test_requests_are_bounded(client: Frames) -> None:
    """Promise: a request for more users than one change makes changes none."""
    names = [f"user-{number}" for number in range(CHANGED_USERS + 1)]
    results = client.ask(ALTER, 0, altered(*map(upsertion, names))).results
    assert {each.error_code for each in results} == {ErrorCode.invalid_request}
    assert len(results) == len(names)
    results = client.ask(ALTER, 0, altered(*map(upsertion, names[1:]))).results
    assert {each.error_code for each in results} == {ErrorCode.none}


@pytest.mark.parametrize(
    ("listener", "changes", "reason"),
    [
        (Listener("OUT", "SASL_PLAINTEXT", "10.0.0.1:9092"), {}, "a listener with TLS"),
        (Listener("OUT", "SASL_SSL", "10.0.0.1:9092"), {}, ""),
        (Listener("IN", "SASL_PLAINTEXT", "127.0.0.1:9092"), {}, ""),
        (Listener("IN", "SSL", "127.0.0.1:9092"), {"salt": b""}, "1 to 256"),
        (Listener("IN", "SSL", "127.0.0.1:9092"), {"salt": bytes(257)}, "1 to 256"),
        (Listener("IN", "SSL", "127.0.0.1:9092"), {"salted_password": b"x"}, "needs 32 bytes"),
        (Listener("IN", "SSL", "127.0.0.1:9092"), {"name": "__root"}, "reserved"),
    ],
)
def test_credentials_that_are_refused(listener: Listener, changes: Fields, reason: str) -> None:
    """Promise: none is set that was sent readable, or with which no client could log in."""
    asked = _Attributes({**upsertion("bob"), **changes})
    if not reason:
        upsertion_of(asked, listener)
        return
    with pytest.raises(errors.BadOption, match=reason):
        upsertion_of(asked, listener)


class _Attributes:
    """A part of a request, as it is parsed."""

    def __init__(self, fields: Fields) -> None:
        self.__dict__.update(fields)
