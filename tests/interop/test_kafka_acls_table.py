"""Authorization request by request, at a broker of ours and at a real Kafka: both decide alike.

For each grant, every request is sent to both brokers by a user that has only this grant, about a
topic and a group that exist and about others that do not. Compared are the authorization errors,
where they are in the reply, the names in it, and the authorized operations.

Kafka's jars come from Maven's repositories; where they cannot be got, the test says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from kio.schema.errors import ErrorCode

from benchmarks import jars
from benchmarks.kafka_process import KafkaProcess
from sparklog.security import users
from sparklog.security.acl import (
    OPERATIONS,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from sparklog.settings import KafkaSettings
from sparklog.storage.objects import open_store
from tests.support import quota_cases
from tests.support.acls import acl, set_acls
from tests.support.kafkas import Frames, broker
from tests.support.scram_cases import CASES, DESCRIBE, altered, deletion, described
from tests.support.users import PASSWORD, change_users
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.soak(mode="clients"), pytest.mark.timeout(900)]

ADMIN, ALICE = "User:admin", "User:alice"
KAFKA: Final = {
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
        "org.apache.kafka.common.security.plain.PlainLoginModule required username=admin"
        f' password="{PASSWORD}" user_admin="{PASSWORD}" user_alice="{PASSWORD}";'
    ),
    "offsets.topic.num.partitions": "8",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    # The controller's listener has no logins.
    "super.users": f"{ADMIN};User:ANONYMOUS",
}
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
AUTHORIZATION: Final = {
    ErrorCode.topic_authorization_failed,
    ErrorCode.group_authorization_failed,
    ErrorCode.cluster_authorization_failed,
    ErrorCode.transactional_id_authorization_failed,
}
NAMES: Final = ("name", "topic", "group_id", "resource_name", "coordinator_key", "key")
TOPICS, GROUPS = ("here", "absent"), ("here-g", "absent-g")
NO_WAIT: Final = timedelta(0)


def grant(resource: ResourceType, name: str, operation: Operation, **changes: Any) -> Acl:
    """Returns an ACL of alice."""
    return acl(resource, name, operation, principal=ALICE, **changes)


def single_grants() -> Iterator[tuple[str, list[Acl]]]:
    """Yields each operation on each resource alone."""
    for resource, names in ((TOPIC, TOPICS), (GROUP, GROUPS), (CLUSTER, ("kafka-cluster",))):
        for operation in sorted({*OPERATIONS[resource], Operation.ALL}):
            grants = [grant(resource, name, operation) for name in names]
            yield f"{resource.name} {operation.name}", grants


DENY, PREFIXED = Permission.DENY, PatternType.PREFIXED
GRANTS: Final[dict[str, list[Acl]]] = {
    "nothing": [],
    **dict(single_grants()),
    "all but reading the topic": [
        grant(TOPIC, "*", Operation.ALL),
        grant(GROUP, "*", Operation.ALL),
        grant(CLUSTER, "kafka-cluster", Operation.ALL),
        grant(TOPIC, "here", Operation.READ, permission=DENY),
    ],
    "everything but a description": [
        grant(TOPIC, "*", Operation.ALL),
        grant(TOPIC, "he", Operation.DESCRIBE, permission=DENY, pattern=PREFIXED),
        grant(GROUP, "*", Operation.ALL),
        grant(GROUP, "here-g", Operation.DESCRIBE, permission=DENY),
    ],
    "prefixes": [
        grant(TOPIC, "he", Operation.WRITE, pattern=PREFIXED),
        grant(TOPIC, "abs", Operation.READ, pattern=PREFIXED),
        grant(GROUP, "here", Operation.READ, pattern=PREFIXED),
    ],
    "for anybody": [
        acl(TOPIC, "*", Operation.READ, principal="User:*"),
        acl(GROUP, "*", Operation.READ, principal="User:*"),
    ],
    "from another host": [grant(TOPIC, "*", Operation.ALL, host="10.0.0.7")],
    "from this host": [grant(TOPIC, "*", Operation.ALL, host="127.0.0.1")],
    "a topic and its group": [
        grant(TOPIC, "here", Operation.READ),
        grant(GROUP, "here-g", Operation.READ),
        grant(TOPIC, "absent", Operation.WRITE),
    ],
    "a producer without idempotence": [
        grant(TOPIC, "here", Operation.WRITE),
        grant(CLUSTER, "kafka-cluster", Operation.IDEMPOTENT_WRITE, permission=DENY),
    ],
    "writing where it is denied": [
        grant(TOPIC, "he", Operation.WRITE, pattern=PREFIXED),
        grant(TOPIC, "h", Operation.WRITE, pattern=PREFIXED, permission=DENY),
    ],
}


def per_topic(field: str, **fields: Any) -> list[dict[str, Any]]:
    """Returns an entry of a request for each topic."""
    return [{field: topic, **fields} for topic in TOPICS]


def config_resources(**fields: Any) -> list[dict[str, Any]]:
    """Returns the topics, the groups, the broker and its logger as resources of a request."""
    named = [(2, each) for each in TOPICS] + [(32, each) for each in GROUPS] + [(4, ""), (8, "1")]
    return [{"resource_type": kind, "resource_name": name, **fields} for kind, name in named]


def group_requests(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a request for each group."""
    return [{"group_id": group, **fields} for group in GROUPS]


