"""Changes to topic configurations, which are stored in the metadata and in the topic's table.

A change is written to the table first, and the metadata decides whether it counts: a change that
was interrupted between the two is reverted in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from sparklog import errors
from sparklog.broker.leader_metadata import LeaderMetadata
from sparklog.broker.log.appends import EmptyObject
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.topic import Topic
from sparklog.broker.log.writer import Writer
from sparklog.broker.topic_checks import (
    check_current,
    check_not_internal,
    check_typed,
    entry_of,
    log_change,
)
from sparklog.formats import topic_config
from sparklog.formats.config_rules import Edit
from sparklog.formats.flight_messages import AlterTopic
from sparklog.formats.topic_config import VALUE_FORMAT, VALUE_SCHEMA
from sparklog.formats.topic_names import MIRROR_SOURCE, check_topic_name
from sparklog.storage.metadata.model import TopicMetadata
from sparklog.storage.snapshot import TableSnapshot
from sparklog.storage.table.changes import TableChange, describe_change


class ConfigChanges:
    """Changes topic configurations. May be called from any thread."""

    def __init__(
        self, metadata: LeaderMetadata, led_partitions: LedPartitions, writer: Writer
    ) -> None:
        self._metadata = metadata
        self._led_partitions = led_partitions
        self._writer = writer

    def alter(self, request: AlterTopic, *, client: str = "") -> None:
        """Sets configuration keys, or resets those whose value is None to their default.

        `client` identifies the caller in the log.

        Raises `UnknownTopic`, `UnknownOption`, `BadOption`.
        """

        def change(config: Mapping[str, str]) -> dict[str, str]:
            changed = dict(config)
            for key, value in request.config.items():
                topic_config.check_key(key)
                if value is None:
                    changed.pop(key, None)
                else:
                    changed[key] = value
            return changed

        self._change(request.topic, change, only_checks=False, client=client)

    def add_columns(self, topic: str, schema: str) -> None:
        """Makes `schema` the typed columns of a topic whose configuration names none.

        Raises what `alter` raises.
        """

        def change(config: Mapping[str, str]) -> Mapping[str, str]:
            is_json = topic_config.value_of(config, VALUE_FORMAT) == topic_config.JSON
            if not is_json or config.get(VALUE_SCHEMA):
                return config  # a client was faster
            return {**config, VALUE_SCHEMA: schema}

        self._change(topic, change, only_checks=False, client="the first records")

    def edit(
        self,
        topic: str,
        edits: Sequence[tuple[Edit, str, str | None]],
        *,
        only_checks: bool,
        client: str = "",
    ) -> None:
        """Changes individual keys by (edit, key, value), or only checks the change; see `alter`.

        Raises `BadTopicName`, `UnknownTopic`, `UnknownOption`, `BadOption`.
        """
        check_topic_name(topic)
        self._change(
            topic,
            lambda config: topic_config.edited(config, edits),
            only_checks=only_checks,
            client=client,
        )

    def replace(
        self, topic: str, config: Mapping[str, str], *, only_checks: bool, client: str = ""
    ) -> None:
        """Replaces the whole configuration: keys missing in `config` revert to their default.

        Raises what `edit` raises.
        """
        check_topic_name(topic)
        self._change(topic, lambda _: config, only_checks=only_checks, client=client)

    def _change(
        self,
        name: str,
        change: Callable[[Mapping[str, str]], Mapping[str, str]],
        *,
        only_checks: bool,
        client: str,
    ) -> None:
        with self._metadata.changing(f"configuration of topic {name}"):
            topic = self._led_partitions.topic(name)
            config = topic_config.check(change(topic.config))
            check_typed(config, level=self._metadata.known.level)
            topic_config.columns_of(config, topic.table.snapshot.columns)  # raises `BadOption`
            source = config.get(MIRROR_SOURCE)
            becomes_mirror = bool(source) and source != topic.mirror_source
            if becomes_mirror:
                _check_empty(topic, source)
            if only_checks:
                return

            def replace_config(topics: dict[str, TopicMetadata]) -> dict[str, TopicMetadata]:
                known = entry_of(topics, topic)
                changed = msgspec.structs.replace(
                    known, config=topic_config.check(change(known.config))
                )
                return {**topics, topic.name: changed}

            was = topic.config
            self._led_partitions.set_config(topic, config)
            try:
                if becomes_mirror:
                    # The writer no longer accepts other records; some may be in flight.
                    self._writer.wait(self._writer.submit([EmptyObject()], is_bounded=False))
                    _check_empty(topic, source)
                topic.table.commit(
                    lambda before: describe_change(
                        check_current(before, topic), before.partitions, config
                    )
                )
                known = self._metadata.change_topics(replace_config).topic(name)
                self._led_partitions.set_config(topic, known.config)
                # Another broker may have changed it too, or reverted it as an interrupted change.
                topic.table.commit(lambda before: self._as_named(topic, before))
            except BaseException:
                found = self._metadata.known.topics.get(name)
                is_same = found is not None and found.topic_id == topic.topic_id
                before = found.config if found is not None and is_same else was
                self._led_partitions.set_config(topic, before)
                raise
            now = topic.config
        changed = {key: now.get(key) for key in was | now if was.get(key) != now.get(key)}
        log_change("altered a topic", name, client, config=changed)

    def settle(self, name: str) -> None:
        """Reverts a configuration in the table that never reached the metadata.

        A change may have been interrupted between the two, and retention would obey the table.
        Raises `UnknownTopic`, and the store's errors.
        """
        topic = self._led_partitions.topic(name)
        known = self._metadata.known.topics.get(name)
        if known is None or topic.table.snapshot.config == known.config:
            return
        with self._metadata.changing(f"configuration of topic {name}"):
            topic.table.commit(lambda before: self._as_named(topic, before))

    def _as_named(self, topic: Topic, before: TableSnapshot) -> TableChange | None:
        """Returns the change that gives the table the metadata's configuration, if it differs.

        Other brokers change the metadata too. It is read after the table, so the last of several
        such commits has the newest configuration.
        """
        known = entry_of(self._metadata.reload().topics, topic)
        if check_current(before, topic).config == known.config:
            return None
        return describe_change(before, before.partitions, known.config)


def _check_empty(topic: Topic, source: str | None) -> None:
    """Checks that a new mirror is empty: existing records may differ from those of its source.

    Raises `BadOption` and `InternalTopic`.
    """
    check_not_internal(topic.name, "mirror records to")
    if len(topic.partitions) < topic.count:
        reason = f"several brokers lead topic {topic.name}; create a topic as a mirror instead"
        raise errors.BadOption(option=MIRROR_SOURCE, value=source, reason=reason)
    if any(each.end or not each.is_end_known for each in topic.partitions.values()):
        reason = f"topic {topic.name} has had records; only an empty topic becomes a mirror"
        raise errors.BadOption(option=MIRROR_SOURCE, value=source, reason=reason)
