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
"""The remedy for each resource that a file system may lack."""


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
    """Leaders were to be changed as decided on older metadata: decide again on the newest."""

    code = "leaders_changed"
    template = "The leaders were not changed: {reason}. Decide again on the newest metadata."
    reason: str


class NotCoordinator(Retriable):
    """Another broker coordinates the group: ask for it by `groups.find`."""

    code = "not_coordinator"
    template = "This broker does not coordinate group {group!r}; ask which broker does."
    group: str


class MetadataChanged(Retriable):
    """A request was answered by what a broker knew before another broker changed the metadata."""

    code = "metadata_changed"
    template = "Another broker has changed topics or leaders meanwhile; send the request again."


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
    """The remedy for the missing resource, unless given."""

    if not TYPE_CHECKING:

        def __init__(self, *, missing: str = "space", advice: str = "", **facts: Any) -> None:
            advice = advice or _ADVICE_WHEN_FULL[missing]
            super().__init__(missing=missing, advice=advice, **facts)


class EarlierBatchMissing(Retriable):
    """An earlier batch was refused before the broker served the partition: send both again."""

    code = "earlier_batch_missing"
    template = (
        "A batch of producer {producer_id} came to {topic}-{partition} before an earlier one, which"
        " was refused before this broker served the partition. Send both again, in order."
    )
    producer_id: int
    topic: str
    partition: int


class QueueFull(Retriable):
    """A queue of the broker is full: send more slowly, or raise the setting."""

    code = "queue_full"
    template = (
        "The broker takes no more for now: {queue} is full ({bytes} bytes). Send more slowly, or"
        " raise {setting}."
    )
    queue: str
    bytes: int
    setting: str


class TooManyStreams(Retriable):
    """All clients together have as many streams open as the broker takes: close some."""

    code = "too_many_streams"
    template = (
        "The broker refuses a stream: {open} {what} are open, of all clients together. Close"
        " some, try again, or raise {setting}."
    )
    open: int
    what: str
    setting: str


class TopicHeldBack(Retriable):
    """The broker cannot write the topic's table, and takes no more records: mend the table."""

    code = "topic_held_back"
    template = (
        "Topic {topic!r} is held back and takes no records, because its table cannot be written:"
        " {reason}. Mend the table; the broker then continues by itself."
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
    """A record batch was damaged on its way, by its checksum and its structure: send it again."""

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
    """The client's leader epoch is over: refresh the metadata and try again."""

    code = "fenced_leader_epoch"
    template = (
        "Leader epoch {found} of {topic}-{partition} is over: it is now {current}. Refresh the"
        " metadata and try again."
    )
    found: int
    topic: str
    partition: int
    current: int
