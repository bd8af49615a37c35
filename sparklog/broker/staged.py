"""Appending the batches that Spark tasks staged as files, by reference."""

from __future__ import annotations

from sparklog import errors
from sparklog.broker.log.partitions import PartitionTable
from sparklog.broker.log.spark_batches import append_within_seconds
from sparklog.broker.log.writer import Append, KeptOffsets, Writer
from sparklog.broker.topic_checks import check_current, check_not_internal
from sparklog.clock import Clock
from sparklog.formats.flight_messages import AppendStaged, AppendStagedReply
from sparklog.formats.record import CREATE_TIME
from sparklog.storage import manifest
from sparklog.storage.liveness import age
from sparklog.storage.objects import ObjectMissing, Store
from sparklog.storage.snapshot import BatchId, BatchKind


class StagedBatches:
    """Appends each staged batch once, however often it is asked to."""

    def __init__(
        self,
        store: Store,
        partition_table: PartitionTable,
        writer: Writer,
        *,
        clock: Clock,
        submit_timeout_seconds: float,
    ) -> None:
        self._store = store
        self._partition_table = partition_table
        self._writer = writer
        self._clock = clock
        self._submit_timeout_seconds = submit_timeout_seconds

    def append(self, request: AppendStaged) -> AppendStagedReply:
        """Appends the rows that a manifest names; all of them become durable together.

        Raises `BadRequest`, `UnknownTopic`, `UnknownPartition`, `KeylessRecord`, `CorruptObject`,
        `MissingObject`, `TopicHeldBack`, `MetadataChanged`, and what `Writer.submit` and `wait`
        raise.
        """
        # The files of an appended batch may be gone, and a rerun distributes its rows to other
        # partitions, which do not remember the batch. So one partition that does is enough.
        batch_id = manifest.batch_of(request.manifest)
        self._learn_from_tables()
        remembered = self._find_appended(batch_id)
        if remembered.ranges:
            return remembered
        try:
            return self._append_once(batch_id, request.manifest)
        except (errors.BadRequest, errors.MissingObject):
            # An earlier attempt may meanwhile have appended it, and its files been removed.
            remembered = self._find_appended(batch_id)
            if remembered.ranges:
                return remembered
            raise

    def _append_once(self, batch_id: BatchId, path: str) -> AppendStagedReply:
        self._check_not_outdated(batch_id)
        staged = manifest.read(self._store, path)
        self._check_age(staged)
        self._check_leads_all(staged)
        self._check_batches_known(staged)
        appends = [self._prepare(section, staged) for section in staged.sections]
        if not appends:
            return AppendStagedReply(ranges={})
        staged.check_files(self._store)
        pending = self._writer.submit(appends, timeout_seconds=self._submit_timeout_seconds)
        results = self._writer.wait(pending)
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for section, result in zip(staged.sections, results, strict=True):
            of_topic = ranges.setdefault(section.topic, {})
            first, count = of_topic.get(section.partition, (result.base_offset, 0))
            of_topic[section.partition] = first, count + section.count
        return AppendStagedReply(ranges=ranges, skipped=all(each.duplicate for each in results))

    def _find_appended(self, batch_id: BatchId) -> AppendStagedReply:
        """Returns the topics that hold the batch, with the offsets that partitions remember."""
        ranges: dict[str, dict[int, tuple[int, int]]] = {}
        for topic in self._partition_table.topics():
            with self._partition_table.lock:  # per topic, because there may be many
                if topic.spark_batches.has(batch_id):
                    ranges[topic.name] = {}
                for partition in topic.partitions.values():
                    batch = partition.batches.find(batch_id)
                    if batch is not None:
                        of_topic = ranges.setdefault(topic.name, {})
                        of_topic[partition.number] = batch.base_offset, batch.count
        return AppendStagedReply(ranges=ranges, skipped=True)

    def _check_not_outdated(self, batch_id: BatchId) -> None:
        """Raises `BadRequest` for a batch that is older than its query's newest, and not known.

        The numbers of a query's batches rise, so such a batch belongs to a checkpoint, or to a
        program, that was set back.
        """
        newest = max(
            (
                topic.spark_batches.newest(batch_id.query)
                for topic in self._partition_table.topics()
            ),
            default=-1,
        )
        if batch_id.batch < newest:
            reason = (
                f"batch {batch_id.batch} of {batch_id.query} comes after batch {newest}, and its"
                " offsets are no longer remembered: it may have been written already. Check whether"
                " its rows are in the topic, and if not, write them as a batch of another query"
            )
            raise errors.BadRequest(reason=reason)

    def _learn_from_tables(self) -> None:
        """Reads the batches of tables that could not be read when this broker started."""
        for topic in self._partition_table.topics():
            if topic.spark_batches.is_known:
                continue
            try:
                check_current(topic.table.refresh(), topic)
            except errors.SparklogError:
                continue
            batches = topic.table.batches(topic.topic_id)
            with self._partition_table.lock:
                topic.spark_batches.record_all(batches)

    def _check_batches_known(self, staged: manifest.Manifest) -> None:
        """Raises `TopicHeldBack` for a topic whose table cannot be asked for its batches."""
        if staged.kind is BatchKind.UNNAMED:
            return
        for name in {section.topic for section in staged.sections}:
            topic = self._partition_table.topic(name)
            if not topic.spark_batches.is_known:
                reason = topic.held_back or "its table, which lists its batches, cannot be read"
                raise errors.TopicHeldBack(topic=name, reason=reason)

    def _check_leads_all(self, staged: manifest.Manifest) -> None:
        """Raises `BadRequest` for a topic of which other brokers lead partitions.

        A partition that has no rows of the batch now may have had some when it was appended, and
        only its leader remembers. Raises `MetadataChanged` while a partition is on its way to us.
        """
        own = self._partition_table.broker
        for name in sorted({section.topic for section in staged.sections}):
            topic = self._partition_table.topic(name)
            others = sorted({*topic.leaders} - {own})
            if others:
                reason = (
                    f"topic {name} has partitions of several brokers, to which Spark's sink cannot"
                    f" write yet; this is broker {own}, the others are {others}"
                )
                raise errors.BadRequest(reason=reason)
            if len(topic.partitions) < topic.count or topic.resigning:
                raise errors.MetadataChanged

    def _check_age(self, staged: manifest.Manifest) -> None:
        """Raises `BadRequest` for a write so old that it may be forgotten, and its files gone."""
        if staged.kind is BatchKind.NUMBERED:
            return
        try:
            decided_us = self._store.stat(staged.path).modified_us
        except ObjectMissing:
            raise errors.BadRequest(reason=f"there is no manifest at {staged.path}") from None
        age_seconds = (self._clock.now_us() - decided_us) / 1e6
        if age_seconds > append_within_seconds(staged.kind):
            reason = (
                f"write {staged.query} was staged {age(round(age_seconds * 1e6))} ago, so long that"
                " it may have been appended and forgotten. Check whether its rows are in the topic,"
                " and if not, write them again under another name"
            )
            raise errors.BadRequest(reason=reason)

    def _prepare(self, section: manifest.Section, staged: manifest.Manifest) -> Append:
        check_not_internal(section.topic, "write to")
        topic = self._partition_table.topic(section.topic)
        topic.partition(section.partition)
        arrival_us = self._clock.now_us()
        timestamp_type = topic.timestamp_type
        times_us = [arrival_us]  # for rows without a time
        offsets = section.offsets
        if timestamp_type == CREATE_TIME or offsets is not None:
            bounds_us = (section.min_timestamp_us, section.max_timestamp_us)
            times_us += [each for each in bounds_us if each is not None]
        if offsets is None:  # the source has accepted its records as they are
            topic.check_keys(section.partition, section.keyless)
            topic.check_times(min(times_us), max(times_us), arrival_us)
        return Append(
            topic=topic.name,
            topic_id=topic.topic_id,
            partition=section.partition,
            count=section.count,
            arrival_us=arrival_us,
            min_timestamp_us=min(times_us),
            max_timestamp_us=max(times_us),
            timestamp_type=timestamp_type,
            staged=section.ref(),
            batch_id=BatchId(staged.query, staged.batch),
            batch_kind=staged.kind,
            kept=None if offsets is None else KeptOffsets(offsets[0], section.rows),
        )
