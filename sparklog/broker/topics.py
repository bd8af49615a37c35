"""Topic administration: creation, partitions, configuration, compaction and deletion.

A topic is a table and an entry in the root's metadata, and exists as long as the entry does: its
table is created before the entry, and emptied after the entry is removed. A table without an entry
is left over from an interrupted creation or deletion. It names the broker that created it, and the
epoch. As long as that broker lives, no other broker empties the table, because it may still be
creating the topic.

If the outcome of a metadata change is unknown, the topic is in doubt until `settle_doubts`, or the
next call that names it, finds out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import structlog

from sparklog import errors, limits
from sparklog.broker import described
from sparklog.broker.backoff import run_each
from sparklog.broker.config_changes import ConfigChanges
from sparklog.broker.described import ConfigEntry
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.parts import LogParts
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.log.topic import Topic
from sparklog.broker.topic_checks import (
    INTERNAL_TOPICS,
    RESERVED_TOPICS,
    check_current,
    check_not_internal,
    check_not_reserved,
    check_typed,
    entry_of,
    log_change,
)
from sparklog.clock import Clock
from sparklog.formats import consumer_offsets, topic_config
from sparklog.formats.config_rules import Edit
from sparklog.formats.flight_messages import (
    AddPartitions,
    AlterTopic,
    CreateTopic,
    PartitionInfo,
    TopicInfo,
    columns_info,
    formats_of,
)
from sparklog.formats.schema_messages import SchemasReply, TopicSchemas
from sparklog.formats.topic_names import check_topic_name
from sparklog.settings import BrokerSettings
from sparklog.storage import schema_texts
from sparklog.storage.maintenance import file_compaction, key_compaction, retention
from sparklog.storage.metadata import placement
from sparklog.storage.metadata.leadership import is_open
from sparklog.storage.metadata.model import ClusterMetadata, TopicMetadata
from sparklog.storage.metadata.placement import Loads
from sparklog.storage.metadata.processes import Fate, fate_of
from sparklog.storage.objects import Store
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table.changes import (
    Decide,
    TableChange,
    create_change,
    delete_change,
    describe_change,
)
from sparklog.storage.table.names import table_folder
from sparklog.storage.table.together import commit_all
from sparklog.storage.table.topic_table import OpenTable, TopicTable

_log = structlog.get_logger("sparklog.topics")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDefaults:
    """Settings for new topics."""

    auto_create: bool = False
    partitions: int = 4
    refuse_replication: bool = False


class _NewTopic:
    """A topic to be created."""

    def __init__(self, request: CreateTopic, count: int, config: Mapping[str, str]) -> None:
        self.request = request
        self.name = request.topic
        self.topic_id = secrets.token_hex(8)
        self.count = count
        self.config = config


class TopicAdmin:
    """Creates, changes, describes and deletes topics."""

    def __init__(
        self,
        store: Store,
        metadata: LeaderMetadata,
        log: LogParts,
        *,
        open_table: OpenTable,
        leadership: Leadership,
        clock: Clock,
        defaults: TopicDefaults,
        settings: BrokerSettings,
        should_stop: Callable[[], bool],
    ) -> None:
        """Administers topics as the broker of `leadership`; its writer limits record sizes."""
        self._store = store
        self._metadata = metadata
        self._led_partitions = log.led_partitions
        self._publisher = log.publisher
        self._open_table = open_table
        self._broker_id = leadership.broker
        self._is_member = leadership.is_member
        self._creator = leadership.broker, leadership.epoch
        self._writer = log.writer
        self._clock = clock
        self._defaults = defaults
        self._settings = settings
        self._should_stop = should_stop
        self.config_changes = ConfigChanges(metadata, log.led_partitions, log.writer)
        self._in_doubt: set[str] = set()
        """Names of topics whose creation or deletion may or may not have taken effect."""
        self._created: dict[str, str] = {}
        """Names of the topics created in this epoch, by id: see `_created_and_gone`."""

    # -------------------------------------------------------------------------- describing

    def names(self) -> list[str]:
        """Returns the names of all topics, sorted."""
        return sorted(topic.name for topic in self._led_partitions.topics())

    def exists(self, name: str) -> bool:
        """Returns true if there is a topic with that name."""
        return self._led_partitions.has_topic(name)

    def describe(self, name: str) -> TopicInfo:
        """Returns a topic's partitions, configuration and table. Raises `UnknownTopic`.

        Offsets of partitions that other brokers lead are -1.
        """
        topic = self._led_partitions.topic(name)
        snapshot = topic.table.snapshot
        files = [file for files in snapshot.files for file in files]
        topic_bytes = topic.max_message_bytes
        return TopicInfo(
            topic=topic.name,
            topic_id=topic.topic_id,
            config=dict(topic.config),
            partitions=[_described(topic, number) for number in range(topic.count)],
            table_uri=f"{self._store.uri}/{table_folder(topic.name)}",
            table_version=snapshot.version,
            table_files=len(files),
            table_bytes=sum(file.size_bytes for file in files),
            columns=columns_info(snapshot.columns),
            misfits=snapshot.misfits,
            unfilled_rows=snapshot.unfilled_rows,
            formats=formats_of(snapshot.columns),
            waiting_rows=snapshot.waiting_rows,
            max_record_bytes=(
                self._writer.max_record_bytes
                if topic_bytes is None
                else min(self._writer.max_record_bytes, topic_bytes)
            ),
            publish_interval_seconds=topic.publish_interval_seconds(
                self._settings.publish_interval_seconds_on(local=self._store.is_local)
            ),
        )

    def schemas(self, request: TopicSchemas) -> SchemasReply:
        """Returns schemas that values of a topic refer to; those that the root does not have are
        omitted.

        Raises `UnknownTopic`, `BadRequest` and the store's errors.
        """
        self._led_partitions.topic(request.topic)
        if len(request.ids) > limits.SCHEMAS_AT_ONCE:
            raise errors.BadRequest(reason=f"at most {limits.SCHEMAS_AT_ONCE} schemas at once")
        return SchemasReply(texts=schema_texts.of(self._store).stored(request.ids))

    def configs(self, name: str) -> list[ConfigEntry]:
        """Returns every configuration key of a topic. Raises `UnknownTopic`."""
        return described.topic_entries(self._led_partitions.topic(name).config, self._settings)

    def configs_of_new(self, config: Mapping[str, str]) -> list[ConfigEntry]:
        """Returns every configuration key of a topic created with `config`."""
        return described.topic_entries(config, self._settings)

    # -------------------------------------------------------------------------- creating

    @property
    def creates_on_request(self) -> bool:
        """True if a topic is created when a Kafka client asks for its metadata."""
        return self._defaults.auto_create

    def create_on_request(self, name: str, *, client: str = "") -> None:
        """Creates a topic that a Kafka client asked for; `client` identifies the client in the log.

        Raises `UnknownTopic` if `topics.auto_create` is off, or the topic was just deleted: clients
        that have used it ask for it once more. Raises what `create` raises.
        """
        is_possible = self._defaults.auto_create and name not in RESERVED_TOPICS - INTERNAL_TOPICS
        if not is_possible or self._led_partitions.was_just_removed(name):
            raise errors.UnknownTopic(topic=name)
        if name in INTERNAL_TOPICS:
            self.ensure_offsets_topic()
            return
        with suppress(errors.TopicExists):
            self._create(
                CreateTopic(topic=name),
                client=client,
                event="created a topic that a client asked for (topics.auto_create)",
            )

    def ensure_offsets_topic(self) -> None:
        """Creates `__consumer_offsets` if it is missing, and makes it compacted.

        Raises what `create` and `ConfigChanges.edit` raise.
        """
        name, config = consumer_offsets.TOPIC, {"cleanup.policy": "compact"}
        if not self.exists(name):
            self._create(
                CreateTopic(
                    topic=name, partitions=limits.OFFSETS_PARTITIONS, config=config, if_absent=True
                )
            )
        elif not self._led_partitions.topic(name).is_compacted:
            # A client has created it: an earlier version allowed that.
            edits = [(Edit.SET, key, value) for key, value in config.items()]
            self.config_changes.edit(name, edits, only_checks=False)

    def create(self, request: CreateTopic, *, client: str = "") -> TopicInfo:
        """Creates a topic and returns its description; `client` identifies the caller in the log.

        Raises `BadTopicName`, `TopicExists`, `BadPartitionCount`, `UnknownOption`, `BadOption`,
        `InternalTopic`; `OutcomeUnknown` if it may exist; the next call that names it, or the
        janitor, finds out.
        """
        check_not_reserved(request.topic)
        return self._create(request, client=client)

    def create_all(
        self, requests: Sequence[CreateTopic], *, client: str = ""
    ) -> list[TopicInfo | errors.SparklogError]:
        """Creates topics with different names, many per metadata change; see `create`.

        Returns each topic's description, or the error that `create` would have raised.
        """
        found: dict[str, TopicInfo | errors.SparklogError] = {}
        wanted: list[_NewTopic] = []
        for request in requests:
            try:
                check_not_reserved(request.topic)
                count, config = self._checked(request)
            except errors.SparklogError as error:
                found[request.topic] = error
            else:
                wanted.append(_NewTopic(request, count, config))
        for first in range(0, len(wanted), limits.TOPICS_CREATED_TOGETHER):
            some = wanted[first : first + limits.TOPICS_CREATED_TOGETHER]
            try:
                with self._metadata.changing(f"creation of {len(some)} topics"):
                    created = self._create_some(some, found)
            except errors.SparklogError as error:
                found.update((each.name, error) for each in some if each.name not in found)
            else:
                for each in created:
                    log_change("created a topic", each.name, client, partitions=each.count)
        return [
            self.describe(each.topic) if each.topic not in found else found[each.topic]
            for each in requests
        ]

    def _create_some(
        self, wanted: Sequence[_NewTopic], found: dict[str, TopicInfo | errors.SparklogError]
    ) -> list[_NewTopic]:
        """Creates and returns the topics, except those whose answers it adds to `found`."""
        tables: list[tuple[_NewTopic, TopicTable]] = []
        for each in wanted:
            try:
                self._settle_doubt(each.name)
                if not self.exists(each.name):
                    tables.append((each, self._open_table(each.name)))
                    tables[-1][1].commit(self._clear)
                elif each.request.if_absent:
                    found[each.name] = self.describe(each.name)
                else:
                    raise errors.TopicExists(topic=each.name)
            except errors.SparklogError as error:
                found[each.name] = error
        tables = [(each, table) for each, table in tables if each.name not in found]
        self._metadata.reload()  # after the snapshots: see `_create_table`
        commits = [(table, self._creation(each, table)) for each, table in tables]
        outcomes = commit_all(self._store, commits, clock=self._clock)
        created: dict[str, tuple[_NewTopic, TopicTable]] = {}
        for (each, table), outcome in zip(tables, outcomes, strict=True):
            if isinstance(outcome, errors.SparklogError):
                found[each.name] = outcome
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                created[each.name] = each, table
        if not created:
            return []
        named = self._name([each for each, _ in created.values()])
        for name, (_, table) in created.items():
            self._serve(name, named, table)
        return [each for each, _ in created.values()]

    def _creation(self, new: _NewTopic, table: TopicTable) -> Decide:
        """Returns the change that creates the topic on the current version of its table.

        If another writer commits first, leadership is checked again.
        """
        checked_version = table.snapshot.version

        def create(before: TableSnapshot) -> TableChange:
            if before.version != checked_version:
                self._metadata.reload()
            if before.topic_id is not None:
                raise errors.TopicExists(topic=new.name)
            return create_change(new.topic_id, new.count, new.config, creator=self._creator)

        return create

    def check_new(self, request: CreateTopic) -> tuple[int, dict[str, str]]:
        """Returns the partition count and configuration the topic would get; creates nothing.

        Raises what `create` would.
        """
        check_not_reserved(request.topic)
        count, config = self._checked(request)
        if self.exists(request.topic):
            raise errors.TopicExists(topic=request.topic)
        return count, config

    def check_replication(self, topic: str, factor: int) -> None:
        """Raises `BadReplicationFactor`. Any other is accepted: the root's storage replicates."""
        reason = ""
        if factor == 0 or factor < -1:
            reason = "it must be at least 1, or -1 for the default"
        elif factor > 1 and self._defaults.refuse_replication:
            reason = "a partition has one replica (setting topics.refuse_replication)"
        if reason:
            raise errors.BadReplicationFactor(topic=topic, requested=factor, reason=reason)

    def _create(
        self, request: CreateTopic, *, client: str = "", event: str = "created a topic"
    ) -> TopicInfo:
        name = request.topic
        count, config = self._checked(request)
        with self._metadata.changing(f"creation of topic {name}"):
            self._settle_doubt(name)
            if self.exists(name):
                if request.if_absent:
                    return self.describe(name)
                raise errors.TopicExists(topic=name)
            new = _NewTopic(request, count, config)
            try:
                table = self._create_table(new)
            except errors.TopicExists:
                if not request.if_absent:
                    raise
                # Another broker is creating it right now, or has just done so.
                self._metadata.follow()
                if not self.exists(name):
                    raise errors.MetadataChanged from None
                return self.describe(name)
            self._serve(name, self._name([new]), table)
        log_change(event, name, client, partitions=count)
        return self.describe(name)

    def _checked(self, request: CreateTopic) -> tuple[int, dict[str, str]]:
        """Returns the partition count and the configuration that a request asks for."""
        name = check_topic_name(request.topic)
        count = self._defaults.partitions if request.partitions == -1 else request.partitions
        _check_count(name, count)
        config = topic_config.check(request.config)
        check_typed(config, level=self._metadata.known.level)
        return count, config

    def _create_table(self, new: _NewTopic) -> TopicTable:
        """Creates a table before the metadata names its topic, so that no topic lacks its table.

        Leadership is checked after the snapshot is taken: a broker that has been replaced must not
        empty the table of a topic that its successor has since created.
        """

        def create(before: TableSnapshot) -> TableChange:
            self._metadata.reload()
            if before.topic_id is not None:
                raise errors.TopicExists(topic=new.name)
            return create_change(new.topic_id, new.count, new.config, creator=self._creator)

        table = self._open_table(new.name)
        table.commit(self._clear)
        table.commit(create)
        return table

    def _clear(self, before: TableSnapshot) -> TableChange | None:
        """Ends a topic that the metadata does not name: its creation or deletion was interrupted.

        Another broker may be about to add it, as long as that broker's epoch has no fence. If it
        does not add the topic, it ends the topic itself.
        """
        if before.topic_id is None:
            return None
        # Only the metadata can show that a topic is gone: it may name one that we do not serve. It
        # is read after the table. A broker whose epoch it shows as fenced can no longer add a
        # topic.
        metadata = self._metadata.reload()
        if before.topic_id in {each.topic_id for each in metadata.topics.values()}:
            return None
        if before.creator != self._creator and is_open(metadata, before.creator):
            return None
        return delete_change(before)

    def _name(self, new: Sequence[_NewTopic]) -> ClusterMetadata:
        """Adds topics without records to the metadata, and returns that version."""

        def name_them(metadata: ClusterMetadata) -> ClusterMetadata:
            topics, loads = dict(metadata.topics), Loads.of(metadata.topics.values())
            for each in new:
                leaders = self._leaders(metadata, each.topic_id, (), each.count, loads)
                loads.update(leaders)
                topics[each.name] = TopicMetadata(
                    topic_id=each.topic_id,
                    leaders=leaders,
                    leader_epochs=(0,) * each.count,
                    config=dict(each.config),
                )
            return msgspec.structs.replace(metadata, topics=topics)

        try:
            return self._metadata.change(name_them)
        except errors.OutcomeUnknown:
            self._in_doubt.update(each.name for each in new)
            raise

    def _leaders(
        self,
        metadata: ClusterMetadata,
        topic_id: str,
        present: tuple[int, ...],
        count: int,
        loads: Loads,
    ) -> tuple[int, ...]:
        """Returns the leaders of a topic that has `present`, and will have `count` partitions."""
        if self._is_member:
            # Judged on the version that is changed: a broker that is up gets successors if it dies
            # before it has seen the partition. One that has just died would serve none of them.
            brokers = [
                each
                for each in placement.candidates(metadata)
                if fate_of(metadata.brokers[each.broker].process) is not Fate.GONE
            ]
            present = placement.place_more(topic_id, present, count, brokers, loads)
        return present + (self._broker_id,) * (count - len(present))

    def _serve(self, name: str, metadata: ClusterMetadata, table: TopicTable) -> None:
        """Serves a topic that was added to the metadata in this epoch and has no records."""
        known = metadata.topics[name]
        topic = Topic(name, known.topic_id, dict(known.config), table)
        self._add_partitions(topic, table.snapshot, metadata)
        self._led_partitions.add_topic(topic)
        self._created[topic.topic_id] = name

    def _add_partitions(
        self, topic: Topic, snapshot: TableSnapshot, metadata: ClusterMetadata
    ) -> None:
        """Serves the partitions in `metadata` that `topic` does not have yet."""
        self._led_partitions.add_partitions(topic, snapshot, metadata)

    # -------------------------------------------------------------------------- changing

    def add_partitions(self, request: AddPartitions, *, client: str = "") -> TopicInfo:
        """Adds partitions; existing records do not move. `client` identifies the caller in the log.

        Raises `UnknownTopic`, `BadPartitionCount`, and `InternalTopic`, because groups would move
        to other partitions.
        """
        check_not_internal(request.topic, "add partitions to")
        _check_count(request.topic, request.partitions)
        with self._metadata.changing(f"partitions for topic {request.topic}"):
            topic = self._led_partitions.topic(request.topic)
            _check_more(request, topic.count)
            before = topic.count

            def widen(before: TableSnapshot) -> TableChange:
                # It has more than we serve if an earlier call was interrupted: this one completes
                # it.
                if request.partitions < check_current(before, topic).partitions:
                    raise _too_few(request, before.partitions)
                change = describe_change(before, request.partitions, before.config)
                # A RESTORE to before partitions were added removes them, but keeps their `txn`.
                txns = {
                    app_id: version
                    for app_id, version in change.txns.items()
                    if topic.table.txn(app_id) is None
                }
                return replace(change, txns=txns)

            def widen_metadata(metadata: ClusterMetadata) -> ClusterMetadata:
                known = entry_of(metadata.topics, topic)
                count = max(request.partitions, known.partition_count)
                loads = Loads.of(metadata.topics.values())
                widened = msgspec.structs.replace(
                    known,
                    leaders=self._leaders(metadata, topic.topic_id, known.leaders, count, loads),
                    leader_epochs=(
                        *known.leader_epochs,
                        *(0,) * (count - known.partition_count),
                    ),
                )
                topics = {**metadata.topics, topic.name: widened}
                return msgspec.structs.replace(metadata, topics=topics)

            snapshot = topic.table.commit(widen)
            self._add_partitions(topic, snapshot, self._metadata.change(widen_metadata))
        event = "added partitions to a topic"
        log_change(event, topic.name, client, before=before, partitions=topic.count)
        return self.describe(topic.name)

    def check_partitions(self, request: AddPartitions) -> None:
        """Raises what `add_partitions` would; adds none."""
        _check_count(request.topic, request.partitions)
        _check_more(request, self._led_partitions.topic(request.topic).count)

    def alter(self, request: AlterTopic, *, client: str = "") -> TopicInfo:
        """Changes the configuration as `ConfigChanges.alter` does, and returns the description."""
        self.config_changes.alter(request, client=client)
        return self.describe(request.topic)

    def compact(self, name: str) -> TopicInfo:
        """Compacts the topic's table, and returns once that is done.

        If `cleanup.policy` includes `compact`, all but the last record of each key are removed
        first; then small files are merged. Raises `UnknownTopic`, and what `key_compaction.compact`
        and `file_compaction.compact` raise.
        """
        topic = self._led_partitions.topic(name)
        table = topic.table
        with self._metadata.stopping_on_sync_failure(f"compaction of topic {name}"):
            check_current(table.refresh(), topic)
            counts = self._publisher.counts
            for each in key_compaction.choose(table, everything=True):
                key_compaction.compact(
                    table, each, should_stop=self._should_stop, on_commit=counts.add_merged
                )
            snapshot = check_current(table.refresh(), topic)
            groups = file_compaction.choose(
                snapshot,
                everything=True,
                borders=key_compaction.borders(table, snapshot),
                span_us=retention.span_us(snapshot.config),
            )
            for together in file_compaction.together(groups):
                counts.add_merged(file_compaction.compact(table, together))
        return self.describe(name)

    # -------------------------------------------------------------------------- deleting

    def delete(self, name: str, *, client: str = "") -> None:
        """Deletes a topic; its files are removed after the grace period of replaced files.

        `client` identifies the caller in the log.

        Raises `UnknownTopic`, `InternalTopic`; `OutcomeUnknown` if the topic may be gone, which the
        next call that names it, or the janitor, finds out, or if it is gone but its table is not
        empty.
        """
        check_not_internal(name, "delete")
        with self._metadata.changing(f"deletion of topic {name}"):
            self._settle_doubt(name)
            topic = self._led_partitions.topic(name)

            def without(topics: dict[str, TopicMetadata]) -> dict[str, TopicMetadata]:
                entry_of(topics, topic)
                return {key: each for key, each in topics.items() if key != name}

            try:
                self._metadata.change_topics(without)
            except errors.OutcomeUnknown as error:
                # If the topic is gone, nothing more may be acked for it; if it is not, none of it
                # may be trimmed.
                topic.in_doubt = f"it may have been deleted: {error}"
                self._in_doubt.add(name)
                raise
            # Before its table is emptied, which may fail: the topic is already gone.
            log_change("deleted a topic", name, client, partitions=topic.count)
            self._end(topic)

    def finish_deletion(self, name: str) -> None:
        """Empties the table of a topic that the metadata does not name.

        Raises `ForeignTable`, `CorruptObject`, and what the store raises.
        """
        with self._metadata.changing(f"removal of the table of topic {name}"):
            self._settle_doubt(name)
            if not self.exists(name):
                self._open_table(name).commit(self._clear)

    def settle_doubts(self) -> None:
        """Finds out which creations and deletions of unknown outcome took effect.

        Raises what the store raises; until it answers, such a topic accepts no records. A topic
        that cannot be settled does not keep the others from being settled. Also finishes the
        deletions by other brokers that only this one can finish.
        """
        run_each(
            [
                *(partial(self._settle, name) for name in sorted(self._in_doubt)),
                *(partial(self._finish_deletion_of, *each) for each in self._created_and_gone()),
            ]
        )

    def _created_and_gone(self) -> list[tuple[str, str]]:
        """Returns (id, name) of the topics that this broker has created and that are now deleted.

        They were deleted by another broker, or by a request that is in progress or left the table.

        The other broker may have died before it emptied the table. As long as the creator lives,
        only the creator empties it: no other broker could create the topic again.
        """
        created = list(self._created.items())
        return [each for each in created if self._led_partitions.by_id(each[0]) is None]

    def _finish_deletion_of(self, topic_id: str, name: str) -> None:
        self.finish_deletion(name)
        self._created.pop(topic_id, None)  # a request may have ended it concurrently

    def _settle(self, name: str) -> None:
        with self._metadata.changing(f"a check whether topic {name} exists"):
            self._settle_doubt(name)

    def _settle_doubt(self, name: str) -> None:
        """Finds out whether a creation or a deletion of unknown outcome took effect.

        Its put may still be in flight, so another version of the metadata is put, which excludes
        it.
        """
        if name not in self._in_doubt:
            return
        metadata = self._metadata.change(lambda metadata: metadata)
        known = metadata.topics.get(name)
        topic = self._led_partitions.topic(name) if self.exists(name) else None
        if topic is not None and known is not None and known.topic_id == topic.topic_id:
            topic.in_doubt = None
        elif topic is not None:
            with suppress(errors.OutcomeUnknown):  # the janitor empties its table
                self._end(topic)
        elif known is not None:
            table = self._open_table(name)
            if table.refresh().topic_id != known.topic_id:
                reason = f"the metadata names topic {known.topic_id}, and its table does not"
                raise errors.ForeignTable(topic=name, reason=reason)
            self._serve(name, metadata, table)
        self._in_doubt.discard(name)

    def _end(self, topic: Topic) -> None:
        """Forgets a topic that the metadata no longer names, and empties its table."""
        self._led_partitions.remove_topic(topic)
        self._publisher.remove_topic(topic)
        try:
            self._open_table(topic.name).commit(
                lambda before: delete_change(before) if before.topic_id == topic.topic_id else None
            )
        except errors.SparklogError as error:
            what = f"deletion of topic {topic.name}: it is gone, but its table is not empty"
            raise errors.OutcomeUnknown(what=what, reason=str(error)) from error
        self._created.pop(topic.topic_id, None)


def _described(topic: Topic, number: int) -> PartitionInfo:
    found = topic.partitions.get(number)
    return PartitionInfo(
        partition=number,
        leader=topic.leaders[number],
        leader_epoch=topic.leader_epochs[number],
        start=found.start if found else -1,
        end=found.end if found else -1,
        published=found.published if found else -1,
    )


def _check_count(topic: str, count: int) -> None:
    if not 1 <= count <= limits.PARTITIONS_PER_TOPIC:
        reason = f"a topic has 1 to {limits.PARTITIONS_PER_TOPIC}"
        raise errors.BadPartitionCount(topic=topic, requested=count, reason=reason)


def _check_more(request: AddPartitions, count: int) -> None:
    if request.partitions <= count:
        raise _too_few(request, count)


def _too_few(request: AddPartitions, count: int) -> errors.BadPartitionCount:
    return errors.BadPartitionCount(
        topic=request.topic,
        requested=request.partitions,
        reason=f"it already has {count}, and their number cannot be reduced",
    )
