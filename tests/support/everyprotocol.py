"""Brokers with a listener for each of Kafka's protocols: a real Kafka, and a broker of ours.

Both have the same users, with each mechanism for passwords, and check the certificate of a client
that has one. ACLs apply to the resources that they mention; everything else is allowed, and clients
without a login may do everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import confluent_kafka.admin

from benchmarks.kafka_process import Node
from sparklog.listeners import PLAINTEXT, PROTOCOLS, SASL_PLAINTEXT, SASL_SSL, Listener
from sparklog.security.acl import ANONYMOUS
from sparklog.security.policies import with_policy
from sparklog.security.state import Mode
from sparklog.settings import TlsSettings
from sparklog.storage.objects import LocalStore
from tests.support.certificates import Authority
from tests.support.ports import quiet_port
from tests.support.users import change_users

SECONDS: Final = 30.0
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_MODULES: Final = "org.apache.kafka.common.security"
_admin: Any = confluent_kafka.admin
"""Its names are not declared as exported."""


def tls_settings(authority: Authority) -> TlsSettings:
    """Returns ours; Kafka has the same files."""
    certificate, key = authority.sign("broker")
    return TlsSettings(certificate=certificate, key=key, ca=authority.path, client_auth="requested")


def settings_of_kafka(node: Node, tls: TlsSettings, users: Mapping[str, str]) -> dict[str, str]:
    """Returns Kafka's settings. `users`: passwords by name, which `add_users` has to add too."""
    both = Path(tls.certificate).with_name("kafka.pem")
    both.write_text(Path(tls.key).read_text() + Path(tls.certificate).read_text())
    ports = {each: node.port if each == PLAINTEXT else quiet_port() for each in PROTOCOLS}
    own = named(Listener(each, each, f"127.0.0.1:{port}") for each, port in ports.items())
    plain = " ".join(f'user_{name}="{password}"' for name, password in users.items())
    logins = {
        "PLAIN": f"{_MODULES}.plain.PlainLoginModule required {plain};",
        "SCRAM-SHA-256": f"{_MODULES}.scram.ScramLoginModule required;",
        "SCRAM-SHA-512": f"{_MODULES}.scram.ScramLoginModule required;",
    }
    return {
        "listeners": f"{own},CONTROLLER://127.0.0.1:{node.controller_port}",
        "advertised.listeners": own,
        "listener.security.protocol.map": ",".join(f"{each}:{each}" for each in PROTOCOLS)
        + ",CONTROLLER:PLAINTEXT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(both),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": tls.ca,
        "ssl.client.auth": tls.client_auth,
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        **{
            f"listener.name.{protocol.lower()}.{mechanism.lower()}.sasl.jaas.config": login
            for protocol in (SASL_PLAINTEXT, SASL_SSL)
            for mechanism, login in logins.items()
        },
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "super.users": ANONYMOUS,
    }


def named(listeners: Iterable[Listener]) -> str:
    """Returns `PROTOCOL://host:port` of each listener."""
    return ",".join(f"{each.protocol}://{each.address}" for each in listeners)


def enforce_acls(root: Path) -> None:
    """Gives a root of ours the rules of Kafka's settings."""
    rules = with_policy(mode=Mode.ENFORCE, add_super_users=[ANONYMOUS], allow_everyone=True)
    change_users(LocalStore(root), rules)


def add_users(address: str, users: Mapping[str, str]) -> None:
    """Adds users to a broker of either kind, at its listener without a login."""
    client = _admin.AdminClient({"bootstrap.servers": address})
    for mechanism in (_admin.ScramMechanism.SCRAM_SHA_256, _admin.ScramMechanism.SCRAM_SHA_512):
        info = _admin.ScramCredentialInfo(mechanism, 4_096)
        changes = [
            _admin.UserScramCredentialUpsertion(name, info, password.encode())
            for name, password in users.items()
        ]
        for done in client.alter_user_scram_credentials(changes).values():
            done.result(SECONDS)