NO_MEMBER: Final = {"generation_id": 1, "member_id": "nobody", "group_instance_id": None}
NO_ACL_FILTER: Final = {
    "resource_type_filter": 2,
    "resource_name_filter": "nothing",
    "pattern_type_filter": 3,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
REQUESTS: Final[dict[str, tuple[int, int, list[dict[str, Any]]]]] = {
    "Produce": (
        0,
        9,
        [
            {
                "transactional_id": None,
                "acks": 1,
                "timeout": timedelta(seconds=5),
                "topic_data": per_topic(
                    "name", partition_data=[{"index": 0, "records": b"not a batch"}]
                ),
            }
        ],
    ),
    "Fetch": (
        1,
        11,
        [
            {
                "replica_id": -1,
                "max_wait": NO_WAIT,
                "min_bytes": 0,
                "max_bytes": 1_000,
                "isolation_level": 0,
                "session_id": 0,
                "session_epoch": -1,
                "topics": per_topic(
                    "topic",
                    partitions=[{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1_000}],
                ),
                "forgotten_topics_data": (),
                "rack_id": "",
            }
        ],
    ),
    "ListOffsets": (
        2,
        4,
        [
            {
                "replica_id": -1,
                "isolation_level": 0,
                "topics": per_topic(
                    "name",
                    partitions=[
                        {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
                    ],
                ),
            }
        ],
    ),
    "Metadata": (
        3,
        9,
        [
            {
                "topics": topics,
                "allow_auto_topic_creation": False,
                "include_cluster_authorized_operations": True,
                "include_topic_authorized_operations": True,
            }
            for topics in (None, per_topic("name"))
        ],
    ),
    "OffsetCommit": (
        8,
        7,
        group_requests(
            {
                "generation_id_or_member_epoch": -1,
                "member_id": "",
                "group_instance_id": None,
                "topics": per_topic(
                    "name",
                    partitions=[
                        {
                            "partition_index": 0,
                            "committed_offset": 0,
                            "committed_leader_epoch": -1,
                            "committed_metadata": "",
                        }
                    ],
                ),
            }
        ),
    ),
    "OffsetFetch": (
        9,
        8,
        [
            {
                "groups": [{"group_id": group, "topics": topics} for group in GROUPS],
                "require_stable": False,
            }
            for topics in (None, per_topic("name", partition_indexes=[0]))
        ],
    ),
    "FindCoordinator": (10, 4, [{"key_type": 0, "coordinator_keys": list(GROUPS)}]),
    "JoinGroup": (
        11,
        5,
        group_requests(
            {
                "session_timeout": timedelta(seconds=10),
                "rebalance_timeout": timedelta(seconds=10),
                "member_id": "nobody",
                "group_instance_id": None,
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": b""}],
            }
        ),
    ),
    "Heartbeat": (12, 3, group_requests(NO_MEMBER)),
    "LeaveGroup": (
        13,
        3,
        group_requests({"members": [{"member_id": "nobody", "group_instance_id": None}]}),
    ),
    "SyncGroup": (14, 3, group_requests({**NO_MEMBER, "assignments": ()})),
    "DescribeGroups": (
        15,
        5,
        [{"groups": list(GROUPS), "include_authorized_operations": True}],
    ),
    "ListGroups": (16, 4, [{"states_filter": ()}]),
    "CreateTopics": (
        19,
        7,
        [
            {
                "topics": [
                    {
                        "name": name,
                        "num_partitions": 1,
                        "replication_factor": 1,
                        "assignments": (),
                        "configs": (),
                    }
                    for name in TOPICS
                ],
                "timeout": timedelta(seconds=5),
                "validate_only": True,
            }
        ],
    ),
    "DeleteRecords": (
        21,
        2,
        [
            {
                "topics": per_topic("name", partitions=[{"partition_index": 0, "offset": 0}]),
                "timeout": timedelta(seconds=5),
            }
        ],
    ),
    "InitProducerId": (
        22,
        3,
        [
            {
                "transactional_id": None,
                "transaction_timeout": timedelta(seconds=5),
                "producer_id": -1,
                "producer_epoch": -1,
            }
        ],
    ),
    "OffsetForLeaderEpoch": (
        23,
        3,
        [
            {
                "replica_id": -2,
                "topics": per_topic(
                    "topic",
                    partitions=[{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}],
                ),
            }
        ],
    ),
    "DescribeAcls": (29, 3, [NO_ACL_FILTER]),
    "CreateAcls": (
        30,
        3,
        [
            {
                "creations": [
                    {
                        "resource_type": 2,
                        "resource_name": "",  # refused as invalid if alice may create it
                        "resource_pattern_type": 3,
                        "principal": ALICE,
                        "host": "*",
                        "operation": 3,
                        "permission_type": 3,
                    }
                ]
            }
        ],
    ),
    "DeleteAcls": (31, 3, [{"filters": [NO_ACL_FILTER]}]),
    "DescribeConfigs": (
        32,
        4,
        [
            {
                "resources": config_resources(configuration_keys=("retention.ms",)),
                "include_synonyms": False,
                "include_documentation": False,
            }
        ],
    ),
    "AlterConfigs": (
        33,
        2,
        [
            {
                "resources": [
                    {"resource_type": kind, "resource_name": name, "configs": ()}
                    for kind, name in ((2, "absent"), (4, ""))
                ],
                "validate_only": True,
            }
        ],
    ),
    "DescribeLogDirs": (35, 4, [{"topics": per_topic("topic", partitions=[0])}]),
    "CreatePartitions": (
        37,
        3,
        [
            {
                "topics": per_topic("name", count=2, assignments=None),
                "timeout": timedelta(seconds=5),
                "validate_only": True,
            }
        ],
    ),
    "DeleteGroups": (42, 2, [{"groups_names": ["absent-g"]}]),
    "ElectLeaders": (
        43,
        2,
        [
            {
                "election_type": 0,
                "topic_partitions": [{"topic": "here", "partitions": [0]}],
                "timeout": timedelta(seconds=5),
            }
        ],
    ),
    "IncrementalAlterConfigs": (
        44,
        1,
        [
            {
                "resources": config_resources(
                    configs=[{"name": "retention.ms", "config_operation": 1, "value": None}]
                ),
                "validate_only": True,
            }
        ],
    ),
    "AlterPartitionReassignments": (
        45,
        0,
        [
            {
                "timeout": timedelta(seconds=5),
                "topics": per_topic("name", partitions=[{"partition_index": 0, "replicas": None}]),
            }
        ],
    ),
    "ListPartitionReassignments": (
        46,
        0,
        [{"timeout": timedelta(seconds=5), "topics": None}],
    ),
    "OffsetDelete": (
        47,
        0,
        group_requests({"topics": per_topic("name", partitions=[{"partition_index": 0}])}),
    ),
    "DescribeClientQuotas": (48, 1, [{"components": (), "strict": False}]),
    "AlterClientQuotas": (49, 1, [quota_cases.altered({"user": "bob"}, producer_byte_rate=None)]),
    "DescribeUserScramCredentials": (50, 0, [described("absent")]),
    "AlterUserScramCredentials": (51, 0, [altered(deletions=[deletion("absent")])]),
    "DescribeCluster": (60, 0, [{"include_cluster_authorized_operations": True}]),
    "DescribeProducers": (61, 0, [{"topics": per_topic("name", partition_indexes=[0])}]),
    "DescribeTopicPartitions": (
        75,
        0,
        [
            {"topics": topics, "response_partition_limit": 100, "cursor": None}
            for topics in ((), per_topic("name"))
        ],
    ),
    "DeleteTopics": (
        20,
        6,
        [
            {
                "topics": [{"name": "absent", "topic_id": None}],
                "timeout": timedelta(seconds=5),
            }
        ],
    ),
}


class Client(Frames):
    """A user that has logged in by PLAIN."""

    def __init__(self, address: str, user: str) -> None:
        super().__init__(address, 60.0)
        self.ask(17, 1, {"mechanism": "PLAIN"})
        self.ask(36, 2, {"auth_bytes": f"\0{user}\0{PASSWORD}".encode()})


class Side:
    """One of the two brokers, with a topic `here` and a group `here-g`."""

    def __init__(self, address: str) -> None:
        self.admin, self.alice = Client(address, "admin"), Client(address, "alice")
        topic = {"name": "here", "num_partitions": 1, "replication_factor": 1}
        self.admin.ask(
            19,
            7,
            {
                "topics": [{**topic, "assignments": (), "configs": ()}],
                "timeout": timedelta(seconds=30),
                "validate_only": False,
            },
        )
        key, version, requests = REQUESTS["OffsetCommit"]

        def is_committed() -> bool:
            found = self.admin.ask(key, version, requests[0])
            codes = {each.name: each.partitions[0].error_code for each in found.topics}
            return codes["here"] is ErrorCode.none

        self.admin.ask(10, 4, {"key_type": 0, "coordinator_keys": ["here-g"]})
        wait_until(is_committed, "the group commits an offset")

    def grant(self, acls: Sequence[Acl]) -> None:
        """Replaces all ACLs, and returns once the broker knows them."""
        everything = {
            **dict.fromkeys(NO_ACL_FILTER, None),
            "resource_type_filter": 1,
            "pattern_type_filter": 1,
            "operation": 1,
            "permission_type": 1,
        }
        found = self.admin.ask(31, 3, {"filters": [everything]})
        assert found.filter_results[0].error_code is ErrorCode.none
        if acls:
            creations = [
                {
                    "resource_type": int(each.resource),
                    "resource_name": each.name,
                    "resource_pattern_type": int(each.pattern),
                    "principal": each.principal,
                    "host": each.host,
                    "operation": int(each.operation),
                    "permission_type": int(each.permission),
                }
                for each in acls
            ]
            results = self.admin.ask(30, 3, {"creations": creations}).results
            assert all(each.error_code is ErrorCode.none for each in results)

        def is_known() -> bool:
            found = self.admin.ask(29, 3, everything)
            return sum(len(each.acls) for each in found.resources) == len({*acls})

        wait_until(is_known, "the ACLs are known")

    def close(self) -> None:
        self.admin.close()
        self.alice.close()


@pytest.fixture(name="sides", scope="module")
def _sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Our broker and Kafka's, each with the users admin, which is a super user, and alice."""
    found = jars.find()
    if not found.broker:
        pytest.skip("; ".join(found.missing))
    folder = tmp_path_factory.mktemp("acls")
    prepare(folder / "root")
    kafka = KafkaSettings(listen="SASL_PLAINTEXT://127.0.0.1:0", sasl_mechanisms="PLAIN")
    with (
        KafkaProcess(found.broker, folder / "kafka", KAFKA, protocol="SASL_PLAINTEXT") as theirs,
        broker(folder / "root", kafka=kafka) as ours,
        contextlib.closing(Side(ours.kafka_address)) as our_side,
        contextlib.closing(Side(theirs.address)) as their_side,
    ):
        yield our_side, their_side


def prepare(root: Path) -> None:
    """Creates a root that enforces ACLs."""
    store = open_store(str(root), {})
    for name in ("admin", "alice"):
        change_users(store, users.added(name, users.credentials_of(PASSWORD)))
    set_acls(store, super_users=[ADMIN])


def decisions(value: Any) -> Any:
    """Returns the parts of a reply that show authorization: codes, names, authorized operations."""
    if isinstance(value, tuple):
        found = [decisions(each) for each in value]
        return sorted((each for each in found if each not in ((), None, {})), key=repr)
    if not dataclasses.is_dataclass(value):
        return None
    told: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        each = getattr(value, field.name)
        if isinstance(each, ErrorCode):
            told[field.name] = each.name if each in AUTHORIZATION else "-"
        elif field.name in NAMES or field.name.endswith("authorized_operations"):
            told[field.name] = each
        elif field.name == "topic_config_error_code":
            told[field.name] = each if ErrorCode(each) in AUTHORIZATION else 0
        elif (inner := decisions(each)) not in ((), [], None, {}):
            told[field.name] = inner
    return told


@pytest.mark.parametrize("granted", GRANTS)
def test_both_decide_alike(sides: tuple[Side, Side], granted: str) -> None:
    """Promise: as Kafka's StandardAuthorizer, for each request that both serve."""
    for side in sides:
        side.grant(GRANTS[granted])
    differences = []
    for name, (key, version, requests) in REQUESTS.items():
        for number, fields in enumerate(requests):
            ours, theirs = (decisions(each.alice.ask(key, version, fields)) for each in sides)
            if ours != theirs:
                differences.append(f"{name} {number}:\n  ours   {ours}\n  theirs {theirs}")
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize(
    ("cases", "version", "describe"),
    [(CASES, 0, DESCRIBE), (quota_cases.CASES, 1, quota_cases.DESCRIBE)],
    ids=["users", "quotas"],
)
def test_both_keep_the_same_users_and_quotas(
    sides: tuple[Side, Side], cases: Any, version: int, describe: int
) -> None:
    """Promise: the replies to each request of the cases are those of a real Kafka."""
    for side in sides:
        for case in cases:

            def is_as_expected(side: Side = side, case: Any = case) -> bool:
                found = case.outcome_of(side.admin.ask(case.key, version, case.fields))
                return bool(found == case[3:5])

            if case.key == describe:  # a Kafka broker follows its controller
                wait_until(is_as_expected, case.what)
            else:
                assert is_as_expected(), case.what
