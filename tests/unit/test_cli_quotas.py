"""`sparklog quotas`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparklog.clock import SystemClock
from sparklog.security.quota import QuotaEntity, QuotaKey
from sparklog.storage.metadata.cluster_file import open_cluster
from sparklog.storage.objects import LocalStore
from tests.unit.test_cli_acls import done, refusal, state


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    open_cluster(LocalStore(str(tmp_path)), clock=SystemClock(), create=True)
    return tmp_path


def test_the_life_of_quotas(root: Path) -> None:
    """Quotas are set one by one, listed, and removed together or by name."""
    alice = ("--user", "alice")
    words = ("quotas", "set", *alice, "--producer-byte-rate", "1000000")
    assert done(root, *words) == "user alice: producer_byte_rate 1,000,000\n"
    done(root, "quotas", "set", *alice, "--controller-mutation-rate", "0.5")
    done(root, "quotas", "set", *alice, "--client-id", "<default>", "--consumer-byte-rate", "7")
    done(root, "quotas", "set", "--ip", "<default>", "--connection-creation-rate", "20")
    assert state(root).quotas[QuotaEntity(user="alice", client_id=None)] == {
        QuotaKey.CONSUMER_BYTE_RATE: 7
    }
    listed = [line.split() for line in done(root, "quotas", "list").splitlines()]
    assert listed == [
        ["user", "client-id", "ip", "quota", "value"],
        ["-", "-", "<default>", "connection_creation_rate", "20"],
        ["alice", "-", "-", "controller_mutation_rate", "0.5"],
        ["alice", "-", "-", "producer_byte_rate", "1000000"],
        ["alice", "<default>", "-", "consumer_byte_rate", "7"],
    ]
    found = json.loads(done(root, "quotas", "list", "--json"))
    assert {"ip": "<default>", "quota": "connection_creation_rate", "value": 20.0} in found
    assert "pass --yes" in refusal(root, "quotas", "remove", *alice)
    done(root, "quotas", "remove", *alice, "--key", "producer_byte_rate", "--yes")
    assert [*state(root).quotas[QuotaEntity(user="alice")]] == [QuotaKey.CONTROLLER_MUTATION_RATE]
    done(root, "quotas", "remove", *alice, "--yes")
    assert QuotaEntity(user="alice") not in state(root).quotas
    assert "there is no such quota" in refusal(root, "quotas", "remove", *alice, "--yes")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("set", "--user", "alice"), "no quota is named"),
        (("set", "--producer-byte-rate", "1"), "no entity is named"),
        (("remove", "--yes"), "no entity is named"),
        (("set", "--user", "alice", "--connection-creation-rate", "1"), "Invalid configuration"),
        (("set", "--ip", "host", "--connection-creation-rate", "1"), "not an IP address"),
        (("remove", "--user", "alice", "--key", "bytes", "--yes"), "Invalid configuration key"),
    ],
)
def test_what_is_refused(root: Path, arguments: tuple[str, ...], reason: str) -> None:
    """The error names the part that is missing or wrong."""
    assert reason in refusal(root, "quotas", *arguments)
