"""View of a log through a broker, over Flight, for hosts without access to the root."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa

from sparklog import errors, limits
from sparklog.client.connection import Connection
from sparklog.client.consumer.reading import read_range
from sparklog.client.credentials import ClientCredentials
from sparklog.client.offsets import describe, offsets_for_times
from sparklog.client.schemas import BrokerSchemas
from sparklog.formats import flight_messages, group_messages
from sparklog.security.credentials import Security, TlsMaterial, TokenSource
from sparklog.sources.options import LogLocation
from sparklog.sources.task_credentials import TaskCredentials
from sparklog.sources.views import Choose, Committed, GroupOffsets, TopicView
from sparklog.storage.snapshot import ReadSource, RowGroup, Slice


@functools.lru_cache(maxsize=4)
def _driver_connection(bootstrap: str, security: Security | None) -> Connection:
    return Connection.to(bootstrap, credentials=ClientCredentials(security))


@functools.lru_cache(maxsize=4)
def _task_connection(bootstrap: str) -> tuple[Connection, _SentCredentials]:
    credentials = _SentCredentials()
    return Connection.to(bootstrap, credentials=credentials), credentials


def connection(location: LogLocation) -> Connection:
    """Returns the process's connection to the broker of a location."""
    assert location.bootstrap is not None
    if location.task_credentials is None:
        return _driver_connection(location.bootstrap, location.security)
    found, credentials = _task_connection(location.bootstrap)
    credentials.sent = location.task_credentials  # the newest: this process may run tasks for days
    return found


class _SentCredentials:
    """See `Credentials`: those that the driver has sent with a task."""

    def __init__(self) -> None:
        self.sent = TaskCredentials(ca=None, authorization="")

    def tls(self) -> TlsMaterial:
        own = Security.from_environment().tls()
        return own if self.sent.ca is None else own._replace(ca=self.sent.ca)

    def token_source(self, _address: str) -> TokenSource | None:
        return (lambda: self.sent.authorization) if self.sent.authorization else None

    def new_token_source(self, _address: str) -> TokenSource | None:
        """Raises `NotAuthenticated`: only the driver can log in."""
        if not self.sent.authorization:
            return None
        reason = (
            "the token that the driver sent with this task is valid for a day, and ends with its"
            " user, or with the driver's own token; load the DataFrame again, or start the query"
            " again"
        )
        raise errors.NotAuthenticated(reason=reason)

    def after_fork(self) -> None:
        """Does nothing: there are no locks."""


def task_credentials_for(location: LogLocation, topics: Collection[str]) -> TaskCredentials | None:
    """Returns the credentials of tasks that read topics; None if their own environment suffices.

    Raises what a request to a broker raises.
    """
    assert location.bootstrap is not None
    security = location.security or Security.from_environment()
    if not security.logs_in:
        ca = security.tls().ca
        return TaskCredentials(ca=ca, authorization="") if ca is not None else None
    # A token has to fit into a header: with many topics, it is for all that the user may read.
    is_short = sum(map(len, topics)) <= limits.TOKEN_TOPIC_CHARACTERS
    issued: flight_messages.IssuedToken = connection(location).action(
        "tokens.new",
        flight_messages.NewToken(topics=sorted(topics) if is_short else None),
    )
    return TaskCredentials(ca=security.tls().ca, authorization=issued.authorization)


def read(location: LogLocation, piece: Slice, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a slice, in order.

    Args:
        columns: of `ROW_SCHEMA`, with `offset`.

    Raises `TopicChanged`, `UnknownTopic`, `OffsetOutOfRange`, and `Retriable` once retries are
    exhausted.
    """
    channel = connection(location)
    info = describe(channel, piece.topic)
    info.check_id(piece.topic_id)
    return read_range(
        channel, info, piece.partition, start=piece.first, end=piece.end, columns=columns
    )


@functools.lru_cache(maxsize=16)
def schemas_of(location: LogLocation, topic: str) -> BrokerSchemas:
    """Returns the schemas of the values of a topic."""
    return BrokerSchemas(connection(location), topic)


class BrokerView:
    """View of a log that queries a broker."""

    poll_interval_seconds = limits.POLL_INTERVAL_REMOTE_SECONDS

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._infos: Mapping[str, flight_messages.TopicInfo] = {}

    def names(self) -> Collection[str]:
        listed: flight_messages.TopicNames = self._connection.action("topics.list")
        return listed.topics

    def refresh(self, choose: Choose, *, from_scratch: bool) -> Mapping[str, TopicView]:
        del from_scratch  # nothing is cached
        self._infos = {name: describe(self._connection, name) for name in choose(self.names())}
        return {
            name: TopicView(
                info.topic_id,
                tuple(each.start for each in info.partitions),
                tuple(each.published for each in info.partitions),
                tuple(each.end for each in info.partitions),
                tuple(each.start if info.is_mirror else 0 for each in info.partitions),
                typed=info.plan,
            )
            for name, info in self._infos.items()
        }

    def slices(self, topic: str, partition: int, first: int, end: int) -> list[Slice]:
        return [
            Slice(
                topic=topic,
                topic_id=self._infos[topic].topic_id,
                partition=partition,
                first=first,
                end=end,
                source=ReadSource.BROKER,
            )
        ]

    def row_groups(self, slices: Sequence[Slice]) -> Sequence[Sequence[RowGroup]]:
        return [() for _ in slices]  # the broker reads the files

    def first_since(self, topic: str, partition: int, timestamp_us: int) -> int | None:
        found = offsets_for_times(self._connection, topic, {partition: timestamp_us})
        return None if found[partition] < 0 else found[partition]

    def committed(self, group: str) -> GroupOffsets | None:
        name = group_messages.GroupName(group=group)
        try:
            self._connection.action("groups.describe", name)
        except errors.GroupRefused:
            return None
        # The broker returns offsets of existing topics only. A topic that was recreated since the
        # last refresh is taken for the one seen then.
        found: group_messages.GroupOffsets = self._connection.action("groups.offsets", name)
        return {
            (each.topic, each.partition): Committed(self._infos[each.topic].topic_id, each.offset)
            for each in found.offsets
            if each.topic in self._infos
        }
