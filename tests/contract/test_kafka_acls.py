"""Authorization of all Kafka requests, for a client that may do nothing but what an ACL allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from kio.schema.errors import ErrorCode

from sparklog.broker.agent import Agent
from sparklog.broker.kafka import apis  # noqa: F401  registers them
from sparklog.broker.kafka.registry import APIS
from sparklog.broker.kafka.resources import ResourceType as ConfigType
from sparklog.broker.kafka.topics import kafka_id
from sparklog.security.acl import CLUSTER_NAME, Acl, Operation, ResourceType
from sparklog.security.state import Mode
from sparklog.storage.objects import LocalStore
from tests.support.acls import acl, set_acls
from tests.support.kafkarequests import (
    TIMEOUT,
    batch,
    commit_fields,
    create,
    create_fields,
    fetch_fields,
    produce,
    produce_fields,
)
from tests.support.kafkas import Frames, broker, frames
from tests.support.quota_cases import altered

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
DESCRIBE, READ, DELETE = Operation.DESCRIBE, Operation.READ, Operation.DELETE
CREATE, ALTER = Operation.CREATE, Operation.ALTER
THERE, NEVER = "there", "never"
"""Names of equal length: a topic and a group that exist, and a topic and a group that do not."""
OTHER = "other"
"""Another topic that exists; the group has offsets of both."""
KEYS: Final = {api.name: key for key, api in APIS.items()}
REFUSALS: Final = {
    TOPIC: ErrorCode.topic_authorization_failed,
    GROUP: ErrorCode.group_authorization_failed,
    CLUSTER: ErrorCode.cluster_authorization_failed,
}
ANY: Final = 1


# ------------------------------------------------------------------------------ the table


class Needed(NamedTuple):
    """An ACL that a request needs, and its refusal without it."""

    operation: Operation
    resource: ResourceType
    code: ErrorCode
    places: tuple[str, ...]
    """The fields of the reply that contain `code`."""


def topic(operation: Operation, *places: str) -> Needed:
    """An ACL on the topic."""
    return Needed(operation, TOPIC, REFUSALS[TOPIC], places)


def group(operation: Operation, *places: str) -> Needed:
    """An ACL on the group."""
    return Needed(operation, GROUP, REFUSALS[GROUP], places)


def cluster(operation: Operation, *places: str, code: ResourceType = CLUSTER) -> Needed:
    """An ACL on the cluster; `code`: the resource whose error the reply contains without it."""
    return Needed(operation, CLUSTER, REFUSALS[code], places)


class Row(NamedTuple):
    """A request for a topic and a group of one name, and the ACLs that it needs together."""

    api: str
    version: int
    fields: Callable[[str], Any]
    needed: tuple[Needed, ...]
    served_on: str = THERE
    """The name in the request that is served."""


def member(group_id: str) -> dict[str, Any]:
    """Fields of a request of a member that the group does not have."""
    return {
        "group_id": group_id,
        "generation_id": 1,
        "member_id": "m",
        "group_instance_id": None,
    }


def joining(group_id: str) -> dict[str, Any]:
    """Fields of JoinGroup, whose reply is the id of the new member."""
    return {
        **member(group_id),
        "member_id": "",
        "session_timeout": TIMEOUT,
        "rebalance_timeout": TIMEOUT,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
    }


def selected(principal: str) -> dict[str, Any]:
    """Fields of a filter for ACLs."""
    return {
        "resource_type_filter": ANY,
        "resource_name_filter": None,
        "pattern_type_filter": ANY,
        "principal_filter": principal,
        "host_filter": None,
        "operation": ANY,
        "permission_type": ANY,
    }


ADDED_ACL: Final = {
    "resource_type": TOPIC,
    "resource_name": "t",
    "resource_pattern_type": 3,
    "principal": "User:somebody",
    "host": "*",
    "operation": READ,
    "permission_type": 3,
}
CONFIGURED: Final = {
    ConfigType.TOPIC: TOPIC,
    ConfigType.GROUP: GROUP,
    ConfigType.BROKER: CLUSTER,
    ConfigType.BROKER_LOGGER: CLUSTER,
    ConfigType.CLIENT_METRICS: CLUSTER,
}


def configs(api: str, version: int, operation: Operation, place: str) -> Iterator[Row]:
    """Yields a row for each type of resource that has a configuration."""
    for kind, resource in CONFIGURED.items():

        def fields(name: str, kind: ConfigType = kind) -> dict[str, Any]:
            is_broker = kind in (ConfigType.BROKER, ConfigType.BROKER_LOGGER)
            named = {"resource_type": kind, "resource_name": "1" if is_broker else name}
            return {
                "resources": [{**named, "configuration_keys": None, "configs": ()}],
                "validate_only": True,
                "include_synonyms": False,
            }

        needed = Needed(operation, resource, REFUSALS[resource], (place,))
        yield Row(api, version, fields, (needed,))


def partitions(name: str, field: str = "partition_index", **more: Any) -> dict[str, Any]:
    """Fields of partition 0 of a topic."""
    return {"name": name, "topic": name, "partitions": [{field: 0, **more}]}


def metadata_fields(*, creates: bool = False, **named: Any) -> dict[str, Any]:
    """Fields of Metadata for one topic, by its name or its id; for all without either."""
    return {
        "topics": [{"name": None, "topic_id": None, **named}] if named else None,
        "allow_auto_topic_creation": creates,
        "include_topic_authorized_operations": True,
    }


def described_fields(*names: str, limit: int = 2_000) -> dict[str, Any]:
    """Fields of DescribeTopicPartitions; without names for all topics."""
    return {
        "topics": [{"name": name} for name in names],
        "response_partition_limit": limit,
        "cursor": None,
    }


ROWS: Final = [
    Row(
        "produce",
        9,
        lambda name: produce_fields(name, 0, batch([b"x"])),
        (topic(Operation.WRITE, "responses.partition_responses.error_code"),),
    ),
    Row(
        "fetch",
        4,
        lambda name: fetch_fields(name, 0, 0),
        (topic(READ, "responses.partitions.error_code"),),
    ),
    Row(
        "list_offsets",
        7,
        lambda name: {
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [partitions(name, current_leader_epoch=-1, timestamp=-1)],
        },
        (topic(DESCRIBE, "topics.partitions.error_code"),),
    ),
    Row(
        "metadata",
        12,
        lambda name: metadata_fields(name=name),
        (topic(DESCRIBE, "topics.error_code"),),
    ),
    Row(
        "offset_commit",
        7,
        lambda name: commit_fields(name, name, 0, 1),
        (
            group(READ, "topics.partitions.error_code"),
            topic(READ, "topics.partitions.error_code"),
        ),
    ),
    Row(
        "offset_fetch",
        8,
        lambda name: {
            "groups": [{"group_id": name, "topics": [{"name": name, "partition_indexes": (0,)}]}],
            "require_stable": False,
        },
        (
            group(DESCRIBE, "groups.error_code"),
            topic(DESCRIBE, "groups.topics.partitions.error_code"),
        ),
    ),
    Row(
        "offset_fetch",
        1,
        lambda name: {
            "group_id": name,
            "topics": [{"name": name, "partition_indexes": (0,)}],
        },
        (
            group(DESCRIBE, "topics.partitions.error_code"),
            topic(DESCRIBE, "topics.partitions.error_code"),
        ),
    ),
    Row(
        "find_coordinator",
        4,
        lambda name: {"key_type": 0, "coordinator_keys": (name,)},
        (group(DESCRIBE, "coordinators.error_code"),),
    ),
    Row(
        "find_coordinator",
        3,
        lambda name: {"key_type": 0, "key": name},
        (group(DESCRIBE, "error_code"),),
    ),
    Row("join_group", 5, joining, (group(READ, "error_code"),)),
    Row("heartbeat", 3, member, (group(READ, "error_code"),)),
    Row(
        "leave_group",
        3,
        lambda name: {"group_id": name, "members": [member(name)]},
        (group(READ, "error_code"),),
    ),
    Row(
        "sync_group",
        3,
        lambda name: {**member(name), "assignments": ()},
        (group(READ, "error_code"),),
    ),
    Row(
        "describe_groups",
        5,
        lambda name: {"groups": (name,), "include_authorized_operations": True},
        (group(DESCRIBE, "groups.error_code"),),
    ),
    *(
        Row(
            "create_topics",
            7,
            lambda name: create_fields(name) | {"validate_only": True},
            (
                creates,
                topic(Operation.DESCRIBE_CONFIGS, "topics.topic_config_error_code"),
            ),
            NEVER,
        )
        for creates in (
            topic(CREATE, "topics.error_code"),
            cluster(CREATE, "topics.error_code", code=TOPIC),
        )
    ),
    *(
        Row(
            "delete_topics",
            6,
            lambda name: {"topics": [{"name": name, "topic_id": None}], "timeout": TIMEOUT},
            (deletes,),
            NEVER,
        )
        for deletes in (
            topic(DELETE, "responses.error_code"),
            cluster(DELETE, "responses.error_code", code=TOPIC),
        )
    ),
    Row(
        "delete_records",
        2,
        lambda name: {"topics": [partitions(name, offset=0)], "timeout": TIMEOUT},
        (topic(DELETE, "topics.partitions.error_code"),),
    ),
    *(
        Row(
            "init_producer_id",
            4,
            lambda _: {"transactional_id": None, "transaction_timeout": TIMEOUT},
            (writes,),
        )
        for writes in (
            cluster(Operation.IDEMPOTENT_WRITE, "error_code"),
            Needed(Operation.WRITE, TOPIC, REFUSALS[CLUSTER], ("error_code",)),
        )
    ),
    *(
        Row(
            "offset_for_leader_epoch",
            4,
            lambda name: {"topics": [partitions(name, "partition", leader_epoch=0)]},
            (describes,),
        )
        for describes in (
            topic(DESCRIBE, "topics.partitions.error_code"),
            cluster(Operation.CLUSTER_ACTION, "topics.partitions.error_code", code=TOPIC),
        )
    ),
    Row("describe_acls", 3, lambda _: selected("User:x"), (cluster(DESCRIBE, "error_code"),)),
    Row(
        "create_acls",
        3,
        lambda _: {"creations": [ADDED_ACL]},
        (cluster(ALTER, "results.error_code"),),
    ),
    Row(
        "delete_acls",
        3,
        lambda _: {"filters": [selected("User:x")]},
        (cluster(ALTER, "filter_results.error_code"),),
    ),
    Row(
        "describe_client_quotas",
        1,
        lambda _: {"components": (), "strict": False},
        (cluster(Operation.DESCRIBE_CONFIGS, "error_code"),),
    ),
    Row(
        "alter_client_quotas",
        1,
        lambda _: altered({"user": "nobody"}, producer_byte_rate=None),
        (cluster(Operation.ALTER_CONFIGS, "entries.error_code"),),
    ),
    Row(
        "describe_user_scram_credentials",
        0,
        lambda _: {"users": None},
        (cluster(DESCRIBE, "error_code"),),
    ),
    Row(
        "alter_user_scram_credentials",
        0,
        lambda _: {"deletions": [{"name": "nobody", "mechanism": 1}], "upsertions": ()},
        (cluster(ALTER, "results.error_code"),),
    ),
    *configs("describe_configs", 4, Operation.DESCRIBE_CONFIGS, "results.error_code"),
    *configs("alter_configs", 2, Operation.ALTER_CONFIGS, "responses.error_code"),
    *configs("incremental_alter_configs", 1, Operation.ALTER_CONFIGS, "responses.error_code"),
    Row(
        "alter_replica_log_dirs",
        2,
        lambda name: {"dirs": [{"path": "/", "topics": [{"name": name, "partitions": (0,)}]}]},
        (cluster(ALTER, "results.partitions.error_code"),),
    ),
    Row("describe_log_dirs", 4, lambda _: {"topics": None}, (cluster(DESCRIBE, "error_code"),)),
    Row(
        "create_partitions",
        3,
        lambda name: {
            "topics": [{"name": name, "count": 9, "assignments": None}],
            "timeout": TIMEOUT,
            "validate_only": True,
        },
        (topic(ALTER, "results.error_code"),),
    ),
    Row(
        "delete_groups",
        2,
        lambda name: {"groups_names": (name,)},
        (group(DELETE, "results.error_code"),),
        NEVER,
    ),
    Row(
        "elect_leaders",
        2,
        lambda name: {
            "election_type": 0,
            "topic_partitions": [{"topic": name, "partitions": (0,)}],
        },
        (cluster(ALTER, "error_code", "replica_election_results.partition_result.error_code"),),
    ),
    Row(
        "alter_partition_reassignments",
        1,
        lambda name: {"topics": [partitions(name, replicas=None)]},
        (cluster(ALTER, "error_code", "responses.partitions.error_code"),),
    ),
    Row(
        "list_partition_reassignments",
        0,
        lambda name: {"topics": [{"name": name, "partition_indexes": (0,)}]},
        (cluster(DESCRIBE, "error_code"),),
    ),
    Row(
        "offset_delete",
        0,
        lambda name: {
            "group_id": name,
            "topics": [{"name": name, "partitions": [{"partition_index": 7}]}],
        },
        (group(DELETE, "error_code"), topic(READ, "topics.partitions.error_code")),
    ),
    Row(
        "describe_quorum",
        2,
        lambda _: {
            "topics": [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
        },
        (cluster(DESCRIBE, "error_code"),),
    ),
    Row(
        "describe_producers",
        0,
        lambda name: {"topics": [{"name": name, "partition_indexes": (0,)}]},
        (topic(READ, "topics.partitions.error_code"),),
    ),
    Row(
        "list_config_resources",
        1,
        lambda _: {"resource_types": ()},
        (cluster(Operation.DESCRIBE_CONFIGS, "error_code"),),
    ),
    Row(
        "describe_topic_partitions",
        0,
        described_fields,
        (topic(DESCRIBE, "topics.error_code"),),
    ),
]
LISTS: Final = {"list_groups": "it leaves out groups instead (test_lists_are_filtered)"}
OPEN: Final = {
    "api_versions": "clients send it before they log in",
    "sasl_handshake": "it is rejected outside a login",
    "sasl_authenticate": "it is rejected outside a login",
    "describe_cluster": "clients need the addresses of the brokers, as in Metadata",
}


# ------------------------------------------------------------------------------ the broker


class World:
    """A broker whose ACLs a test replaces, and an anonymous client."""

    def __init__(self, agent: Agent, root: Path, client: Frames) -> None:
        self.agent = agent
        self._store = LocalStore(root)
        self.client = client

    def allow(self, *acls: Acl) -> None:
        """Allows the client what `acls` say, and nothing else."""
        set_acls(self._store, acls)
        self.agent._access.watch.refresh()

    def id_of(self, name: str) -> Any:
        """Returns the id of a topic in Kafka's messages."""
        return kafka_id(self.agent.parts.led_partitions.topic(name).topic_id)

    def ask(self, api: str, version: int, fields: Any) -> Any:
        return self.client.ask(KEYS[api], version, fields)


