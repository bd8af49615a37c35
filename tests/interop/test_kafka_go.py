"""franz-go, Kafka's client for Go, with a broker of ours.

Go brings its own modules, as far as its settings let it; where there is no Go, the test says so.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparklog.settings import GroupSettings, KafkaSettings, TlsSettings
from sparklog.storage.objects import open_store
from tests.support.acls import set_acls
from tests.support.certificates import Authority
from tests.support.golang import built
from tests.support.kafkas import broker
from tests.support.users import PASSWORD, add_alice

PATIENCE_SECONDS = 240.0


@pytest.mark.soak(mode="clients")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("has_login", [False, True], ids=["open", "login"])
def test_a_program_with_franz_go(tmp_path: Path, has_login: bool) -> None:
    """Administration, every codec, an eager and a cooperative group.

    The same with SCRAM-SHA-512 over TLS, by a super user while ACLs are enforced.
    """
    program = built(tmp_path, ".")
    login: tuple[str, ...] = ()
    settings: dict[str, Any] = {
        "groups": GroupSettings(initial_rebalance_delay_ms=200, min_session_timeout_ms=1_000)
    }
    if has_login:
        authority = Authority(tmp_path)
        certificate, key = authority.sign("broker")
        settings["tls"] = TlsSettings(certificate=certificate, key=key)
        settings["kafka"] = KafkaSettings(listen="SASL_SSL://127.0.0.1:0")
        store = open_store(str(tmp_path / "root"), {})
        add_alice(store)
        set_acls(store, super_users=("User:alice",))
        login = authority.path, "alice", PASSWORD
    with broker(tmp_path / "root", **settings) as agent:
        done = subprocess.run(
            [str(program), agent.kafka_address, *login],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert done.stdout.split() == ["done"], done.stderr
