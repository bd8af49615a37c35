"""Spark batches for topics that several brokers lead: each appends its part, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.broker.log.janitor import SWEEP_EVERY_SECONDS
from sparklog.broker.log.spark_batches import APPEND_STAGED_SECONDS, SINGLE_APPEND_STAGED_SECONDS
from sparklog.client.connection import Backoff, Retry
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import AlterTopic, AppendStaged, AppendStagedReply
from sparklog.sinks import commit as commits
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import MemoryStore
from sparklog.storage.snapshot import BatchId, BatchKind
from sparklog.storage.staging import manifest
from sparklog.storage.staging.sweep import PARTS_KEPT_SECONDS
from tests.support.brokers import Rig, RigOptions, payload, rows_of_table

MEMBER = RigOptions(is_member=True)
DAY = 24 * 3600.0
BATCH = manifest.Manifest(query="q", batch=0)
PARTITIONS = range(4)
Members = tuple[Rig, Rig]


@pytest.fixture(name="members")
def _members(store: MemoryStore, clock: ManualClock) -> Members:
    """Two members, each of which leads two of the four partitions of t."""
    first, second = (Rig(store, clock, broker=number, options=MEMBER) for number in (1, 2))
    first.reconciler.tick()
    first.create("t", 4)
    second.reconciler.tick()
    return first, second


class Driver:
    """Commits batches as Spark's driver does, with members that it asks directly."""

    def __init__(self, members: Sequence[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rigs = {rig.leadership.broker: rig for rig in members}
        self.store, self.clock = members[0].store, members[0].clock
        self.asked: list[int] = []
        self.down: set[int] = set()
        monkeypatch.setattr(commits, "open_store", lambda *_: self.store)
        monkeypatch.setattr(commits, "SystemClock", lambda: self.clock)
        monkeypatch.setattr(commits, "_connect", lambda *_: SimpleNamespace(connection=self))

    def retry(self, seconds: float) -> Retry:
        return Retry(self.clock, seconds, Backoff(jitter=lambda: 1.0))

    def attempt(
        self, name: str, request: AppendStaged, *, timeout_seconds: float, broker: int = -1
    ) -> AppendStagedReply:
        assert name == "batches.append_staged"
        assert timeout_seconds > 0
        live = [each for each in self.rigs if each not in self.down]
        asked = live[0] if broker < 0 else broker
        if asked not in live:
            raise errors.BrokerUnavailable(address=f"broker {asked}", reason="it is down")
        self.asked.append(asked)
        return self.rigs[asked].broker.staged.append(request)

    def action(
        self, name: str, request: AppendStaged, *, timeout_seconds: float
    ) -> AppendStagedReply:
        """Asks again as `Connection.action` does."""
        retry = self.retry(timeout_seconds)
        while True:
            try:
                return self.attempt(name, request, timeout_seconds=retry.left_seconds)
            except (errors.TimedOut, errors.NotLeader):
                raise
            except errors.Retriable as error:
                retry.wait_or_raise(error)

    def brokers(self) -> list[int]:
        return list(self.rigs)

    def stage(
        self,
        rows: Mapping[int, str],
        *,
        batch: int = 0,
        query: str = "q",
        attempt: int = 0,
        topic: str = "t",
        **columns: Any,
    ) -> list[manifest.Section]:
        """Stages a row for each of some partitions."""
        writer = manifest.StagingWriter(
            self.store, query=query, batch=batch, clock=self.clock, attempt=attempt
        )
        for number, value in rows.items():
            writer.add(topic, number, payload([value], **columns))
        return writer.finish()

    def commit(
        self,
        rows: Mapping[int, str],
        *,
        batch: int = 0,
        query: str = "q",
        kind: BatchKind = BatchKind.NUMBERED,
        **columns: Any,
    ) -> None:
        topics = self.topics()
        attempt = manifest.open_attempt(self.store, query, batch, topics)
        sections = self.stage(rows, batch=batch, query=query, attempt=attempt, **columns)
        commits.commit(
            "root", {}, query=query, batch=batch, sections=sections, topics=topics, kind=kind
        )

    def topics(self) -> manifest.Destinations:
        return manifest.destinations(MetadataStore(self.store, clock=self.clock).reload().topics)

    def decide(self, rows: Mapping[int, str], **batch: Any) -> str:
        """Stages a batch and puts its manifest, as a driver that dies then."""
        sections = tuple(self.stage(rows, **batch))
        decided = manifest.Manifest(
            query=batch.get("query", "q"),
            batch=batch.get("batch", 0),
            sections=sections,
            topic_ids={"t": self.topics()["t"].topic_id},
        )
        return manifest.write(self.store, decided, self.clock).path

    def files(self) -> list[str]:
        """The names of all staged objects, those of data files without their random part."""
        names = [stat.name.rpartition("/")[2] for stat in self.store.walk("staging")]
        return sorted("rows" if each.endswith(".arrow") else each for each in names)


@pytest.fixture(name="driver")
def _driver(members: Members, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(members, monkeypatch)


def rows(members: Sequence[Rig]) -> dict[int, list[bytes | None]]:
    """The values of each partition, as its leader serves them."""
    found = {}
    for rig in members:
        for number in rig.led_partitions.topic("t").partitions:
            found[number] = [value for _, value in rig.read(partition=number)]
    return dict(sorted(found.items()))


def _each_once(*values: bytes) -> dict[int, list[bytes]]:
    return {number: list(values) for number in PARTITIONS}


def _everywhere(value: str) -> dict[int, str]:
    return dict.fromkeys(PARTITIONS, value)


def move(first: Rig, second: Rig, *numbers: int) -> None:
    """Gives partitions of the first member to the second."""
    assert first.handovers.move({("t", each): second.leadership.broker for each in numbers})
    second.reconciler.tick()
    first.reconciler.tick()


def _led(rig: Rig) -> list[int]:
    return sorted(rig.led_partitions.topic("t").partitions)


def recreate(members: Members, partitions: int) -> None:
    """Deletes t, and creates a topic of that name, which both members lead."""
    first, second = members
    first.broker.topics.delete("t")
    for rig in members:
        rig.reconciler.tick()
    first.create("t", partitions)
    second.reconciler.tick()


def second_topic(members: Members, driver: Driver, partitions: int) -> dict[str, str]:
    """Creates topic u, which both members know. Returns the ids of t and u."""
    first, second = members
    first.create("u", partitions)
    second.reconciler.tick()
    return {name: each.topic_id for name, each in driver.topics().items()}


def sweep(members: Members, clock: ManualClock, seconds: float) -> None:
    """Publishes everything, lets time pass, and has the controller sweep."""
    for rig in members:
        rig.publish()
        rig.confirmer.confirm()
    clock.advance(seconds)
    members[0].janitor.tick()


# ------------------------------------------------------------------------------ appending


def test_each_leader_appends_its_part(members: Members, driver: Driver) -> None:
    """All rows are there once when the commit returns, and a receipt says where."""
    driver.commit(_everywhere("a"))
    assert rows(members) == _each_once(b"a")
    assert sorted(driver.asked) == [1, 2]
    receipt = manifest.find_receipt(driver.store, BATCH)
    assert receipt is not None
    assert receipt.ranges == {"t": dict.fromkeys(PARTITIONS, (0, 1))}
    driver.commit(_everywhere("b"), batch=1)
    assert rows(members) == _each_once(b"a", b"b")


def test_a_rerun_does_not_append_again(
    members: Members, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own files do not count: the first manifest decides, and its receipt says it is done."""
    driver.commit({0: "a", 1: "b"})
    driver.asked.clear()
    driver.commit({2: "a", 3: "b"})
    assert rows(members) == {0: [b"a"], 1: [b"b"], 2: [], 3: []}
    assert not driver.asked
    assert "appended before" in caplog.text
    assert driver.files() == ["appended.json", "manifest.json", "rows"]


@pytest.mark.parametrize("moves", [False, True])
def test_a_rerun_completes_what_is_missing(
    members: Members, driver: Driver, *, moves: bool
) -> None:
    """A driver died after the first leader; its partitions may have moved since."""
    first, second = members
    path = driver.decide(_everywhere("a"))
    reply = first.broker.staged.append(AppendStaged(manifest=path))
    assert sorted(reply.ranges["t"]) == _led(first)
    assert reply.elsewhere == {"t": dict.fromkeys(_led(second), 2)}
    if moves:
        move(first, second, *_led(first)[:1])
    driver.commit(_everywhere("x"))
    assert rows(members) == _each_once(b"a")


@pytest.mark.parametrize("partitions", [4, 1])
def test_a_topic_that_is_created_again_gets_the_batch(
    members: Members, driver: Driver, clock: ManualClock, *, partitions: int
) -> None:
    """A receipt of the topic that was deleted is none of the new one, which may be smaller."""
    driver.commit(_everywhere("a"))
    driver.commit({0: "named"}, query="n", kind=BatchKind.NAMED)
    recreate(members, partitions)
    whole = dict.fromkeys(range(partitions), "a")
    for _ in range(2):
        driver.commit(whole)
        driver.commit({0: "named"}, query="n", kind=BatchKind.NAMED)
    assert rows(members) == {0: [b"a", b"named"], **{n: [b"a"] for n in range(1, partitions)}}
    driver.commit(whole, batch=1)
    sweep(members, clock, 2 * SWEEP_EVERY_SECONDS)
    sweep(members, clock, PARTS_KEPT_SECONDS + SWEEP_EVERY_SECONDS)
    driver.commit(whole, batch=1)
    assert rows(members)[0] == [b"a", b"named", b"a"]


def test_a_manifest_without_ids_is_understood(members: Members, driver: Driver) -> None:
    """The receipt of an older release names them, or a partition that does not exist shows it."""
    driver.commit(_everywhere("a"))
    undone = driver.decide(_everywhere("b"), query="undone")
    for path in (BATCH.path, undone):
        decoded = msgspec.json.decode(driver.store.get(path))
        del decoded["topic_ids"]
        driver.store.put(path, msgspec.json.encode(decoded))
    driver.commit(_everywhere("x"))
    assert rows(members) == _each_once(b"a")
    recreate(members, 1)
    driver.commit({0: "a"})
    driver.commit({0: "b"}, query="undone")
    assert rows(members) == {0: [b"a", b"b"]}


def test_rows_for_a_deleted_topic_go_with_it(
    members: Members, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """The topics that still exist have the batch; a warning names the others."""
    ids = second_topic(members, driver, 1)
    decided = driver.stage({0: "a"}) + driver.stage({0: "a"}, topic="u")
    manifest.write(
        driver.store,
        manifest.Manifest(query="q", batch=0, sections=tuple(decided), topic_ids=ids),
        driver.clock,
    )
    recreate(members, 4)
    for _ in range(2):
        rerun = driver.stage({0: "b"}) + driver.stage({0: "b"}, topic="u")
        topics = driver.topics()
        commits.commit("root", {}, query="q", batch=0, sections=rerun, topics=topics)
        assert "batch 0 of q for topic t are not written" in caplog.text
        caplog.clear()
    assert rows(members) == {number: [] for number in PARTITIONS}
    leader = next(rig for rig in members if rig.led_partitions.topic("u").partitions)
    assert leader.read("u", partition=0) == [(0, b"a")]


def test_a_deleted_topic_takes_its_rows_along(
    members: Members, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """The other topics of the batch get theirs, and each rerun finds it done."""
    first, _ = members
    ids = second_topic(members, driver, 4)

    def stage() -> tuple[manifest.Section, ...]:
        return tuple(
            section
            for topic in ("t", "u")
            for section in driver.stage(_everywhere("a"), topic=topic)
        )

    decided = manifest.Manifest(query="q", batch=0, sections=stage(), topic_ids=ids)
    path = manifest.write(driver.store, decided, driver.clock).path
    first.broker.staged.append(AppendStaged(manifest=path))  # of both topics, and then it dies
    first.broker.topics.delete("t")
    for rig in members:
        rig.reconciler.tick()
    for _ in range(2):
        sections = driver.stage(_everywhere("x"), topic="u")
        commits.commit("root", {}, query="q", batch=0, sections=sections, topics=driver.topics())
    found = {
        number: [value for _, value in rig.read(partition=number, topic="u")]
        for rig in members
        for number in rig.led_partitions.topic("u").partitions
    }
    assert found == {number: [b"a"] for number in PARTITIONS}
    ranges = {"t": {0: (0, 1)}, "u": {0: (0, 1)}}
    partly = manifest.Receipt(ranges=ranges, topic_ids={"u": ids["u"]})
    assert partly.holders(driver.topics()) == {"u"}


def test_a_topic_that_is_deleted_while_its_rows_are_staged(driver: Driver) -> None:
    """The driver knows it when it commits, and names the topic."""
    sections = driver.stage({0: "a"})
    with pytest.raises(errors.UnknownTopic, match="'t'"):
        commits.commit("root", {}, query="q", batch=0, sections=sections, topics={})
    assert driver.files() == ["rows"]


def test_a_topic_that_is_deleted_while_its_batch_is_checked(
    members: Members, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep removes its staged rows, which are not lost: the driver asks again."""
    first, second = members
    path = driver.decide(_everywhere("a"))
    list_after = second.broker.staged._store.list_after

    def delete_and_list(prefix: str, *given: Any, **more: Any) -> Any:
        monkeypatch.undo()
        first.broker.topics.delete("t")
        driver.store.delete([f"{prefix}/{stat.name}" for stat in driver.store.list_after(prefix)])
        return list_after(prefix, *given, **more)

    monkeypatch.setattr(second.broker.staged._store, "list_after", delete_and_list)
    with pytest.raises(errors.MetadataChanged):
        second.broker.staged.append(AppendStaged(manifest=path))
    assert driver.files() == []


def test_a_broker_that_is_behind_does_not_judge(members: Members, driver: Driver) -> None:
    """A topic that it does not know yet is not one that is gone: the driver asks again."""
    first, second = members
    first.broker.topics.delete("t")
    first.reconciler.tick()
    first.create("t", 4)
    path = driver.decide(_everywhere("a"))
    with pytest.raises(errors.MetadataChanged):
        second.broker.staged.append(AppendStaged(manifest=path))
    for rig in members:
        rig.reconciler.tick()
    driver.commit(_everywhere("x"))
    assert rows(members) == _each_once(b"a")


def test_a_batch_of_a_topic_that_is_gone_is_refused(members: Members, driver: Driver) -> None:
    """It was created again between staging and commit: another run stages for the new one."""
    path = driver.decide(_everywhere("a"))
    recreate(members, 4)
    with pytest.raises(errors.BadRequest, match="was staged for t before"):
        members[0].broker.staged.append(AppendStaged(manifest=path))
    driver.commit(_everywhere("b"))
    assert rows(members) == _each_once(b"b")


def test_one_leader_may_get_everything(members: Members, driver: Driver) -> None:
    """It remembers the parts that others have appended, and appends the rest alone."""
    first, second = members
    path = driver.decide(_everywhere("a"))
    first.broker.staged.append(AppendStaged(manifest=path))
    move(first, second, *_led(first))
    driver.down = {1}
    driver.commit(_everywhere("x"))
    assert rows([second]) == _each_once(b"a")
    driver.commit(_everywhere("b"), batch=1)  # it is whole now
    assert second.led_partitions.topic("t").spark_batches.newest("q") == 1
    assert rows([second]) == _each_once(b"a", b"b")


def test_a_successor_remembers_parts(
    members: Members, driver: Driver, store: MemoryStore, clock: ManualClock
) -> None:
    """The log, its checkpoint and the table say that it has a part only."""
    first, second = members
    path = driver.decide(_everywhere("a"))
    first.broker.staged.append(AppendStaged(manifest=path))
    number = _led(first)[0]
    first.publish()
    first.wal_cleaner.checkpoint()
    again = Rig(store, clock, broker=1, options=MEMBER)
    assert again.read(partition=number) == [(0, b"a")]
    assert again.led_partitions.topic("t").spark_batches.begun("q") == 0
    assert again.led_partitions.topic("t").spark_batches.newest("q") == -1
    driver.rigs[1] = again
    driver.commit(_everywhere("x"))
    assert rows([again, second]) == _each_once(b"a")


def test_a_leader_that_is_down_is_waited_for(
    members: Members, driver: Driver, clock: ManualClock
) -> None:
    """The error names the rows that were appended; a later commit completes the batch."""
    driver.down = {2}
    began = clock.monotonic()
    with pytest.raises(errors.BrokerUnavailable, match="broker 2") as caught:
        driver.commit(_everywhere("a"))
    waited_seconds = clock.monotonic() - began
    assert waited_seconds == pytest.approx(limits.SPARK_PATIENCE_SECONDS, rel=0.05)
    assert "Appended so far" in caught.value.__notes__[0]
    assert manifest.find_receipt(driver.store, BATCH) is None
    driver.down = set()
    driver.commit(_everywhere("x"))
    assert rows(members) == _each_once(b"a")


def test_a_batch_waits_for_a_partition_that_moves(members: Members, driver: Driver) -> None:
    """No broker serves it for a moment; then its new leader appends the rows."""
    first, second = members
    number = _led(first)[0]
    assert first.handovers.move({("t", number): 2}) == 1
    sleep = driver.clock.sleep

    def sleep_and_follow(seconds: float) -> None:
        sleep(seconds)
        second.reconciler.tick()
        first.reconciler.tick()

    driver.clock.sleep = sleep_and_follow  # type: ignore[method-assign]
    driver.commit(_everywhere("a"))
    assert rows(members) == _each_once(b"a")
    assert number in _led(second)


def test_a_partition_that_leaves_the_broker_in_use(
    members: Members, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked which partitions it leads, and gives one away before it appends."""
    first, second = members
    staged = first.broker.staged
    submit, number = staged._submit, _led(first)[0]

    def give_and_submit(*arguments: Any) -> AppendStagedReply:
        if number in _led(first):
            move(first, second, number)
        return submit(*arguments)

    monkeypatch.setattr(staged, "_submit", give_and_submit)
    driver.commit(_everywhere("a"))
    assert number in _led(second)
    assert rows(members) == _each_once(b"a")


def test_a_request_that_meets_a_part_of_another_one(
    members: Members, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that got no answer asks again while its first request is served: the batch is in
    parts, of which only a receipt shows that they are published.
    """
    first, second = members
    request = AppendStaged(manifest=driver.decide(_everywhere("a")))
    for each in members:
        each.broker.staged.append(request)
    move(second, first, *_led(second))
    staged = first.broker.staged
    monkeypatch.setattr(staged, "_has_others", lambda: False)
    monkeypatch.setattr(staged, "_is_in_parts", lambda _: False)  # it looked before the append
    reply = staged.append(request)
    assert reply.skipped
    assert reply.topic_ids.keys() == {"t"}


# ------------------------------------------------------------------------------ refusing


def test_an_outdated_batch_is_refused(members: Members, driver: Driver) -> None:
    """A suspended driver puts a new manifest of a batch that was swept, for other partitions."""
    first, second = members
    driver.commit({_led(first)[0]: "a"}, batch=0)
    driver.commit({_led(first)[0]: "b"}, batch=1)
    driver.store.delete([f"staging/q/0/{name}" for name in ("manifest.json", "appended.json")])
    late = driver.decide({_led(second)[0]: "late"}, batch=0)
    with pytest.raises(errors.BadRequest, match="arrived after batch 1"):
        second.broker.staged.append(AppendStaged(manifest=late))
    assert not any(second.end(partition=number) for number in _led(second))


def test_a_batch_that_one_broker_appended_stays_whole(
    members: Members, driver: Driver, clock: ManualClock
) -> None:
    """Its manifest is swept as ever; a leader that had no part of it knows it from the table."""
    first, second = members
    move(second, first, *_led(second))
    first.broker.staged._has_others = lambda: False
    driver.commit({0: "a"})
    sweep(members, clock, 2 * SWEEP_EVERY_SECONDS)
    assert driver.files() == []
    move(first, second, 2, 3)
    late = driver.decide({2: "late"})
    reply = second.broker.staged.append(AppendStaged(manifest=late))
    assert reply.skipped
    assert rows(members) == {0: [b"a"], 1: [], 2: [], 3: []}


def test_a_batch_that_one_broker_appended_is_swept_after_a_move(
    members: Members, driver: Driver, clock: ManualClock
) -> None:
    """Others may get its partitions before the next sweep; its receipt shows that it is over."""
    first, second = members
    move(second, first, *_led(second))
    driver.commit({0: "a"}, batch=0)
    driver.commit({0: "b"}, batch=1)
    first.publish()
    for _ in range(3):
        first.confirmer.confirm()
        clock.advance(PARTS_KEPT_SECONDS / 2)
    move(first, second, 0, 1)
    sweep(members, clock, SWEEP_EVERY_SECONDS)
    assert driver.files() == ["appended.json", "manifest.json"]  # of the last batch of the query
    assert rows(members) == {0: [b"a", b"b"], 1: [], 2: [], 3: []}


def test_a_part_is_not_appended_blindly(
    members: Members, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the table cannot be read, a leader may not know that the batch is whole already."""
    first, second = members
    move(second, first, *_led(second))
    driver.commit({0: "a"})
    first.publish()
    driver.store.delete(["staging/q/0/manifest.json"])
    move(first, second, 2, 3)
    late = driver.decide({2: "late"})
    table = second.led_partitions.topic("t").table
    failure = errors.StorageUnavailable(operation="get", path="x", reason="no network")

    def refuse() -> None:
        raise failure

    with monkeypatch.context() as outage:
        outage.setattr(table, "refresh", refuse)
        second.led_partitions.topic("t").spark_batches._newest.clear()
        with pytest.raises(errors.StorageUnavailable):
            second.broker.staged.append(AppendStaged(manifest=late))
    assert second.broker.staged.append(AppendStaged(manifest=late)).skipped
    assert second.end(partition=2) == 0


def test_what_another_leader_would_refuse_is_refused_first(
    members: Members, driver: Driver
) -> None:
    """No part of such a batch is appended then."""
    first, second = members
    topics = driver.topics()
    sections = driver.stage({_led(first)[0]: "a"}, batch=7)
    sections += [msgspec.structs.replace(each, partition=9) for each in sections]
    with pytest.raises(errors.UnknownPartition):
        commits.commit("root", {}, query="q", batch=7, sections=sections, topics=topics)
    first.broker.topics.alter(
        AlterTopic(topic="t", config={"message.timestamp.before.max.ms": "1000"})
    )
    first.reconciler.tick()
    second.reconciler.tick()
    sections = driver.stage({_led(first)[0]: "new"}, batch=8)
    sections += driver.stage({_led(second)[0]: "old"}, batch=8, timestamp=[0])
    with pytest.raises(errors.BadTimestamp):
        commits.commit("root", {}, query="q", batch=8, sections=sections, topics=topics)
    assert rows(members) == {number: [] for number in PARTITIONS}


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        (BatchKind.NUMBERED, APPEND_STAGED_SECONDS),
        (BatchKind.NAMED, SINGLE_APPEND_STAGED_SECONDS),
    ],
)
def test_an_old_part_is_refused(
    members: Members, driver: Driver, clock: ManualClock, kind: BatchKind, seconds: float
) -> None:
    """By then the partition may have forgotten that it has the rows."""
    sections = tuple(driver.stage(_everywhere("a")))
    decided = manifest.Manifest(query="q", batch=0, sections=sections, kind=kind)
    path = manifest.write(driver.store, decided, clock).path
    members[0].broker.staged.append(AppendStaged(manifest=path))
    clock.advance(seconds + 1)
    with pytest.raises(errors.BadRequest, match="so long ago that it may have been appended"):
        members[1].broker.staged.append(AppendStaged(manifest=path))


def test_a_partition_refuses_parts_that_it_would_forget(
    members: Members, driver: Driver, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses those of more queries and writes than it remembers, until the old ones expire."""
    monkeypatch.setattr("sparklog.broker.log.spark_batches.QUERIES_REMEMBERED", 2)
    monkeypatch.setattr("sparklog.broker.log.spark_batches.PARTS_REMEMBERED", 2)
    for kind in (BatchKind.NUMBERED, BatchKind.NAMED):
        for number in range(2):
            driver.commit({0: "a"}, query=f"{kind.name}{number}", kind=kind)
        with pytest.raises(errors.BadRequest, match="too many Spark writes"):
            driver.commit({0: "a"}, query=f"{kind.name}2", kind=kind)
    driver.commit({0: "a"}, query="NUMBERED0", batch=1)
    leader = next(rig for rig in members if 0 in _led(rig))
    leader.publish()
    clock.advance(limits.BATCH_MEMORY_SECONDS + 1)
    leader.wal_cleaner.checkpoint()
    for kind in (BatchKind.NUMBERED, BatchKind.NAMED):
        driver.commit({0: "a"}, query=f"{kind.name}3", kind=kind)
    assert leader.end(partition=0) == 7


# ------------------------------------------------------------------------------ sweeping


def test_a_decision_stays_while_it_may_be_asked_for(
    members: Members, driver: Driver, clock: ManualClock
) -> None:
    """Rows go an hour after all leaders have them, the manifest when a later batch is staged."""
    driver.commit(_everywhere("a"))
    members[0].janitor.tick()  # it sweeps first after a time
    sweep(members, clock, PARTS_KEPT_SECONDS / 2)
    assert driver.files() == ["appended.json", "manifest.json", "rows"]
    sweep(members, clock, PARTS_KEPT_SECONDS)
    assert driver.files() == ["appended.json", "manifest.json"]
    driver.commit(_everywhere("x"))  # as a query does that begins again after a month
    assert driver.files() == ["appended.json", "manifest.json"]
    driver.commit(_everywhere("b"), batch=1)
    sweep(members, clock, 40 * DAY)
    assert driver.files() == ["appended.json", "manifest.json"]
    assert driver.store.folders("staging/q") == ["1"]
    assert [rows_of_table(driver.store, clock, partition=each) for each in PARTITIONS] == [
        [(0, b"a"), (1, b"b")]
    ] * 4


def test_batches_that_are_kept_cost_no_requests(
    members: Members, driver: Driver, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep lists all of them, and reads those that have changed, or are of a deleted topic."""
    for number in range(5):
        driver.commit(_everywhere("a"), query=f"q{number}")
    sweep(members, clock, 2 * PARTS_KEPT_SECONDS)
    assert driver.files() == ["appended.json"] * 5 + ["manifest.json"] * 5
    asked: list[str] = []
    for name in ("get", "stat", "list_after", "folders"):
        of_store = getattr(MemoryStore, name)

        def note(store: MemoryStore, path: str, *rest: Any, of_store: Any = of_store) -> Any:
            asked.extend([path] if path.startswith("staging") else [])
            return of_store(store, path, *rest)

        monkeypatch.setattr(MemoryStore, name, note)
    sweep(members, clock, 2 * SWEEP_EVERY_SECONDS)
    members[1].janitor._staging._sweeps_receipts = lambda: False  # as no controller
    members[1].janitor.tick()
    assert [path for path in asked if path != "staging"] == []
    driver.commit(_everywhere("b"), query="q3", batch=1)
    asked.clear()
    sweep(members, clock, 2 * SWEEP_EVERY_SECONDS)
    assert asked
    assert {path.split("/")[1] for path in asked} == {"q3"}
    members[0].broker.topics.delete("t")
    for _ in range(2):
        members[0].reconciler.tick()
        sweep(members, clock, 2 * PARTS_KEPT_SECONDS)
    assert driver.files() == []


@pytest.mark.parametrize("kind", [BatchKind.NAMED, BatchKind.UNNAMED])
def test_a_single_write_is_swept_in_time(
    members: Members, driver: Driver, clock: ManualClock, kind: BatchKind
) -> None:
    """One with a key is known for 30 days; only its own driver repeats one without."""
    driver.commit(_everywhere("a"), kind=kind)
    members[0].janitor.tick()
    sweep(members, clock, 2 * DAY)
    assert driver.files() == (["appended.json", "manifest.json"] if kind is BatchKind.NAMED else [])
    sweep(members, clock, limits.BATCH_MEMORY_SECONDS)
    assert driver.files() == []


def test_rows_stay_until_all_leaders_have_published_them(
    members: Members, driver: Driver, clock: ManualClock
) -> None:
    """Without a receipt they stay, too: a leader may not have been asked yet."""
    first, _ = members
    path = driver.decide(_everywhere("a"))
    first.broker.staged.append(AppendStaged(manifest=path))
    first.janitor.tick()
    sweep(members, clock, 2 * DAY)
    assert "rows" in driver.files()
    driver.commit(_everywhere("x"))
    first.publish()
    clock.advance(2 * PARTS_KEPT_SECONDS)
    first.janitor.tick()
    assert "rows" in driver.files()
    sweep(members, clock, PARTS_KEPT_SECONDS)
    assert "rows" not in driver.files()
    assert rows(members) == _each_once(b"a")


def test_a_deleted_topic_keeps_nothing(
    members: Members, driver: Driver, clock: ManualClock
) -> None:
    """Its rows can never be published; the decision stays for a rerun."""
    driver.commit(_everywhere("a"))
    members[0].broker.topics.delete("t")
    members[0].janitor.tick()
    clock.advance(2 * PARTS_KEPT_SECONDS)
    members[0].janitor.tick()
    assert "rows" not in driver.files()


def test_the_table_names_the_newest_batch_that_was_begun(members: Members, driver: Driver) -> None:
    """Another engine, and a job that begins again, see which batch to write again."""
    driver.commit(_everywhere("a"), batch=4)
    for rig in members:
        rig.publish()
    known = MetadataStore(driver.store, clock=driver.clock).reload().topics["t"]
    table = members[0].led_partitions.topic("t").table
    table.refresh()
    found = [(batch_id, kind) for batch_id, kind, _ in table.batches(known.topic_id)]
    assert found == [(BatchId("q", 4), BatchKind.NUMBERED_PART)]