@pytest.fixture(name="world", scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """`THERE` and `OTHER` exist; a test sets the ACLs that are enforced."""
    root = tmp_path_factory.mktemp("root")
    set_acls(LocalStore(root), mode=Mode.OFF)
    with broker(root) as agent, frames(agent) as client:
        world = World(agent, root, client)
        world.ask("find_coordinator", 3, {"key_type": 0, "key": THERE})
        for name in (THERE, OTHER):
            create(client, name)
            assert produce(client, name, 0, batch([b"x"])).error_code == 0
            world.ask("offset_commit", 7, commit_fields(THERE, name, 0, 1))
        yield world


def refusals(reply: Any, place: str = "") -> dict[str, ErrorCode]:
    """Returns the authorization errors in a reply, by the field that contains them."""
    found: dict[str, ErrorCode] = {}
    for field in dataclasses.fields(reply):
        value, at = getattr(reply, field.name), f"{place}{field.name}"
        if field.name.endswith("error_code") and ErrorCode(value) in REFUSALS.values():
            found[at] = ErrorCode(value)
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                found |= refusals(each, f"{at}.")
    return found


def granted(needed: Needed, name: str) -> Acl:
    """Returns the ACL that allows one operation on one resource."""
    is_cluster = needed.resource is CLUSTER
    return acl(needed.resource, CLUSTER_NAME if is_cluster else name, needed.operation)


# ------------------------------------------------------------------------------ all requests


def test_the_table_has_every_request() -> None:
    """Promise: a request that is added to the broker also needs a row, or a reason for none."""
    assert {row.api for row in ROWS} | LISTS.keys() | OPEN.keys() == KEYS.keys()


@pytest.mark.parametrize("row", ROWS, ids=[f"{each.api}-{each.version}" for each in ROWS])
def test_a_request_needs_its_acls(world: World, row: Row) -> None:
    """Promise: all ACLs of the row are needed, and suffice, and a refusal hides what exists."""
    world.allow()
    replies = {name: world.ask(row.api, row.version, row.fields(name)) for name in (THERE, NEVER)}
    first = row.needed[0]
    for reply in replies.values():
        assert refusals(reply) == dict.fromkeys(first.places, first.code)
    texts = {repr(reply).replace(name, "NAME") for name, reply in replies.items()}
    assert len(texts) == 1

    request = row.api, row.version, row.fields(row.served_on)
    for missing in row.needed:
        world.allow(*(granted(each, row.served_on) for each in row.needed if each != missing))
        assert refusals(world.ask(*request)) == dict.fromkeys(missing.places, missing.code)
    world.allow(*(granted(each, row.served_on) for each in row.needed))
    assert refusals(world.ask(*request)) == {}


def test_a_refused_topic_does_not_refuse_others(world: World) -> None:
    """Promise: OffsetCommit stores the offsets of the topics that the client may read, only."""
    world.allow(acl(GROUP, THERE, READ), acl(TOPIC, THERE, READ))
    both = [commit_fields(THERE, name, 0, 2) for name in (THERE, OTHER)]
    fields = {**both[0], "topics": [topic for each in both for topic in each["topics"]]}
    committed = world.ask("offset_commit", 7, fields).topics
    assert [each.partitions[0].error_code for each in committed] == [0, REFUSALS[TOPIC]]
    world.allow(acl(GROUP, THERE, READ), *(acl(TOPIC, name, READ) for name in (THERE, OTHER)))
    wanted = {"group_id": THERE, "topics": None}
    (found,) = world.ask("offset_fetch", 8, {"groups": [wanted], "require_stable": False}).groups
    offsets = {each.name: each.partitions[0].committed_offset for each in found.topics}
    assert offsets == {THERE: 2, OTHER: 1}


# ------------------------------------------------------------------------------ lists


def test_lists_are_filtered(world: World) -> None:
    """Promise: a list leaves out the topics and groups that the client may not describe."""

    def listed() -> list[set[str]]:
        all_offsets = {
            "groups": [{"group_id": THERE, "topics": None}],
            "require_stable": False,
        }
        (offsets,) = world.ask("offset_fetch", 8, all_offsets).groups
        described = world.ask("describe_topic_partitions", 0, described_fields())
        return [
            {each.name for each in world.ask("metadata", 12, metadata_fields()).topics},
            {each.name for each in world.ask("metadata", 0, {"topics": ()}).topics},
            {each.name for each in described.topics},
            {each.name for each in offsets.topics},
            {each.group_id for each in world.ask("list_groups", 4, {"states_filter": ()}).groups},
        ]

    group_acl, topic_acl = acl(GROUP, THERE, DESCRIBE), acl(TOPIC, THERE, DESCRIBE)
    world.allow()
    assert listed() == [set()] * 5
    world.allow(group_acl)
    assert listed() == [set()] * 4 + [{THERE}]
    world.allow(group_acl, topic_acl)
    assert listed() == [{THERE}] * 5
    world.allow(acl(CLUSTER, CLUSTER_NAME, DESCRIBE))
    assert THERE in listed()[-1]


def test_a_page_neither_names_nor_counts_hidden_topics(world: World) -> None:
    """Promise: the cursor of DescribeTopicPartitions names only topics that the client may see."""
    world.allow(acl(TOPIC, OTHER, DESCRIBE))
    page = world.ask("describe_topic_partitions", 0, described_fields(limit=1))
    assert ([each.name for each in page.topics], page.next_cursor) == ([OTHER], None)
    all_names = described_fields(NEVER, OTHER, THERE, limit=1)
    page = world.ask("describe_topic_partitions", 0, all_names)
    assert [(each.name, each.error_code, each.topic_id) for each in page.topics] == [
        (OTHER, ErrorCode.none, world.id_of(OTHER)),
        (NEVER, ErrorCode.topic_authorization_failed, None),
        (THERE, ErrorCode.topic_authorization_failed, None),
    ]
    assert page.next_cursor is None


@pytest.mark.parametrize("is_described", [False, True])
def test_authorized_operations_are_those_of_the_acls(world: World, *, is_described: bool) -> None:
    """Promise: the bit fields of KIP-430 are the decisions; on the cluster 0 without DESCRIBE."""
    alter = [acl(CLUSTER, CLUSTER_NAME, Operation.ALTER_CONFIGS)]
    describe = [acl(CLUSTER, CLUSTER_NAME, DESCRIBE)] if is_described else []
    names = [acl(kind, THERE, READ) for kind in (TOPIC, GROUP)]
    world.allow(*alter, *describe, *names)
    fields = {"include_cluster_authorized_operations": True, "endpoint_type": 1}
    on_cluster = bits(DESCRIBE, Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS)
    expected = on_cluster if is_described else 0
    assert world.ask("describe_cluster", 1, fields).cluster_authorized_operations == expected
    everything = {**metadata_fields(name=THERE), "include_cluster_authorized_operations": True}
    metadata = world.ask("metadata", 10, everything)
    assert metadata.cluster_authorized_operations == expected
    groups = {"groups": (THERE,), "include_authorized_operations": True}
    described = world.ask("describe_topic_partitions", 0, described_fields(THERE))
    assert [
        metadata.topics[0].topic_authorized_operations,
        described.topics[0].topic_authorized_operations,
        world.ask("describe_groups", 5, groups).groups[0].authorized_operations,
    ] == [bits(READ, DESCRIBE)] * 3


def bits(*operations: Operation) -> int:
    """The bit field of operations."""
    return sum(1 << each for each in operations)


# ------------------------------------------------------------------------------ topics


def test_ids_of_hidden_topics_are_not_resolved(world: World) -> None:
    """Promise: replies by id do not contain the name of a hidden topic; unknown ids are unknown."""
    topic_id, unknown_id = world.id_of(THERE), kafka_id("0123456789abcdef")

    def replies(wanted: Any) -> list[Any]:
        deleted = {"topics": [{"name": None, "topic_id": wanted}], "timeout": TIMEOUT}
        found = world.ask("metadata", 12, metadata_fields(topic_id=wanted))
        return [*found.topics, *world.ask("delete_topics", 6, deleted).responses]

    def named(wanted: Any) -> list[tuple[ErrorCode, str | None]]:
        return [(each.error_code, each.name) for each in replies(wanted)]

    refused = ErrorCode.topic_authorization_failed
    world.allow()
    assert named(unknown_id) == [(ErrorCode.unknown_topic_id, None)] * 2
    assert named(topic_id) == [(refused, None)] * 2
    assert THERE not in repr(replies(topic_id))
    assert {each.topic_id for each in replies(topic_id)} == {topic_id}
    world.allow(acl(TOPIC, THERE, DESCRIBE))
    assert named(topic_id) == [(ErrorCode.none, THERE), (refused, THERE)]


def test_describe_reveals_that_a_topic_is_missing(world: World) -> None:
    """Promise: DeleteTopics with DESCRIBE alone distinguishes missing topics, as in Kafka."""
    world.allow(*(acl(TOPIC, name, DESCRIBE) for name in (THERE, NEVER)))
    topics = [{"name": name, "topic_id": None} for name in (THERE, NEVER, "hides")]
    replies = world.ask("delete_topics", 6, {"topics": topics, "timeout": TIMEOUT}).responses
    assert [each.error_code for each in replies] == [
        ErrorCode.topic_authorization_failed,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.topic_authorization_failed,
    ]


@pytest.mark.parametrize(
    ("creator", "name"), [(acl(TOPIC, "made1", CREATE), "made1"), (None, "made2")]
)
def test_metadata_creates_topics_only_with_create(
    world: World, creator: Acl | None, name: str
) -> None:
    """Promise: auto-creation needs DESCRIBE, and CREATE on the topic or the cluster."""
    creates = metadata_fields(name=name, creates=True)
    for allowed in ([], [acl(TOPIC, name, DESCRIBE)], [acl(CLUSTER, CLUSTER_NAME, CREATE)]):
        world.allow(*allowed)
        (found,) = world.ask("metadata", 12, creates).topics
        assert (found.error_code, found.topic_id) == (ErrorCode.topic_authorization_failed, None)
        assert not world.agent.parts.led_partitions.has_topic(name)
    world.allow(acl(TOPIC, name, DESCRIBE), creator or acl(CLUSTER, CLUSTER_NAME, CREATE))
    (found,) = world.ask("metadata", 12, creates).topics
    assert (found.error_code, found.name) == (ErrorCode.none, name)


def test_the_configuration_of_a_new_topic_needs_describe_configs(world: World) -> None:
    """Promise: without DESCRIBE_CONFIGS, CreateTopics returns no configuration and no counts."""
    fields = create_fields("new", 3) | {"validate_only": True}
    world.allow(acl(TOPIC, "new", CREATE))
    (found,) = world.ask("create_topics", 7, fields).topics
    assert (found.error_code, found.num_partitions, found.configs) == (ErrorCode.none, -1, ())
    world.allow(acl(TOPIC, "new", CREATE), acl(TOPIC, "new", Operation.DESCRIBE_CONFIGS))
    (found,) = world.ask("create_topics", 7, fields).topics
    assert (found.error_code, found.num_partitions) == (ErrorCode.none, 3)
    assert found.configs


# ------------------------------------------------------------------------------ without ACLs


@pytest.mark.parametrize("resource_type", [ANY, TOPIC, 77])
def test_access_control_is_disabled(tmp_path: Path, resource_type: int) -> None:
    """DescribeAcls replies SECURITY_DISABLED: MirrorMaker then continues without ACLs."""
    fields = selected("User:x") | {"resource_type_filter": resource_type}
    with broker(tmp_path / "root") as agent, frames(agent) as client:
        for version in (1, 2, 3):
            answer = client.ask(KEYS["describe_acls"], version, fields)
            assert answer.error_code is ErrorCode.security_disabled
            assert answer.error_message.startswith("ACLs are off")
            assert answer.resources == ()
