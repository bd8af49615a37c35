"""Requests that name or configure a topic wrongly."""

from __future__ import annotations

from typing import Any

from sparklog.errors.base import Invalid


class UnknownTopic(Invalid):
    """The topic does not exist: create it, or correct its name; `hint` names a similar one."""

    code = "unknown_topic"
    needs_proof = True
    template = "Topic {topic!r} does not exist. Create it, or correct the name.{hint}"
    topic: str
    hint: str = ""


class TopicExists(Invalid):
    """A topic of that name exists: use it, or choose another name."""

    code = "topic_exists"
    needs_proof = True  # another broker may have deleted it
    template = "Topic {topic!r} already exists. Use it, or choose another name."
    topic: str


class TopicChanged(Invalid):
    """The topic was deleted and re-created, so its offsets refer to other records: start over."""

    code = "topic_changed"
    needs_proof = True
    template = (
        "Topic {topic!r} was deleted and created again: its id was {expected} and is now {found}."
        " Start from its beginning or its end."
    )
    topic: str
    expected: str | None
    found: str | None


class TopicGone(Invalid):
    """The topic of a query no longer exists, or is no longer selected.

    `at`: the query's offsets by partition.
    """

    code = "topic_gone"
    template = (
        "Topic {topic!r} {reason}. The query had read it up to offsets {at}; set"
        " failOnDataLoss=false to continue without these records."
    )
    topic: str
    reason: str
    at: Any


class BadTopicName(Invalid):
    """The topic name breaks Kafka's rules: choose another."""

    code = "bad_topic_name"
    template = (
        "The topic name {topic!r} is invalid: use 1–249 characters of letters, digits, '.', '_' and"
        " '-', and not '.' or '..' alone."
    )
    topic: str | float | None


class InternalTopic(Invalid):
    """Clients may not change the brokers' own topics: use another topic."""

    code = "internal_topic"
    template = "Topic {topic!r} is internal: clients cannot {what} it. Use another topic."
    topic: str
    what: str


class TopicIsMirror(Invalid):
    """A mirror accepts only the records of its source: write to the source, or end the mirror."""

    code = "topic_is_mirror"
    template = (
        "Topic {topic!r} is a mirror of {source}, and accepts only its source's records, with their"
        " offsets. Write to the source; or end the mirror by removing the topic's configuration"
        " mirror.source."
    )
    topic: str
    source: str


class NotAMirror(Invalid):
    """Only a mirror accepts records with their offsets: let the broker assign offsets."""

    code = "not_a_mirror"
    template = (
        "Topic {topic!r} is not a mirror, so the broker assigns the offsets of its records. Write"
        " without offsets=keep; or set mirror.source in its configuration, while it is empty."
    )
    topic: str


class BadPartitionCount(Invalid):
    """The topic cannot have that many partitions: choose another number."""

    code = "bad_partition_count"
    template = "Topic {topic!r} cannot have {requested} partitions: {reason}."
    topic: str
    requested: int
    reason: str


class UnknownPartition(Invalid):
    """The topic has no such partition: use one that exists."""

    code = "unknown_partition"
    needs_proof = True
    template = "Topic {topic!r} has no partition {partition}: its partitions are 0 to {last}."
    topic: str
    partition: int
    last: int


class BadReplicationFactor(Invalid):
    """The topic cannot have that replication factor: choose another."""

    code = "bad_replication_factor"
    template = "Topic {topic!r} cannot have a replication factor of {requested}: {reason}."
    topic: str
    requested: int
    reason: str


class BadAssignment(Invalid):
    """The brokers named for a topic's partitions are wrong: correct the assignment."""

    code = "bad_assignment"
    template = "The partition assignment of topic {topic!r} is invalid: {reason}."
    topic: str
    reason: str


class PolicyViolation(Invalid):
    """The topic's configuration forbids the request: change one of them."""

    code = "policy_violation"
    template = "Topic {topic!r} does not allow this: {reason}."
    topic: str
    reason: str
