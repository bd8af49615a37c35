"""Keeps the schemas of the root up to date with an outside registry, and the columns with them.

Rules:

- One thread asks the registry. No record waits for it: an ack needs no schema, and a publication
  waits for an unknown one at most `value.wait.ms`, once for each schema, and not at all while the
  registry gives no answer.
- A schema is asked for when records name it. Its text is put into the root before anything is
  decoded by it, so each program decodes by the same text forever. It is compared with the registry
  again after a day, and by each broker once.
- A schema that the registry does not know is asked for again once a minute. Bytes that only look
  like the id of a schema are bounded: beyond `IDS_MAX` unknown schemas, none is waited for.
- New fields of the topic's subject become columns by a commit that is decided on exactly the
  version before it, so several brokers may do it at once. Each change of columns ends running Delta
  streams and fails transactions of other engines, so further changes are made together, at
  growing intervals.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import structlog

from sparklog import errors, limits
from sparklog.broker.backoff import RetrySchedule
from sparklog.broker.log.led_partitions import LedPartitions
from sparklog.broker.log.topic import Topic
from sparklog.broker.loops import Loops
from sparklog.broker.schema_registry import SchemaRegistry
from sparklog.clock import Clock
from sparklog.formats import topic_config
from sparklog.formats.schema_messages import RegistryInfo, WaitingRecords
from sparklog.formats.values import evolution
from sparklog.formats.values.columns import waiting_of
from sparklog.formats.values.registered import RegisteredSchema
from sparklog.storage.schema_texts import SchemaTexts
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table.changes import TableChange, columns_change

if TYPE_CHECKING:
    from sparklog.formats.values.avro.schema import AvroSchema

IDS_MAX: Final = 1_000
"""Unknown schemas that are remembered, and schemas of a topic that have been looked at."""
UNKNOWN_SECONDS: Final = 60.0
"""The interval at which a schema is asked for that the registry does not know."""
COMPARED_SECONDS: Final = 24 * 3_600.0
"""The interval at which a text is compared with the registry."""
COMMIT_FIRST_SECONDS: Final = 10.0
COMMIT_MOST_SECONDS: Final = 600.0
"""The least time between two changes of a topic's columns, and what it grows to."""
SCAN_SECONDS: Final = 10.0
"""The interval at which topics without columns are looked for."""
_ASKED_AT_ONCE: Final = 50
"""Requests for schemas in one pass, which takes at least a second if there are more."""
_RETRY_FIRST_SECONDS: Final = 1.0
_RETRY_MOST_SECONDS: Final = 30.0
_REGISTRY: Final = "registry"

_log = structlog.get_logger("sparklog.registry")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryState:
    """The registry as a broker knows it."""

    url: str
    requests: int
    failures: int
    down_since_us: int | None
    """When it began to give no answer, in µs since the Unix epoch; None if it does."""
    reason: str
    """Why it gives no answer; empty if it does."""
    unknown: Sequence[int]
    """Schemas that records name, and that it does not have."""
    conflicts: Sequence[int]
    """Schemas of which it has another text than the root."""


@dataclass(slots=True)
class _OfTopic:
    """State of the schemas of one topic."""

    rule: str = ""
    """The subject whose fields become columns; empty if those of no schema do."""
    looked_at: set[int] = field(default_factory=set)
    """Schemas whose fields have been compared with the columns."""
    pending: dict[int, None] = field(default_factory=dict)
    """Schemas for which that is to be done, in the order in which they were met."""
    awaited: set[int] = field(default_factory=set)
    """Schemas that the present publication waits for."""
    deadline: float | None = None
    """When that wait ends, in monotonic seconds."""
    committed_at: float = -float("inf")
    """When its columns were last changed, in monotonic seconds."""
    pause_seconds: float = COMMIT_FIRST_SECONDS
    first_due: float = -float("inf")
    """When its subject may be looked up for the first columns again, in monotonic seconds."""


