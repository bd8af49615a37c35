"""Stands for the package `docker` in aiokafka's tests, which start Kafka in a container.

The "container" is a broker that runs already, with the listeners that LISTENERS names, one for each
protocol: their connections are forwarded from the ports that the tests have chosen. Kafka's tools
in the container change users and ACLs of the broker.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    KafkaAdminClient,
    ResourcePattern,
    ResourcePatternFilter,
    ResourceType,
    UserScramCredentialUpsertion,
)

LISTENERS: Final = dict(each.split("://") for each in os.environ["LISTENERS"].split(","))
PORTS: Final = {
    "PLAINTEXT": "ADVERTISED_PORT",
    "SSL": "ADVERTISED_SSL_PORT",
    "SASL_PLAINTEXT": "ADVERTISED_SASL_PLAINTEXT_PORT",
    "SASL_SSL": "ADVERTISED_SASL_SSL_PORT",
}


class Container:
    """The broker."""

    def exec_run(self, command: str) -> tuple[int, bytes]:
        """Runs a tool of Kafka, without its JVM. Raises AssertionError if the broker refuses."""
        program, *words = command.split()
        client = KafkaAdminClient(bootstrap_servers=LISTENERS["PLAINTEXT"])
        try:
            TOOLS[Path(program).name](client, words)
        finally:
            client.close()
        return 0, b""

    def stop(self) -> None:
        """The broker runs on."""


def _acls(client: KafkaAdminClient, words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--force", "--list", "--add", "--remove", "--cluster"):
        parser.add_argument(flag, action="store_true")
    for option in ("topic", "group", "transactional-id", "operation", "authorizer-properties"):
        parser.add_argument(f"--{option}")
    for option in ("--allow-principal", "--deny-principal"):
        parser.add_argument(option)
    given = parser.parse_args(words)
    if given.list:
        everything = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
        anything = (ACLOperation.ANY, ACLPermissionType.ANY)
        client.describe_acls(ACLFilter(None, None, *anything, everything))
        return
    names = {
        ResourceType.CLUSTER: "kafka-cluster" if given.cluster else None,
        ResourceType.TOPIC: given.topic,
        ResourceType.GROUP: given.group,
        ResourceType.TRANSACTIONAL_ID: given.transactional_id,
    }
    (resource,) = (ResourcePattern(kind, name) for kind, name in names.items() if name)
    allows = given.allow_principal is not None
    acl = (
        given.allow_principal if allows else given.deny_principal,
        "*",
        ACLOperation[given.operation.upper()],
        ACLPermissionType.ALLOW if allows else ACLPermissionType.DENY,
        resource,
    )
    if given.add:
        assert not client.create_acls([ACL(*acl)])["failed"]
    else:
        ((_, deleted, _),) = client.delete_acls([ACLFilter(*acl)])
        assert deleted
    while bool(client.describe_acls(ACLFilter(*acl))[0]) != given.add:
        time.sleep(0.05)  # Kafka answers a change before its broker goes by it


def _configs(client: KafkaAdminClient, words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--alter", action="store_true")
    for option in ("zookeeper", "add-config", "entity-type", "entity-name"):
        parser.add_argument(f"--{option}")
    given = parser.parse_args(words)
    for mechanism, password in re.findall(r"([\w-]+)=\[password=(\w+)\]", given.add_config):
        change = UserScramCredentialUpsertion(given.entity_name, mechanism, password)
        # Kafka 4 refuses both mechanisms of a user in one request.
        assert not any(client.alter_user_scram_credentials([change]).values())


TOOLS: Final = {"kafka-acls.sh": _acls, "kafka-configs.sh": _configs}


def from_env() -> SimpleNamespace:
    """Returns a client of the daemon."""
    return SimpleNamespace(containers=SimpleNamespace(run=_run), close=lambda: None)


def _run(environment: dict[str, Any], **_options: Any) -> Container:
    for protocol, address in LISTENERS.items():
        listener = socket.create_server(("127.0.0.1", int(environment[PORTS[protocol]])))
        threading.Thread(target=_forward, args=(listener, address), daemon=True).start()
    return Container()


def _forward(listener: socket.socket, address: str) -> None:
    host, _, port = address.rpartition(":")
    while True:
        client, _ = listener.accept()
        broker = socket.create_connection((host, int(port)))
        for ends in ((client, broker), (broker, client)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # one of them has left


models = SimpleNamespace(containers=SimpleNamespace(Container=Container))
