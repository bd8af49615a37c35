"""Processes that a newer one has replaced."""

from __future__ import annotations

from sparklog.errors.base import Fenced


class BrokerFenced(Fenced):
    """A newer broker has taken over: stop this one. `successor` describes it, if known."""

    code = "broker_fenced"
    template = "Broker {broker} (epoch {epoch}) was replaced by {successor}, and stops."
    broker: int
    epoch: int
    successor: str = "a newer broker"


class PublisherFenced(Fenced):
    """A newer broker publishes the table: stop."""

    code = "publisher_fenced"
    template = (
        "The table of {topic}-{partition} ends at offset {found}, beyond {end}: a newer broker"
        " writes it, and this one stops."
    )
    topic: str
    partition: int
    found: int
    end: int


class ProducerFenced(Fenced):
    """A newer instance of the producer has taken over: stop this one."""

    code = "producer_fenced"
    needs_proof = True
    template = (
        "Epoch {epoch} of producer {producer_id} was replaced by epoch {current}. Stop this"
        " producer."
    )
    epoch: int
    producer_id: int
    current: int


class MemberFenced(Fenced):
    """The group has removed this member, or another process has replaced it: join again."""

    code = "member_fenced"
    needs_proof = True
    template = "Group {group!r} no longer has member {member_id!r} ({error}). Join again."
    group: str
    member_id: str
    error: str
