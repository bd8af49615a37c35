"""ACLs and the clients of others: they change ACLs, are limited by them, and name the reason.

Promise: confluent-kafka and kafka-python administrate ACLs as they do at a Kafka, and their
producers and consumers work with exactly the rights that docs/security.md gives them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import confluent_kafka
import confluent_kafka.admin
import kafka
import kafka.errors
import pytest
from kafka import admin as acl_resource

from sparklog.broker.agent import Agent
from sparklog.security import users
from sparklog.security.acl import Acl, ResourceType
from sparklog.security.acls import CONSUMER, PRODUCER
from sparklog.settings import KafkaSettings
from sparklog.storage.objects import open_store
from tests.support.acls import acl, set_acls
from tests.support.kafkas import broker, close_leavings
from tests.support.users import PASSWORD, change_users
from tests.support.waiting import wait_until

confluent_admin: Any = confluent_kafka.admin
"""Its names are not declared as exported."""
SECONDS: Final = 30.0
ALICE: Final = "User:alice"
RIGHTS: Final[list[Acl]] = [
    acl(
        resource,
        {ResourceType.TOPIC: "orders", ResourceType.GROUP: "billing"}[resource],
        each,
        principal=ALICE,
    )
    for rights in (PRODUCER, CONSUMER)
    for resource, operations in rights.items()
    if resource is not ResourceType.TRANSACTIONAL_ID
    for each in operations
]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """A broker that enforces ACLs, with the super user admin and the user alice."""
    root = tmp_path_factory.mktemp("acls") / "root"
    store = open_store(str(root), {})
    for name in ("admin", "alice"):
        change_users(store, users.added(name, users.credentials_of(PASSWORD)))
    set_acls(store, RIGHTS, super_users=["User:admin"])
    settings = KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0", sasl_mechanisms="PLAIN")
    with broker(root, kafka=settings) as found:
        yield found


def confluent(agent: Agent, user: str, **more: Any) -> dict[str, Any]:
    """Returns the settings of librdkafka for a user."""
    return {
        "bootstrap.servers": agent.kafka_address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": PASSWORD,
        **more,
    }


def python(agent: Agent, user: str) -> dict[str, Any]:
    """Returns the settings of kafka-python for a user."""
    return {
        "bootstrap_servers": agent.kafka_address,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": user,
        "sasl_plain_password": PASSWORD,
    }


def test_a_user_with_exactly_its_rights(agent: Agent) -> None:
    """Promise: it creates, writes and reads its topic in its group, and nothing else."""
    client = confluent_admin.AdminClient(confluent(agent, "alice"))
    (created,) = client.create_topics([confluent_admin.NewTopic("orders", 1)]).values()
    created.result(SECONDS)
    (refused,) = client.create_topics([confluent_admin.NewTopic("others", 1)]).values()
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        refused.result(SECONDS)
    producer = confluent_kafka.Producer(confluent(agent, "alice", **{"enable.idempotence": True}))
    outcomes: dict[str, Any] = {}

    def acked(error: Any, message: Any) -> None:
        outcomes[message.topic()] = error

    for topic in ("orders", "others"):
        producer.produce(topic, b"1", callback=acked)
    producer.flush(SECONDS)
    assert outcomes["orders"] is None
    assert outcomes["others"].code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
    for group, code in (
        ("billing", None),
        ("other", confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED),
    ):
        options = {"group.id": group, "auto.offset.reset": "earliest"}
        consumer = confluent_kafka.Consumer(confluent(agent, "alice", **options))
        consumer.subscribe(["orders"])
        message = consumer.poll(SECONDS)
        consumer.close()
        assert message is not None
        error = message.error()
        assert (error.code() if error is not None else None) == code


@contextlib.contextmanager
def confluent_acls(agent: Agent) -> Iterator[Any]:
    """Yields create, list and delete of a topic's ACLs by librdkafka's admin client."""
    client = confluent_admin.AdminClient(confluent(agent, "admin"))

    def of(kind: Any, name: str | None, **more: Any) -> Any:
        return kind(
            confluent_admin.ResourceType.TOPIC,
            name,
            confluent_admin.ResourcePatternType.PREFIXED,
            more.get("principal"),
            more.get("host"),
            more.get("operation", confluent_admin.AclOperation.ANY),
            more.get("permission", confluent_admin.AclPermissionType.ANY),
        )

    def create(name: str) -> None:
        binding = of(
            confluent_admin.AclBinding,
            name,
            principal=ALICE,
            host="*",
            operation=confluent_admin.AclOperation.READ,
            permission=confluent_admin.AclPermissionType.ALLOW,
        )
        (created,) = client.create_acls([binding]).values()
        created.result(SECONDS)

    def found(name: str) -> int:
        return len(client.describe_acls(of(confluent_admin.AclBindingFilter, name)).result(SECONDS))

    def delete(name: str) -> int:
        wanted = of(confluent_admin.AclBindingFilter, name)
        (deleted,) = client.delete_acls([wanted]).values()
        return len(deleted.result(SECONDS))

    yield create, found, delete


@contextlib.contextmanager
def python_acls(agent: Agent) -> Iterator[Any]:
    """Yields create, list and delete of a topic's ACLs by kafka-python's admin client."""
    client = kafka.KafkaAdminClient(**python(agent, "admin"))

    def pattern(name: str) -> Any:
        return acl_resource.ResourcePattern(
            acl_resource.ResourceType.TOPIC, name, acl_resource.ACLResourcePatternType.PREFIXED
        )

    def wanted(name: str) -> Any:
        return acl_resource.ACLFilter(
            None,
            None,
            acl_resource.ACLOperation.ANY,
            acl_resource.ACLPermissionType.ANY,
            acl_resource.ResourcePatternFilter(
                acl_resource.ResourceType.TOPIC, name, acl_resource.ACLResourcePatternType.PREFIXED
            ),
        )

    def create(name: str) -> None:
        found = client.create_acls(
            [
                acl_resource.ACL(
                    ALICE,
                    "*",
                    acl_resource.ACLOperation.READ,
                    acl_resource.ACLPermissionType.ALLOW,
                    pattern(name),
                )
            ]
        )
        assert len(found["succeeded"]) == 1, found

    def found(name: str) -> int:
        acls, error = client.describe_acls(wanted(name))
        assert error is kafka.errors.NoError
        return len(acls)

    def delete(name: str) -> int:
        ((_, deleted, error),) = client.delete_acls([wanted(name)])
        assert error is kafka.errors.NoError
        return len(deleted)

    yield create, found, delete
    client.close()


@pytest.mark.parametrize("client", [confluent_acls, python_acls])
def test_administration(agent: Agent, client: Any) -> None:
    """Promise: an ACL that a client has added is in force, listed, and deleted again."""
    administrate(agent, client)
    close_leavings()  # before another test of this process has to


def administrate(agent: Agent, client: Any) -> None:
    """Adds, lists and deletes an ACL, and looks whether alice sees its topic meanwhile."""
    name = client.__name__
    reader = kafka.KafkaConsumer(**python(agent, "alice"))

    def visible() -> bool:
        return f"{name}-1" in reader.topics()

    with client(agent) as (create, found, delete):
        super_user = confluent_admin.AdminClient(confluent(agent, "admin"))
        topic = confluent_admin.NewTopic(f"{name}-1", 1)
        next(iter(super_user.create_topics([topic]).values())).result(SECONDS)
        assert not visible()
        create(f"{name}-")
        assert (found(f"{name}-"), visible()) == (1, True)
        assert delete(f"{name}-") == 1
        assert found(f"{name}-") == 0
        wait_until(lambda: not visible(), "the ACL is gone")
    reader.close()


def test_users(agent: Agent) -> None:
    """Promise: a user that librdkafka's admin client adds logs in, until it is removed."""
    client = confluent_admin.AdminClient(confluent(agent, "admin"))

    def alter(change: Any) -> None:
        (done,) = client.alter_user_scram_credentials([change]).values()
        done.result(SECONDS)

    def can_log_in() -> bool:
        reader = kafka.KafkaAdminClient
        try:
            reader(**python(agent, "dora"), request_timeout_ms=5_000).close()
        except kafka.errors.KafkaError:
            return False
        return True

    sha_256 = confluent_admin.ScramMechanism.SCRAM_SHA_256
    info = confluent_admin.ScramCredentialInfo(sha_256, 4_096)
    alter(confluent_admin.UserScramCredentialUpsertion("dora", info, PASSWORD.encode()))
    found = client.describe_user_scram_credentials(["dora"])["dora"].result(SECONDS)
    assert [each.iterations for each in found.scram_credential_infos] == [4_096]
    wait_until(can_log_in, "the new user logs in")
    alter(confluent_admin.UserScramCredentialDeletion("dora", sha_256))
    assert not can_log_in()
    close_leavings()  # before another test of this process has to
