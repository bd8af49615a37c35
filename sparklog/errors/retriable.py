"""Requests that had no effect and may succeed later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sparklog.errors.base import Retriable

_ADVICE_WHEN_FULL: Final = {
    "space": "Free some space, or shorten the retention of topics",
    "inode": "Delete files or empty folders, or move the root to a file system with more inodes",
    "quota": (
        "Raise the quota of the broker's user, group or project, for bytes and for files, or free"
        " some of what it counts"
    ),
}
"""The remedy for each resource that a file system can run out of."""


class NotLeader(Retriable):
    """This broker does not lead the partition: send the request to the leader."""

    code = "not_leader"
    template = (
        "This broker does not lead {topic}-{partition}; send the request to the leader, broker"
        " {leader}."
    )
    topic: str
    partition: int
    leader: int


class LeadersChanged(Retriable):
    """A leadership change was based on outdated metadata: decide again based on the newest."""

    code = "leaders_changed"
    template = "The leaders were not changed: {reason}. Decide again based on the newest metadata."
    reason: str


class NotCoordinator(Retriable):
    """Another broker coordinates the group: find it with `groups.find`."""

    code = "not_coordinator"
    template = "This broker does not coordinate group {group!r}; ask which broker does."
    group: str


class MetadataChanged(Retriable):
    """A broker answered from metadata that has since changed: send the request again."""

    code = "metadata_changed"
    template = "Another broker has since changed topics or leaders; send the request again."


class RegistryUnavailable(Retriable):
    """The schema registry gives no answer that can be used: the broker asks again."""

    code = "registry_unavailable"
    template = "The schema registry {url} gives no answer that can be used: {reason}."
    url: str
    reason: str


class SchemasAwaited(Retriable):
    """Records have ids of schemas that are not known yet: their files are written a bit later."""

    code = "schemas_awaited"
    template = "The schemas {ids} are not known yet; the records are written to the table soon."
    ids: list[int]


class ColumnsChanged(Retriable):
    """Files were written for typed columns that the table no longer has: write them again."""

    code = "columns_changed"
    template = (
        "Another program has restored the table of topic {topic} to a version with other typed"
        " columns. Files for it are written again."
    )
    topic: str


class StorageUnavailable(Retriable):
    """The object store refused an operation: try again when the store answers."""

    code = "storage_unavailable"
    template = (
        "The store refused {operation} of {path}: {reason}. Try again, and check the store if it"
        " keeps failing."
    )
    operation: str
    path: str
    reason: str


class StorageFull(Retriable):
    """The root's disk has no space, inode or quota (`missing`) left for records: free some."""

    code = "storage_full"
    template = (
        "No {missing} is left for records under {root}: {free_bytes} bytes are free, and"
        " {reserve_bytes} are kept in reserve. {advice}."
    )
    root: str
    free_bytes: int
    reserve_bytes: int
    missing: str = "space"
    advice: str = ""
    """By default, the remedy for the missing resource."""

    if not TYPE_CHECKING:

        def __init__(self, *, missing: str = "space", advice: str = "", **facts: Any) -> None:
            advice = advice or _ADVICE_WHEN_FULL[missing]
            super().__init__(missing=missing, advice=advice, **facts)


class EarlierBatchMissing(Retriable):
    """An earlier batch was rejected before the broker served the partition: send both again."""

    code = "earlier_batch_missing"
    template = (
        "A batch of producer {producer_id} reached {topic}-{partition} before an earlier one, which"
        " was refused before this broker served the partition. Send both again, in order."
    )
    producer_id: int
    topic: str
    partition: int


class QueueFull(Retriable):
    """A broker queue is full: send more slowly, or raise the setting."""

    code = "queue_full"
    template = (
        "The broker accepts no more for now: {queue} is full ({bytes} bytes). Send more slowly, or"
        " raise {setting}."
    )
    queue: str
    bytes: int
    setting: str


class TooManyStreams(Retriable):
    """All clients together have as many streams open as the broker allows: close some."""

    code = "too_many_streams"
    template = (
        "The broker refuses a stream: {open} {what} are open across all clients. Close"
        " some, try again, or raise {setting}."
    )
    open: int
    what: str
    setting: str


class TopicHeldBack(Retriable):
    """The broker cannot write the topic's table, and accepts no more records: repair the table."""

    code = "topic_held_back"
    template = (
        "Topic {topic!r} is held back and accepts no records, because its table cannot be written:"
        " {reason}. Repair the table; the broker then continues on its own."
    )
    topic: str
    reason: str


class BrokerUnavailable(Retriable):
    """No broker answers at the address: start one, or correct the address."""

    code = "broker_unavailable"
    template = "No broker answers at {address}: {reason}."
    address: str
    reason: str


class BrokerClosing(Retriable):
    """The broker is shutting down: connect again."""

    code = "broker_closing"
    template = "Broker {broker} is stopping. Connect again."
    broker: int


class TimedOut(Retriable):
    """An operation took longer than its timeout: try again, or allow more time."""

    code = "timed_out"
    template = (
        "Timed out: {what} did not finish within {timeout_seconds} s. Try again, or allow more"
        " time."
    )
    what: str
    timeout_seconds: float


class DamagedBatch(Retriable):
    """A record batch was damaged in transit, as its checksum or structure shows: send it again."""

    code = "damaged_batch"
    template = "A record batch arrived damaged: {reason}. Send it again."
    reason: str


class GroupBusy(Retriable):
    """The group's coordinator is not ready, or the group is rebalancing: try again."""

    code = "group_busy"
    template = "Group {group!r} is busy ({error}). Try again."
    group: str
    error: str


class UnknownLeaderEpoch(Retriable):
    """The client's leader epoch is newer than the broker's: try again."""

    code = "unknown_leader_epoch"
    template = (
        "Leader epoch {found} of {topic}-{partition} is newer than the broker's, {current}. Try"
        " again."
    )
    found: int
    topic: str
    partition: int
    current: int


class FencedLeaderEpoch(Retriable):
    """The client's leader epoch is outdated: refresh the metadata and try again."""

    code = "fenced_leader_epoch"
    template = (
        "Leader epoch {found} of {topic}-{partition} is outdated: it is now {current}. Refresh the"
        " metadata and try again."
    )
    found: int
    topic: str
    partition: int
    current: int


class SecurityNotRead(Retriable):
    """A broker refuses logins, and requests while ACLs are enforced, because it cannot read the
    users and ACLs: try again, or another broker."""

    code = "security_not_read"
    template = (
        "Clients are refused: security/ in the root was last read {seconds} s ago. Make it readable"
        " for the broker again."
    )
    seconds: int


class TokenKeysNotRead(Retriable):
    """A broker cannot verify OAuth tokens, because it does not have the keys of their issuer: try
    again, or log in by another method."""

    code = "token_keys_not_read"
    template = "OAuth tokens cannot be verified: {reason}."
    reason: str


class MutationQuotaExceeded(Retriable):
    """The client has created or deleted as many partitions as its quota allows: try again later."""

    code = "mutation_quota_exceeded"
    template = (
        "The quota of this client for the creation and deletion of partitions is exceeded: try"
        " again in {throttle_ms} ms, or raise its controller_mutation_rate."
    )
    throttle_ms: int
