"""Appends batches that Spark tasks staged as files, by reference.

If this broker leads all partitions of a batch's topics, all rows become durable together, and any
partition that remembers the batch vouches for all of it.

Otherwise this broker appends the *part* of the batch that belongs to its partitions, and names the
leaders of the others, which the driver asks next. Each partition then vouches only for itself. The
manifest decides which rows go where, and stays until a later batch of the query has begun, so a
rerun of the batch cannot distribute its rows differently. Rows for a topic that has been deleted
and recreated are omitted: they belong to the deleted topic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sparklog import errors
from sparklog.broker.log.appends import Append, KeptOffsets
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.partition_state import PartitionState
from sparklog.broker.log.spark_batches import append_within_seconds
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.writer import Writer
from sparklog.broker.topic_checks import check_current, check_not_internal
from sparklog.clock import Clock
from sparklog.formats.flight_messages import AppendStaged, AppendStagedReply
from sparklog.formats.record import CREATE_TIME
from sparklog.storage.metadata.liveness import age
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.snapshot import BatchId, BatchKind
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import Destination, Section


class StagedBatches:
    """Appends each staged batch once, however often this is requested."""

    def __init__(
        self,
        store: Store,
        led_partitions: LedPartitions,
        writer: Writer,
        *,
        clock: Clock,
        submit_timeout_seconds: float,
        has_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_others`: whether other brokers are up, which may receive partitions of a batch."""
        self._has_others = has_others
        self._store = store
        self._led_partitions = led_partitions
        self._writer = writer
        self._clock = clock
        self._submit_timeout_seconds = submit_timeout_seconds

    def append(
        self,
        request: AppendStaged,
        authorize: Callable[[Iterable[str]], None] = lambda _topics: None,
    ) -> AppendStagedReply:
        """Appends the rows that a manifest names, for those partitions that this broker leads.

        `authorize`: raises `NotAuthorized` unless the client may write to all of the topics.

        Raises `BadRequest`, `UnknownTopic`, `UnknownPartition`, `KeylessRecord`, `CorruptObject`,
        `MissingObject`, `TopicHeldBack`, `MetadataChanged` if a partition leaves this broker
        concurrently, and what `Writer.submit` and `wait` raise.
        """
        # The files of an appended batch may be gone, and a rerun may distribute its rows to other
        # partitions, which do not remember the batch. So one partition that remembers it is enough,
        # unless it has only a part.
        batch_id = manifest.batch_of(request.manifest)
        self._learn_from_tables()
        remembered = self._find_whole(batch_id)
        if remembered.ranges:
            authorize(remembered.ranges)
            return remembered
        try:
            self._check_not_outdated(batch_id)
            staged = manifest.read(self._store, request.manifest)
            authorize(section.topic for section in staged.sections)
            staged = self._without_gone(staged)
            if self._is_in_parts(staged):
                return self._append_part(staged)
            return self._append_whole(staged)
        except errors.NotLeader as error:
            raise errors.MetadataChanged from error  # on a retry, any broker names the leaders
        except (errors.BadRequest, errors.MissingObject):
            # An earlier attempt may have appended it, and its files been removed. If that was
            # another broker, which led everything, the tables contain the batch.
            for topic in self._led_partitions.topics():
                if {*topic.leaders} != {self._led_partitions.broker}:
                    with contextlib.suppress(errors.Corrupt, errors.Invalid):
                        self._learn(topic)
            remembered = self._find_whole(batch_id)
            if remembered.ranges:
                authorize(remembered.ranges)
                return remembered
            raise

    def _without_gone(self, staged: manifest.Manifest) -> manifest.Manifest:
        """Returns the batch without the rows staged for topics that no longer exist.

        Raises `UnknownTopic` or `BadRequest` if no rows remain, and `MetadataChanged` if this
        broker does not know yet which topics exist.
        """
        names = {section.topic for section in staged.sections}
        known: dict[str, Destination] = {}
        for name in names:
            try:
                topic = self._led_partitions.topic(name)
            except errors.UnknownTopic:
                if name not in staged.topic_ids:
                    raise
            else:
                known[name] = Destination(topic.topic_id, topic.count)
        gone = staged.topics_gone(known)
        if not gone:
            return staged
        newest = manifest.destinations(
            MetadataStore(self._store, clock=self._clock).reload().topics
        )
        if any(newest.get(name) != known.get(name) for name in gone):
            raise errors.MetadataChanged
        for name in gone - known.keys():
            if gone == names:
                raise errors.UnknownTopic(topic=name)
        if gone == names:
            raise errors.BadRequest(
                reason=f"batch {staged.batch} of {staged.query} was staged for"
                f" {', '.join(sorted(known))} before it was deleted and created again: start the"
                " query or the write again; it stages the batch for the current topic"
            )
        here = tuple(each for each in staged.sections if each.topic not in gone)
        return msgspec.structs.replace(staged, sections=here)

    def _append_whole(self, staged: manifest.Manifest) -> AppendStagedReply:
        self._check_age(staged, staged.kind)
        self._check_batches_known(staged, staged.sections)
        appends = [self._prepare(section, staged, staged.kind) for section in staged.sections]
        if not appends:
            return AppendStagedReply(ranges={})
        self._check_files(staged, staged.sections)
        reply = self._submit(staged.sections, appends)
        if self._has_others() or self._has_part(staged):
            # Once its partitions have several leaders, only a receipt shows that it was published.
            reply = msgspec.structs.replace(reply, topic_ids=self._topic_ids(staged))
        return reply

    def _submit(self, sections: Sequence[Section], appends: Sequence[Append]) -> AppendStagedReply:
        pending = self._writer.submit(appends, timeout_seconds=self._submit_timeout_seconds)
        results = self._writer.wait(pending)
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for section, result in zip(sections, results, strict=True):
            of_topic = ranges.setdefault(section.topic, {})
            first, count = of_topic.get(section.partition, (result.base_offset, 0))
            of_topic[section.partition] = first, count + section.count
        return AppendStagedReply(ranges=ranges, skipped=all(each.duplicate for each in results))

    def _find_whole(self, batch_id: BatchId) -> AppendStagedReply:
        """Returns the topics that contain the whole batch, with the remembered offsets."""
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for topic in self._led_partitions.topics():
            found = self._led_partitions.batches(topic.partitions.values(), batch_id)
            whole = {
                number: (each.base_offset, each.count)
                for number, each in found.items()
                if not each.kind.is_part
            }
            if whole or topic.spark_batches.has(batch_id):
                ranges[topic.name] = whole
        return AppendStagedReply(ranges=ranges, skipped=True)

    # -------------------------------------------------------------------------- parts

    def _is_in_parts(self, staged: manifest.Manifest) -> bool:
        """Returns whether other leaders append, or have appended, a part of the batch.

        A partition that gets no rows of the batch now may have received some when it was appended
        before, which only its leader remembers. So the batch is whole only if this broker leads all
        partitions of the topics.
        """
        batch_id = staged.batch_id
        for name in {section.topic for section in staged.sections}:
            topic = self._led_partitions.topic(name)
            partitions = topic.partitions
            are_resigning = any(
                each.state is PartitionState.RESIGNING for each in partitions.values()
            )
            if len(partitions) < topic.count or are_resigning:
                return True
            if self._led_partitions.batches(partitions.values(), batch_id):
                return True  # a part: the whole would have been found
        return False

    def _has_part(self, staged: manifest.Manifest) -> bool:
        """Returns whether a request just before this one has appended a part of the batch."""
        names = {section.topic for section in staged.sections}
        return any(
            each.kind.is_part
            for topic in self._led_partitions.topics()
            if topic.name in names
            for each in self._led_partitions.batches(
                topic.partitions.values(), staged.batch_id
            ).values()
        )

    def _append_part(self, staged: manifest.Manifest) -> AppendStagedReply:
        """Appends the sections for those of our partitions that do not remember the batch."""
        elsewhere: dict[str, dict[int, int]] = {}
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        missing: list[Section] = []
        for section in staged.sections:
            topic = self._led_partitions.topic(section.topic)
            try:
                partition = topic.partition(section.partition)
            except errors.NotLeader as error:
                elsewhere.setdefault(topic.name, {})[section.partition] = error.leader
                continue
            known = self._led_partitions.batches([partition], staged.batch_id).get(partition.number)
            if known is not None:
                ranges.setdefault(topic.name, {})[section.partition] = (
                    known.base_offset,
                    known.count,
                )
            else:
                missing.append(section)
        kind = staged.kind.as_part
        if missing:
            self._check_not_begun_later(staged.batch_id, kind)
            if staged.kind is not BatchKind.UNNAMED:
                for name in {section.topic for section in missing}:
                    self._learn(self._led_partitions.topic(name))  # other brokers commit to it too
            remembered = self._find_whole(staged.batch_id)
            if remembered.ranges:
                return remembered
            self._check_not_outdated(staged.batch_id)
            self._check_age(staged, kind)
            self._check_batches_known(staged, missing)
            # Other brokers' sections are checked too, as far as this one can: a batch that any
            # leader would reject is better rejected by the first.
            for section in staged.sections:
                self._check_records(section)
            self._check_files(staged, missing)
            reply = self._submit(missing, [self._prepare(each, staged, kind) for each in missing])
            for name, of_topic in reply.ranges.items():
                ranges.setdefault(name, {}).update(of_topic)
        return AppendStagedReply(
            ranges=ranges,
            skipped=not missing,
            elsewhere=elsewhere,
            topic_ids=self._topic_ids(staged),
        )

    def _topic_ids(self, staged: manifest.Manifest) -> dict[str, str]:
        """Returns the ids of a batch's topics: the driver puts a receipt for topics named here."""
        names = {section.topic for section in staged.sections}
        return {name: self._led_partitions.topic(name).topic_id for name in names}

    def _check_not_begun_later(self, batch_id: BatchId, kind: BatchKind) -> None:
        """Raises `BadRequest` if a later batch of the query is staged: this one is then complete.

        Its rows may be only in partitions of other leaders. Its manifest is gone, or will be, and a
        driver that was suspended may have put a different one.
        """
        if not kind.is_numbered:
            return
        staged = self._store.folders(f"{manifest.FOLDER}/{batch_id.query}")
        newest = max((int(name) for name in staged if name.isdecimal()), default=-1)
        if newest > batch_id.batch:
            raise _outdated(batch_id, newest)

    # -------------------------------------------------------------------------- checks

    def _check_files(self, staged: manifest.Manifest, sections: Sequence[Section]) -> None:
        """Checks that the files of the sections are there.

        Raises what `Manifest.check_files` raises, and `MetadataChanged` if topics of the batch have
        been deleted since it was read: a sweep removes their rows.
        """
        try:
            staged.check_files(self._store, sections)
        except errors.MissingObject:
            newest = MetadataStore(self._store, clock=self._clock).reload().topics
            if staged.topics_gone(manifest.destinations(newest)):
                raise errors.MetadataChanged from None
            raise

    def _check_not_outdated(self, batch_id: BatchId) -> None:
        """Raises `BadRequest` for an unknown batch that is older than its query's newest.

        A query's batch numbers increase, so such a batch comes from a checkpoint or a program that
        was rolled back.
        """
        newest = max(
            (topic.spark_batches.begun(batch_id.query) for topic in self._led_partitions.topics()),
            default=-1,
        )
        if batch_id.batch < newest:
            raise _outdated(batch_id, newest)

    def _learn_from_tables(self) -> None:
        """Reads the batches of tables that could not be read when this broker started."""
        for topic in self._led_partitions.topics():
            if not topic.spark_batches.is_known:
                with contextlib.suppress(errors.SparklogError):
                    self._learn(topic)

    def _learn(self, topic: Topic) -> None:
        """Reads the batches of a topic's table. Raises what `refresh` and `check_current` raise."""
        check_current(topic.table.refresh(), topic)
        batches = topic.table.batches(topic.topic_id)
        self._led_partitions.record_batches(topic, batches)

    def _check_batches_known(self, staged: manifest.Manifest, sections: Iterable[Section]) -> None:
        """Raises `TopicHeldBack` for a topic whose batches cannot be read from its table."""
        if staged.kind is BatchKind.UNNAMED:
            return
        for name in {section.topic for section in sections}:
            topic = self._led_partitions.topic(name)
            if not topic.spark_batches.is_known:
                reason = topic.held_back or "its table, which lists its batches, cannot be read"
                raise errors.TopicHeldBack(topic=name, reason=reason)

    def _check_age(self, staged: manifest.Manifest, kind: BatchKind) -> None:
        """Raises `BadRequest` for a write so old that it may be forgotten and its files removed."""
        if kind is BatchKind.NUMBERED:
            return
        try:
            decided_us = self._store.stat(staged.path).modified_us
        except ObjectMissing:
            raise errors.BadRequest(reason=f"there is no manifest at {staged.path}") from None
        age_seconds = (self._clock.now_us() - decided_us) / 1e6
        if age_seconds > append_within_seconds(kind):
            reason = (
                f"write {staged.query} was staged {age(round(age_seconds * 1e6))} ago, so long ago"
                " that it may have been appended and forgotten. Check whether its rows are in the"
                " topic, and if not, write them again under another name"
            )
            raise errors.BadRequest(reason=reason)

    def _check_records(self, section: Section) -> None:
        """Raises if the topic rejects the records, whichever broker leads the partition."""
        check_not_internal(section.topic, "write to")
        topic = self._led_partitions.topic(section.topic)
        if not 0 <= section.partition < topic.count:
            raise errors.UnknownPartition(
                topic=topic.name, partition=section.partition, last=topic.count - 1
            )
        if section.offsets is None:  # otherwise the source has accepted them as they are
            arrival_us = self._clock.now_us()
            times_us = _times_us(section, topic, arrival_us)
            topic.check_keys(section.partition, section.keyless)
            topic.check_times(min(times_us), max(times_us), arrival_us)

    def _prepare(self, section: Section, staged: manifest.Manifest, kind: BatchKind) -> Append:
        self._check_records(section)
        topic = self._led_partitions.topic(section.topic)
        topic.partition(section.partition)
        arrival_us = self._clock.now_us()
        times_us = _times_us(section, topic, arrival_us)
        offsets = section.offsets
        return Append(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=section.partition,
            count=section.count,
            arrival_us=arrival_us,
            min_timestamp_us=min(times_us),
            max_timestamp_us=max(times_us),
            timestamp_type=topic.timestamp_type,
            staged=section.ref(),
            batch_id=staged.batch_id,
            batch_kind=kind,
            kept=None if offsets is None else KeptOffsets(offsets[0], section.rows),
        )


def _times_us(section: Section, topic: Topic, arrival_us: int) -> list[int]:
    """Returns times that bound the timestamps of the section's records."""
    times_us = [arrival_us]  # for rows without a time
    if topic.timestamp_type == CREATE_TIME or section.offsets is not None:
        bounds_us = (section.min_timestamp_us, section.max_timestamp_us)
        times_us += [each for each in bounds_us if each is not None]
    return times_us


def _outdated(batch_id: BatchId, newest: int) -> errors.BadRequest:
    reason = (
        f"batch {batch_id.batch} of {batch_id.query} arrived after batch {newest}, and its"
        " offsets are no longer remembered: it may have been written already. Check whether"
        " its rows are in the topic, and if not, write them as a batch of another query"
    )
    return errors.BadRequest(reason=reason)