class SchemaKeeper:
    """Schemas and columns of the topics that a broker leads. Thread-safe; `work` has one caller."""

    def __init__(
        self,
        registry: SchemaRegistry,
        texts: SchemaTexts,
        led_partitions: LedPartitions,
        *,
        clock: Clock,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_stopping`: true once the broker stops: then nothing waits any more."""
        self._registry = registry
        self._texts = texts
        self._led_partitions = led_partitions
        self._clock = clock
        self._is_stopping = is_stopping
        self.wake = threading.Event()
        """Set when there is something to ask the registry."""
        self._lock = threading.Lock()
        """Guards the fields below; never held during a request."""
        self._topics: dict[str, _OfTopic] = {}
        self._wanted: dict[int, None] = {}
        """Schemas to ask for, in the order in which they were met."""
        self._unknown: OrderedDict[int, float] = OrderedDict()
        """When to ask again for schemas that the registry does not have (monotonic)."""
        self._given_up: set[int] = set()
        """Schemas that no publication waits for any more."""
        self._compared: OrderedDict[int, float] = OrderedDict()
        """When the texts that are in use were last compared (monotonic)."""
        self._conflicts: set[int] = set()
        self._loader: threading.Thread | None = None
        """Loads the loop that decodes Avro; to be started once there is a schema.

        The first time on a machine takes so long that neither this thread nor a publication may
        wait for it.
        """
        self._has_marks = False
        """True once those are known that other brokers have found."""
        self._backoff = RetrySchedule(
            clock, first_seconds=_RETRY_FIRST_SECONDS, most_seconds=_RETRY_MOST_SECONDS
        )
        self._scan_due = -float("inf")
        self._down_since_us: int | None = None
        self._reason = ""

    # -------------------------------------------------------------------------- publishing

    def pauses(self, topic: Topic) -> bool:
        """Returns whether the topic's publication waits for schemas at present."""
        of_topic = self._topics.get(topic.topic_id)
        if of_topic is None or of_topic.deadline is None or self._is_stopping():
            return False
        return self._clock.monotonic() < of_topic.deadline

    def waits_for(self, topic: Topic) -> Collection[int] | None:
        """Returns the schemas that a publication of the topic does not wait for; None: for none."""
        if self._is_stopping() or self._down_since_us is not None:
            return None
        with self._lock:
            of_topic = self._topics.get(topic.topic_id)
            if of_topic is not None and of_topic.deadline is not None:
                return None  # it has waited
            if len(self._given_up) >= IDS_MAX or len(self._unknown) >= IDS_MAX:
                return None
            return tuple(self._given_up | self._conflicts)

    @property
    def withheld(self) -> tuple[int, ...]:
        """Schemas that no value is decoded by."""
        return tuple(self._conflicts) if self._conflicts else ()

    def awaits(self, topic: Topic, schema_ids: Iterable[int]) -> None:
        """Notes that a publication waits for schemas."""
        seconds = topic_config.wait_seconds(topic.config)
        with self._lock:
            of_topic = self._topics.setdefault(topic.topic_id, _OfTopic())
            if of_topic.deadline is None:
                of_topic.deadline = self._clock.monotonic() + seconds
            of_topic.awaited |= set(schema_ids)
            self._want(schema_ids)
            self._look(topic, of_topic, schema_ids)
        self.wake.set()

    def published(self, topic: Topic, files: Iterable[TableFile]) -> None:
        """Notes the schemas of records that are in the table now."""
        named = {each for file in files for each in file.schemas}
        waiting = {each for file in files for each in waiting_of(file.columns).by_schema}
        if not named and not waiting and topic.topic_id not in self._topics:
            return
        with self._lock:
            of_topic = self._topics.setdefault(topic.topic_id, _OfTopic())
            of_topic.deadline = None
            of_topic.awaited.clear()
            if len(self._given_up) < IDS_MAX:
                self._given_up |= waiting
            self._want(waiting)
            self._want(each for each in named - waiting if self._is_to_compare(each))
            is_new = self._look(topic, of_topic, named)
            has_work = bool(self._wanted) or is_new
        if has_work:
            self.wake.set()

    def ready(self, topic_id: str, schema_ids: Iterable[int]) -> frozenset[int]:
        """Returns those of the schemas that rows wait for whose columns have been added.

        The others are asked for.
        """
        topic = self._led_partitions.by_id(topic_id)
        wanted = frozenset(schema_ids)
        if topic is None:
            return wanted
        with self._lock:
            of_topic = self._topics.setdefault(topic_id, _OfTopic())
            self._want(wanted)
            self._look(topic, of_topic, wanted)
            left = wanted & of_topic.pending.keys()
        self.wake.set()
        return wanted - left

    def _want(self, schema_ids: Iterable[int]) -> None:
        for each in schema_ids:
            if each not in self._unknown and len(self._wanted) < IDS_MAX:
                self._wanted[each] = None

    def _look(self, topic: Topic, of_topic: _OfTopic, schema_ids: Iterable[int]) -> bool:
        """Notes schemas whose fields may lack columns. Returns whether there are any."""
        rule = _rule_of(topic)
        if rule != of_topic.rule:
            of_topic.rule = rule
            of_topic.looked_at.clear()
            of_topic.pending.clear()
        if not rule:
            return False
        new = set(schema_ids) - of_topic.looked_at
        if len(of_topic.looked_at) + len(of_topic.pending) >= IDS_MAX:
            return False
        of_topic.pending |= dict.fromkeys(sorted(new))
        return bool(new)

    def _is_to_compare(self, schema_id: int) -> bool:
        compared = self._compared.get(schema_id, -float("inf"))
        return self._clock.monotonic() - compared >= COMPARED_SECONDS

    # -------------------------------------------------------------------------- the thread

    @property
    def pause_seconds(self) -> float:
        """The time until the next `work` that is due even if nothing wakes it."""
        with self._lock:
            now = self._clock.monotonic()
            deadlines = [each.deadline for each in self._topics.values() if each.deadline]
            if deadlines:
                return min(max(min(deadlines) - now, 0.01), 1.0)
        return 1.0

    def follow(self, loops: Loops) -> None:
        """Starts the thread."""
        self._loader = threading.Thread(target=_load_loop, name="sparklog-avro-loop")

        def repeat() -> None:
            loops.repeat("reading schemas", lambda: self.pause_seconds, self.work, wake=self.wake)

        loops.start("schemas", repeat)

    def work(self) -> None:
        """Asks for schemas that are wanted, and adds columns that are due.

        Raises the store's errors for texts; those of a topic's table are logged.
        """
        if not self._has_marks:
            marked = self._texts.conflicts()
            with self._lock:
                self._conflicts.update(marked)
            self._has_marks = True
        self._ask_all()
        self._end_waits()
        self._scan()
        self._evolve_all()
        if self._compared and self._loader is not None:
            self._loader.start()
            self._loader = None

    def _ask_all(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            due = [each for each, at in self._unknown.items() if at <= now]
            wanted = [*self._wanted, *due][:_ASKED_AT_ONCE]
        if not wanted or self._backoff.is_waiting(_REGISTRY):
            return
        for each in wanted:
            if self._is_stopping():
                return
            try:
                found = self._registry.schema(each)
            except errors.RegistryUnavailable as error:
                self._note_down(error)
                return
            self._note_up()
            is_kept = found is not None and self._keep(each, found)
            self._answered(each, is_kept=is_kept, is_unknown=found is None)

    def _keep(self, schema_id: int, schema: RegisteredSchema) -> bool:
        """Puts a text into the root. Returns false if the root has another one."""
        is_same = self._texts.put(schema_id, schema, clock=self._clock)
        with self._lock:
            self._compared[schema_id] = self._clock.monotonic()
            if len(self._compared) > IDS_MAX:
                self._compared.popitem(last=False)
            is_new = not is_same and schema_id not in self._conflicts
            if is_new:
                self._conflicts.add(schema_id)
        if is_new:
            _log.error(
                "the registry has another schema under an id that the root knows: records with it"
                " wait",
                id=schema_id,
                url=self._registry.url,
            )
        return is_same

    def _answered(self, schema_id: int, *, is_kept: bool, is_unknown: bool) -> None:
        with self._lock:
            self._wanted.pop(schema_id, None)
            self._unknown.pop(schema_id, None)
            if is_kept:
                self._given_up.discard(schema_id)
            elif len(self._given_up) < IDS_MAX:
                self._given_up.add(schema_id)
            if is_unknown:
                self._unknown[schema_id] = self._clock.monotonic() + UNKNOWN_SECONDS
                if len(self._unknown) > IDS_MAX:
                    self._given_up.discard(self._unknown.popitem(last=False)[0])
            over = [
                (topic_id, each)
                for topic_id, each in self._topics.items()
                if schema_id in each.awaited
            ]
            for _, each in over:
                each.awaited.discard(schema_id)
        for topic_id, each in over:
            topic = self._led_partitions.by_id(topic_id)
            if topic is not None and is_kept:
                self._try_evolve(topic, each)  # before its first record
            if not each.awaited:
                self._end_wait(topic_id, each)

    def _end_waits(self) -> None:
        """Ends the waits of publications that have waited long enough."""
        now = self._clock.monotonic()
        with self._lock:
            late = [
                (topic_id, each)
                for topic_id, each in self._topics.items()
                if each.deadline is not None
                and (now >= each.deadline or self._down_since_us is not None)
            ]
        for topic_id, each in late:
            with self._lock:
                if len(self._given_up) < IDS_MAX:
                    self._given_up |= each.awaited
                each.awaited.clear()
            self._end_wait(topic_id, each)

    def _end_wait(self, topic_id: str, of_topic: _OfTopic) -> None:
        with self._lock:
            of_topic.deadline = None
        topic = self._led_partitions.by_id(topic_id)
        if topic is not None:
            self._led_partitions.backlog.request(topic)

    def _note_down(self, error: errors.RegistryUnavailable) -> None:
        self._backoff.failed(_REGISTRY)
        if self._down_since_us is None:
            self._down_since_us = self._clock.now_us()
            _log.error(
                "the schema registry gives no answer: records with unknown schemas wait for their"
                " columns",
                url=error.url,
                reason=error.reason,
            )
        self._reason = error.reason

    def _note_up(self) -> None:
        self._backoff.succeeded(_REGISTRY)
        if self._down_since_us is not None:
            seconds = round((self._clock.now_us() - self._down_since_us) / 1e6)
            self._down_since_us, self._reason = None, ""
            _log.info("the schema registry answers again", url=self._registry.url, seconds=seconds)

    # -------------------------------------------------------------------------- columns

    def _scan(self) -> None:
        """Finds topics that have no columns yet, for which the registry may have a schema."""
        now = self._clock.monotonic()
        if now < self._scan_due:
            return
        self._scan_due = now + SCAN_SECONDS
        topics = {each.topic_id: each for each in self._led_partitions.topics()}
        with self._lock:
            for gone in self._topics.keys() - topics.keys():
                del self._topics[gone]
        for topic_id, topic in topics.items():
            if not topic_config.has_subject(topic.config):
                continue
            columns = topic.table.snapshot.columns
            if columns is not None and not columns.filled:
                with self._lock:
                    of_topic = self._topics.setdefault(topic_id, _OfTopic())
                if now >= of_topic.first_due:
                    self._try_evolve(topic, of_topic)

    def _evolve_all(self) -> None:
        with self._lock:
            pending = [(key, each) for key, each in self._topics.items() if each.pending]
        for topic_id, of_topic in pending:
            topic = self._led_partitions.by_id(topic_id)
            if topic is None:
                with self._lock:
                    self._topics.pop(topic_id, None)
            elif not self._is_stopping():
                self._try_evolve(topic, of_topic)

    def _try_evolve(self, topic: Topic, of_topic: _OfTopic) -> None:
        if self._backoff.is_waiting(_REGISTRY) or self._backoff.is_waiting(topic.topic_id):
            return
        try:
            self._evolve(topic, of_topic)
        except errors.RegistryUnavailable as error:
            self._note_down(error)
        except errors.SparklogError as error:
            _log.warning("columns cannot be added", topic=topic.name, reason=str(error))
            self._backoff.failed(topic.topic_id)
        else:
            self._backoff.succeeded(topic.topic_id)

    def _evolve(self, topic: Topic, of_topic: _OfTopic) -> None:
        """Adds columns for the schemas of a topic that have not been looked at, if it may now."""
        config, subject = topic.config, _rule_of(topic)
        if not subject or subject != of_topic.rule:
            with self._lock:
                of_topic.pending.clear()
            if not subject:
                return
        now = self._clock.monotonic()
        if now - of_topic.committed_at < of_topic.pause_seconds:
            return
        with self._lock:
            pending = [
                each
                for each in of_topic.pending
                if each not in self._wanted and each not in self._unknown
            ]
        known = self._texts.find(pending)
        columns = topic.table.snapshot.columns
        has_columns = columns is not None and bool(columns.filled)
        found: dict[int, AvroSchema | str] = {}
        if not has_columns:
            of_topic.first_due = now + UNKNOWN_SECONDS
            found |= self._first(subject)
        if topic_config.adds_columns(config) or not has_columns:
            is_unregistered = not has_columns and not found
            of_subject = self._of_subject(known, subject, is_unregistered=is_unregistered)
            found |= of_subject
        if found:
            self._add(topic, of_topic, found)
        with self._lock:
            for each in known:
                of_topic.pending.pop(each, None)
                of_topic.looked_at.add(each)

    def _first(self, subject: str) -> dict[int, AvroSchema | str]:
        """Returns the latest version of a subject, if there is one."""
        latest = self._registry.latest(subject)
        self._note_up()
        if latest is None or not self._keep(latest.id, latest.schema):
            return {}
        return {latest.id: latest.schema.parsed()}

    def _of_subject(
        self, known: Mapping[int, AvroSchema | str], subject: str, *, is_unregistered: bool
    ) -> dict[int, AvroSchema | str]:
        """Returns the schemas that belong to a topic's subject.

        `is_unregistered`: the registry does not have the subject, so the first schemas count.
        """
        found = {}
        for each, schema in known.items():
            subjects = None if is_unregistered else self._registry.subjects(each)
            if subjects is None and not is_unregistered:
                latest = self._registry.latest(subject)  # an old registry cannot say more
                subjects = frozenset({subject} if latest is not None and latest.id == each else {})
            if is_unregistered or subject in (subjects or ()):
                found[each] = schema
                is_unregistered = False  # other records of the topic may be of another type
        return found

    def _add(
        self, topic: Topic, of_topic: _OfTopic, schemas: Mapping[int, AvroSchema | str]
    ) -> None:
        """Adds the fields of schemas to the columns of a topic's table."""
        from sparklog.formats.values.avro.schema import fields_of

        fields = [
            each
            for schema in schemas.values()
            if not isinstance(schema, str)
            for each in fields_of(schema).fields
        ]
        added: list[str] = []
        left_out: Sequence[str] = ()
        is_first = True

        def decide(before: TableSnapshot) -> TableChange | None:
            nonlocal added, left_out, is_first
            added = []
            if before.topic_id != topic.topic_id or not topic_config.has_subject(before.config):
                return None
            evolved = evolution.with_schema(before.columns, fields)
            left_out = evolved.left_out
            if evolved.columns is None or evolved.columns == before.columns:
                return None
            known = {each.name for each in (before.columns.filled if before.columns else ())}
            is_first = not known
            added = [each.name for each in evolved.columns.filled if each.name not in known]
            return columns_change(evolved.columns)

        topic.table.commit(decide)
        if not added and not left_out:
            return
        if added and not is_first:
            now = self._clock.monotonic()
            is_again = now - of_topic.committed_at < 2 * of_topic.pause_seconds
            doubled = min(2 * of_topic.pause_seconds, COMMIT_MOST_SECONDS)
            of_topic.pause_seconds = doubled if is_again else COMMIT_FIRST_SECONDS
            of_topic.committed_at = now
        _log.info(
            "compared the columns with schemas",
            topic=topic.name,
            schemas=sorted(schemas),
            added=added,
            left_out=list(left_out),
        )

    # -------------------------------------------------------------------------- state

    def info(self) -> RegistryInfo:
        """Returns the state of the registry, and the topics whose records wait."""
        state = self.state()
        waiting = [
            WaitingRecords(topic=topic.name, records=records)
            for topic in self._led_partitions.topics()
            if (records := topic.table.snapshot.waiting_rows)
        ]
        return RegistryInfo(
            url=state.url,
            down_since_us=state.down_since_us or 0,
            reason=state.reason,
            waiting=waiting[: limits.STATUS_TOPICS],
            conflicts=list(state.conflicts[: limits.STATUS_TOPICS]),
        )

    def state(self) -> RegistryState:
        """Returns the state of the registry."""
        registry = self._registry
        with self._lock:
            unknown, conflicts = sorted(self._unknown), sorted(self._conflicts)
        return RegistryState(
            url=registry.url,
            requests=registry.requests,
            failures=registry.failures,
            down_since_us=self._down_since_us,
            reason=self._reason,
            unknown=unknown,
            conflicts=conflicts,
        )


def _rule_of(topic: Topic) -> str:
    """Returns the subject whose fields become columns now; empty if those of no schema do."""
    config, columns = topic.config, topic.table.snapshot.columns
    is_first = columns is None or not columns.filled
    if topic_config.adds_columns(config) or (is_first and topic_config.has_subject(config)):
        return topic_config.subject_of(config, topic.name)
    return ""


def _load_loop() -> None:
    from sparklog.formats.values.avro import loops  # topics without Avro do without it

    unsaved = loops.load()
    if unsaved is not None:
        _log.warning("compiled loops for Avro could not be saved", reason=str(unsaved))
