from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from sparklog import errors
from sparklog.clock import ManualClock, Moment
from sparklog.storage.metadata.model import (
    BrokerKind,
    BrokerRegistration,
    ClusterMetadata,
    Epoch,
    TopicMetadata,
)
from sparklog.storage.metadata.processes import Process
from sparklog.storage.metadata.store import MetadataStore
from sparklog.storage.objects import (
    Fault,
    MemoryStore,
    NoFaults,
    PutUnresolved,
    ScriptedFaults,
    Stat,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.version_chain import KEPT_SECONDS, LIST_SECONDS, LOOK_SECONDS, _Look
from tests.support.brokers import paths

_EVERY = 20
"""Versions from one snapshot to the next in these tests."""


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparklog.storage.metadata.store.META_SNAPSHOT_EVERY", _EVERY)


def count_up(metadata: ClusterMetadata) -> ClusterMetadata:
    """A change that shows how often it was made."""
    return msgspec.structs.replace(metadata, next_producer_id=metadata.next_producer_id + 1)


def count_slowly(meta: MetadataStore, clock: ManualClock, times: int) -> None:
    """Makes changes at such a pace that age protects only the newest version from pruning."""
    for _ in range(times):
        clock.advance(KEPT_SECONDS)
        meta.change(count_up)


def versions(store: MemoryStore, suffix: str) -> list[int]:
    """The versions that have an object of that kind."""
    found = [name.partition(".") for name in paths(store, "meta")]
    return [int(number) for number, _, kind in found if kind == suffix]


class Sleeper(NoFaults):
    """Runs an action while the first put of a version is under way."""

    def __init__(self, meanwhile: Callable[[], None], moment: str = "before") -> None:
        self.meanwhile = meanwhile
        self.moment = moment
        self.slept = False

    def _sleep(self, operation: Operation, path: str, moment: str) -> None:
        is_version = operation == "put_new" and path.startswith("meta/")
        if is_version and moment == self.moment and not self.slept:
            self.slept = True
            self.meanwhile()

    def before(self, operation: Operation, path: str, /) -> None:
        self._sleep(operation, path, "before")

    def after(self, operation: Operation, path: str, /) -> None:
        self._sleep(operation, path, "after")


class Unaware(ManualClock):
    """A clock that does not see how long its machine was suspended."""

    def now_us(self) -> int:
        return 0


def test_metadata_comes_back_as_it_was(store: MemoryStore, clock: ManualClock) -> None:
    """Every field of the metadata survives encoding and decoding."""
    topic = TopicMetadata(topic_id="id", leaders=(3,), leader_epochs=(7,), config={"k": "v"})
    wanted = ClusterMetadata(
        brokers={
            3: BrokerRegistration(
                epoch=7,
                flight="h:1",
                started_us=5,
                kind=BrokerKind.EMBEDDED,
                process=Process(host="h", pid=4, machine="m", started="9"),
                dead_after_seconds=6.0,
            )
        },
        open_epochs=(Epoch(3, 6), Epoch(3, 7)),
        controller=3,
        topics={"t": topic},
        next_producer_id=11,
    )
    after = MetadataStore(store, clock=clock).change(lambda _: wanted)
    assert after == msgspec.structs.replace(wanted, version=1, change_id=after.change_id)
    assert MetadataStore(store, clock=clock).reload() == after
    assert after.topic("t") == topic
    with pytest.raises(errors.UnknownTopic):
        after.topic("u")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 9}'])
def test_a_damaged_version_is_named(store: MemoryStore, clock: ManualClock, content: bytes) -> None:
    """An unreadable version, or one with another version's content, is refused by its path."""
    MetadataStore(store, clock=clock).change(count_up)
    path = f"meta/{1:020d}.json"
    store.put(path, content)
    with pytest.raises(errors.CorruptObject) as corrupt:
        MetadataStore(store, clock=clock).reload()
    assert corrupt.value.path == path


def test_foreign_files_are_ignored(store: MemoryStore, clock: ManualClock) -> None:
    """Foreign files alongside the versions are ignored."""
    for name in ("notes.txt", ".DS_Store", "zzz", "5.json", "99.snapshot", "99.json"):
        store.put(f"meta/{name}", b"")
    count_slowly(MetadataStore(store, clock=clock), clock, 3 * _EVERY)
    assert MetadataStore(store, clock=clock).reload().version == 3 * _EVERY


# ------------------------------------------------------------------------------ changing


def test_a_change_is_seen_by_others(store: MemoryStore, clock: ManualClock) -> None:
    """A refresh returns every change of other processes, and the same version without one."""
    ours, theirs = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    assert theirs.refresh().version == 0
    for expected in (1, 2, 3):
        ours.change(count_up)
        assert theirs.refresh() == ours.current
        assert theirs.refresh().version == expected


def test_a_decision_against_it_changes_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """A decision of None changes nothing, and a refusal reaches the caller."""
    meta = MetadataStore(store, clock=clock)
    before = meta.change(count_up)
    assert meta.change(lambda _: None) == before

    def refuse(_: ClusterMetadata) -> ClusterMetadata:
        raise errors.BadRequest(reason="no")

    with pytest.raises(errors.BadRequest):
        meta.change(refuse)
    assert meta.reload() == before


def test_no_change_is_lost_in_a_race(store: MemoryStore, clock: ManualClock) -> None:
    """Eight threads that increment one number at once lose no increment."""
    MetadataStore(store, clock=clock)

    def work(_: int) -> None:
        meta = MetadataStore(store, clock=clock)
        for _ in range(20):
            meta.change(count_up)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    found = MetadataStore(store, clock=clock).reload()
    assert (found.version, found.next_producer_id) == (160, 160)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_ambiguous_change_is_made_once(
    store: MemoryStore, clock: ManualClock, moment: str
) -> None:
    """A put without an answer counts once, whether or not the first try landed."""
    error = PutUnresolved("?", "no answer")
    fault = Fault(operation="put_new", error=error, moment=moment, prefix="meta")  # type: ignore[arg-type]
    after = MetadataStore(store.view(ScriptedFaults(fault)), clock=clock).change(count_up)
    assert (after.version, after.next_producer_id) == (1, 1)
    assert MetadataStore(store, clock=clock).reload() == after


def test_topics_between_two_reads_are_noted(store: MemoryStore, clock: ManualClock) -> None:
    """Promise: also one that was created and deleted meanwhile; None after skipped versions.

    By them the janitor sweeps the files of a topic that was created again and deleted again.
    """
    meta, reader = (MetadataStore(store, clock=clock, notes_topics=each) for each in (False, True))
    topic = TopicMetadata(topic_id="1", leaders=(1,), leader_epochs=(0,))
    meta.change(count_up)
    reader.refresh()
    assert reader.take_noted() is None, "it has read no version before"
    meta.change(lambda known: msgspec.structs.replace(known, topics={"t": topic}))
    meta.change(lambda known: msgspec.structs.replace(known, topics={}))
    assert reader.refresh().topics == {}
    assert reader.take_noted() == {"t"}
    meta.change(count_up)
    reader.refresh()
    assert reader.take_noted() == set()
    count_slowly(meta, clock, 15 * _EVERY)
    reader.refresh()
    assert reader.take_noted() is None
    assert reader.take_noted() == set()


def test_old_versions_are_pruned(store: MemoryStore, clock: ManualClock) -> None:
    """The versions from the second newest snapshot on remain, and every reader catches up."""
    meta, old = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    meta.change(count_up)
    assert old.refresh().version == 1
    count_slowly(meta, clock, 15 * _EVERY)
    assert versions(store, "snapshot") == [14 * _EVERY, 15 * _EVERY]
    assert versions(store, "json") == list(range(14 * _EVERY, 15 * _EVERY + 2))
    assert old.refresh() == meta.current
    assert MetadataStore(store, clock=clock).reload() == meta.current


def test_young_versions_are_kept(store: MemoryStore, clock: ManualClock) -> None:
    """A reader that has looked recently finds every version, however many there were since."""
    meta, watcher = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    count_slowly(meta, clock, 5)
    watcher.refresh()
    clock.advance(LOOK_SECONDS - 1)
    for _ in range(5 * _EVERY):
        meta.change(count_up)
    down = errors.StorageUnavailable(operation="list", path="meta", reason="down")
    fault = Fault(operation="list_after", error=down, prefix="meta")
    watcher._store = store.view(ScriptedFaults(fault))
    assert watcher.refresh() == meta.current


def test_pruning_stops_at_a_young_version(store: MemoryStore, clock: ManualClock) -> None:
    """Versions go in order, also where one that was put late is younger than its successors."""
    meta = MetadataStore(store, clock=clock)
    count_slowly(meta, clock, 5)
    put_late = store.get(f"meta/{5:020d}.json")
    count_slowly(meta, clock, 4 * _EVERY)
    kept = versions(store, "json")
    store.put_new(f"meta/{5:020d}.json", put_late)
    for _ in range(2 * _EVERY):
        meta.change(count_up)
    assert versions(store, "json")[: len(kept) + 1] == [5, *kept]
    count_slowly(meta, clock, 10)
    assert versions(store, "json")[0] > kept[0]


def test_a_late_snapshot_is_pruned(store: MemoryStore, clock: ManualClock) -> None:
    """A snapshot without its version, as of an interrupted pruning, goes with the next pruning."""
    meta = MetadataStore(store, clock=clock)
    count_slowly(meta, clock, _EVERY)
    put_late = store.get(f"meta/{_EVERY:020d}.snapshot")
    count_slowly(meta, clock, 4 * _EVERY)
    kept = versions(store, "snapshot")
    store.put_new(f"meta/{_EVERY:020d}.snapshot", put_late)
    assert MetadataStore(store, clock=clock).reload() == meta.current
    count_slowly(meta, clock, 10)
    assert versions(store, "snapshot") == kept


def test_a_large_cluster_has_fewer_snapshots(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every hundredth version has one."""
    monkeypatch.setattr("sparklog.storage.metadata.store.META_LARGE_TOPICS", 0)
    topic = TopicMetadata(topic_id="id", leaders=(1,), leader_epochs=(1,))
    meta = MetadataStore(store, clock=clock)
    meta.change(lambda before: msgspec.structs.replace(before, topics={"t": topic}))
    for _ in range(5 * _EVERY):
        meta.change(count_up)
    assert versions(store, "snapshot") == [5 * _EVERY]
    assert MetadataStore(store, clock=clock).reload() == meta.current


def test_a_reader_that_slept_lists_the_versions(store: MemoryStore, clock: ManualClock) -> None:
    """A wall clock that was ahead of the monotonic one shows that the machine was suspended."""

    class Suspended(ManualClock):
        def monotonic(self) -> float:
            return 0.0

    meta = MetadataStore(store, clock=clock)
    meta.change(count_up)
    asleep = Suspended(clock.now_us())
    reader = MetadataStore(store, clock=asleep)
    reader.refresh()
    count_slowly(meta, clock, 4 * _EVERY)
    assert reader.refresh().version == 1  # to its clocks no time has passed
    asleep.advance(LOOK_SECONDS)
    assert reader.refresh() == meta.current


@pytest.mark.parametrize(
    ("step_seconds", "looks"),
    [
        (LOOK_SECONDS, 1),
        (
            LOOK_SECONDS / 2,
            round(2 * LIST_SECONDS / LOOK_SECONDS),
        ),
    ],
)
def test_a_reader_lists_from_time_to_time(
    store: MemoryStore, clock: ManualClock, step_seconds: float, looks: int
) -> None:
    """A suspension that no clock counted ends with the listing that is due once a minute."""
    meta, unaware = MetadataStore(store, clock=clock), Unaware(0)
    meta.change(count_up)
    reader = MetadataStore(store, clock=unaware)
    reader.refresh()
    count_slowly(meta, clock, 4 * _EVERY)
    for _ in range(looks):
        assert reader.refresh().version == 1
        unaware.advance(step_seconds)
    assert reader.refresh() == meta.current


def test_a_writer_that_no_clock_told_of_its_sleep_lists(
    store: MemoryStore, clock: ManualClock
) -> None:
    """After a put that did not count, the next one is not made at the same place."""
    others, puts = MetadataStore(store, clock=clock), []
    count_slowly(others, clock, 5)

    class Counted(Sleeper):
        def before(self, operation: Operation, path: str, /) -> None:
            super().before(operation, path)
            if operation == "put_new":
                puts.append(path)

    faults = Counted(lambda: count_slowly(others, clock, 5 * _EVERY))
    after = MetadataStore(store.view(faults), clock=Unaware(0)).change(count_up)
    assert puts == [f"meta/{6:020d}.json", f"meta/{after.version:020d}.json"]
    assert after.next_producer_id == 5 * _EVERY + 6


def test_a_reader_that_slept_amid_a_look_lists(store: MemoryStore, clock: ManualClock) -> None:
    """A version that was pruned while the reader slept is not taken for a missing one."""
    meta = MetadataStore(store, clock=clock)
    meta.change(count_up)

    class Asleep(NoFaults):
        def before(self, operation: Operation, path: str, /) -> None:
            if (operation, path) == ("get", f"meta/{2:020d}.json") and meta.current.version == 1:
                count_slowly(meta, clock, 4 * _EVERY)

    reader = MetadataStore(store, clock=clock)
    reader.refresh()
    reader._store = store.view(Asleep())
    assert reader.refresh().version == meta.current.version == 4 * _EVERY + 1


@pytest.mark.parametrize("probe_first", [True, False])
def test_a_misled_probe_does_not_replace_a_listing(
    store: MemoryStore, clock: ManualClock, probe_first: bool
) -> None:
    """The listing of one thread wins over the probe of another, whichever began first."""
    meta, unaware = MetadataStore(store, clock=clock), Unaware(0)
    meta.change(count_up)
    reader = MetadataStore(store, clock=unaware)
    reader.refresh()
    unaware.advance(1)
    count_slowly(meta, clock, 4 * _EVERY)

    class Other(NoFaults):
        is_running = False

        def before(self, operation: Operation, path: str, /) -> None:
            awaited = f"meta/{2:020d}.json" if probe_first else "meta"
            if path == awaited and not self.is_running:
                self.is_running = True
                unaware.advance(1)
                if probe_first:
                    assert reader.reload() == meta.current
                else:
                    assert reader.refresh().version == 1

    other = Other()
    reader._store = store.view(other)
    assert (reader.refresh() if probe_first else reader.reload()) == meta.current
    assert other.is_running
    assert reader.current == meta.current


def test_a_listing_from_before_a_change_does_not_hide_it(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Promise: a look returns the version that it has read, not the older one of a listing."""
    meta, reader = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    meta.change(count_up)
    before = reader.refresh()
    clock.advance(1)
    listed = _Look(before, Moment.now(clock), Moment.now(clock))
    clock.advance(1)
    meta.change(count_up)

    class Other(NoFaults):
        def before(self, operation: Operation, path: str, /) -> None:
            if path == f"meta/{3:020d}.json":
                assert reader._adopt(listed) == before

    reader._store = store.view(Other())
    assert reader.refresh() == meta.current
    assert reader.current == meta.current


def test_a_late_put_misleads_no_reader(store: MemoryStore, clock: ManualClock) -> None:
    """A version that was put again after its pruning is not the newest for a suspended reader."""
    others, suspended = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    count_slowly(others, clock, 5)
    suspended.refresh()
    others.change(count_up)
    put_late = store.get(f"meta/{6:020d}.json")
    count_slowly(others, clock, 4 * _EVERY)
    store.put_new(f"meta/{6:020d}.json", put_late)
    assert suspended.refresh() == others.current
    assert MetadataStore(store, clock=clock).reload() == others.current


def test_a_version_of_another_chain_is_left_out(store: MemoryStore, clock: ManualClock) -> None:
    """A late put of another change next to the versions that were kept does not count."""
    others, suspended = MetadataStore(store, clock=clock), MetadataStore(store, clock=clock)
    count_slowly(others, clock, 2 * _EVERY - 1)
    suspended.refresh()
    count_slowly(others, clock, _EVERY + 1)
    kept = versions(store, "json")
    assert kept[0] == 2 * _EVERY
    stranger = MemoryStore(clock)
    for _ in range(2 * _EVERY):
        MetadataStore(stranger, clock=clock).change(count_up)
    name = f"meta/{2 * _EVERY - 1:020d}.json"
    store.put_new(name, stranger.get(name))
    assert suspended.refresh() == others.current
    assert MetadataStore(store, clock=clock).reload() == others.current


def test_a_hole_is_named(store: MemoryStore, clock: ManualClock) -> None:
    """If no snapshot leads to the newest version, the error names both; nothing is guessed."""
    meta = MetadataStore(store, clock=clock)
    count_slowly(meta, clock, _EVERY + 5)
    store.delete([f"meta/{_EVERY + 3:020d}.json"])
    with pytest.raises(errors.CorruptObject, match=f"descend from snapshot {_EVERY}") as corrupt:
        MetadataStore(store, clock=clock).reload()
    assert corrupt.value.path == f"meta/{_EVERY + 5:020d}.json"


def test_an_old_listing_is_no_loss(store: MemoryStore, clock: ManualClock) -> None:
    """A store whose listings lack the newest versions does not hide them."""

    class Late(MemoryStore):
        def list_after(self, folder: str, after: str = "") -> list[Stat]:
            return super().list_after(folder, after)[:-3]

    meta = MetadataStore(store, clock=clock)
    for _ in range(8):
        meta.change(count_up)
    late = Late(clock)
    late._objects = store._objects
    assert MetadataStore(late, clock=clock).refresh() == meta.current


@pytest.mark.parametrize("age", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("slept", [1, 19, 39, 40, 41, 49, 50, 51, 150])
def test_a_change_that_slept_through_the_pruning_is_repeated(
    store: MemoryStore, clock: ManualClock, age: int, slept: int
) -> None:
    """A put of a version that was pruned does not count, and is repeated at the end."""
    others = MetadataStore(store, clock=clock)
    count_slowly(others, clock, age)
    sleeper = MetadataStore(
        store.view(Sleeper(lambda: count_slowly(others, clock, slept))), clock=clock
    )
    after = sleeper.change(count_up)
    assert (after.version, after.next_producer_id) == (age + slept + 1,) * 2
    assert MetadataStore(store, clock=clock).reload() == after
    found = versions(store, "json")
    assert found == list(range(found[0], after.version + 1))


@pytest.mark.parametrize("slept", [1, 19, 39, 40, 41, 150])
def test_a_change_whose_writer_slept_afterwards_is_made_once(
    store: MemoryStore, clock: ManualClock, slept: int
) -> None:
    """A put that others have built on counts; if it is pruned already, its outcome is unknown."""
    others = MetadataStore(store, clock=clock)
    count_slowly(others, clock, 5)

    def meanwhile() -> None:
        count_slowly(others, clock, slept)

    sleeper = MetadataStore(store.view(Sleeper(meanwhile, "after")), clock=clock)
    # The put is version 6. From version 40 on, which has the second snapshot, it may be pruned.
    if 6 + slept < 2 * _EVERY:
        assert sleeper.change(count_up).version == 6
        assert sleeper.current == others.current
    else:
        with pytest.raises(errors.OutcomeUnknown, match="pruned"):
            sleeper.change(count_up)
    newest = MetadataStore(store, clock=clock).reload()
    assert (newest.version, newest.next_producer_id) == (6 + slept,) * 2


def test_a_sleeper_is_not_misled_by_another_one(store: MemoryStore, clock: ManualClock) -> None:
    """A put in the pruned past does not count, although another put restored its predecessor."""
    others = MetadataStore(store, clock=clock)
    count_slowly(others, clock, 5)
    put_late = store.get(f"meta/{5:020d}.json")

    def meanwhile() -> None:
        count_slowly(others, clock, 5 * _EVERY)
        store.put_new(f"meta/{5:020d}.json", put_late)

    after = MetadataStore(store.view(Sleeper(meanwhile)), clock=clock).change(count_up)
    assert (after.version, after.next_producer_id) == (5 * _EVERY + 6,) * 2
    assert MetadataStore(store, clock=clock).reload() == after


def test_a_put_without_an_answer_is_not_made_twice(store: MemoryStore, clock: ManualClock) -> None:
    """A put that counted, and was pruned before its writer read it back, is not repeated."""
    others = MetadataStore(store, clock=clock)
    count_slowly(others, clock, 5)

    def meanwhile() -> None:
        count_slowly(others, clock, 5 * _EVERY)
        raise PutUnresolved("?", "no answer")

    sleeper = MetadataStore(store.view(Sleeper(meanwhile, "after")), clock=clock)
    with pytest.raises(errors.OutcomeUnknown, match="first attempt"):
        sleeper.change(count_up)
    newest = MetadataStore(store, clock=clock).reload()
    assert (newest.version, newest.next_producer_id) == (5 * _EVERY + 6,) * 2


def test_a_writer_that_slept_amid_its_listing_does_not_count(
    store: MemoryStore, clock: ManualClock
) -> None:
    """Versions that were pruned while they were listed are not a sign that none follows the put."""
    others = MetadataStore(store, clock=clock)
    count_slowly(others, clock, 5)

    class Slow(MemoryStore):
        def list_after(self, folder: str, after: str = "") -> list[Stat]:
            found = super().list_after(folder, after)
            if after:
                count_slowly(others, clock, 5 * _EVERY)
            return [stat for stat in found if f"{folder}/{stat.name}" in self._objects]

    slow = Slow(clock)
    slow._objects = store._objects
    slow._faults = Sleeper(lambda: count_slowly(others, clock, 5 * _EVERY))
    with pytest.raises(errors.OutcomeUnknown, match="while they were listed"):
        MetadataStore(slow, clock=clock).change(count_up)
    assert MetadataStore(store, clock=clock).reload() == others.current


def test_the_first_version_is_not_made_twice(store: MemoryStore, clock: ManualClock) -> None:
    """A put of version 1 that wakes amid the pruning does not count as the first."""
    died = errors.StorageUnavailable(operation="delete", path="?", reason="died")
    fault = Fault(operation="delete", error=died, moment="after", prefix="meta")
    others = MetadataStore(store.view(ScriptedFaults(fault)), clock=clock)

    def meanwhile() -> None:
        count_slowly(others, clock, 2 * _EVERY)
        assert versions(store, "json")[0] == 2

    after = MetadataStore(store.view(Sleeper(meanwhile)), clock=clock).change(count_up)
    assert (after.version, after.next_producer_id) == (2 * _EVERY + 1,) * 2
    assert MetadataStore(store, clock=clock).reload() == after


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_snapshot_that_was_not_put_is_no_loss(
    store: MemoryStore, clock: ManualClock, moment: str
) -> None:
    """The versions since the last snapshot remain, and the next snapshot comes in its turn."""
    error = errors.StorageUnavailable(operation="put_new", path="?", reason="down")
    fault = Fault(
        operation="put_new",
        error=error,
        count=2 * _EVERY + 2,  # the second snapshot's put
        moment=moment,  # type: ignore[arg-type]
        prefix="meta",
    )
    meta = MetadataStore(store.view(ScriptedFaults(fault)), clock=clock)
    count_slowly(meta, clock, 3 * _EVERY)
    without = [_EVERY, 3 * _EVERY] if moment == "before" else [2 * _EVERY, 3 * _EVERY]
    assert versions(store, "snapshot") == without
    assert MetadataStore(store, clock=clock).reload() == meta.current


REFUSALS = (
    errors.StorageUnavailable(operation="list", path="meta", reason="down"),
    errors.RootNotWritable(root="s3://b", reason="403"),
)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
def test_a_change_that_was_put_is_never_reported_as_failed(
    store: MemoryStore, clock: ManualClock, refusal: errors.SparklogError
) -> None:
    """If it is unknown whether the put counts, the outcome is unknown."""
    # The first listing looks for the newest version, the second for what became of the put.
    fault = Fault(operation="list_after", error=refusal, count=2, prefix="meta")
    with pytest.raises(errors.OutcomeUnknown):
        MetadataStore(store.view(ScriptedFaults(fault)), clock=clock).change(count_up)
    assert MetadataStore(store, clock=clock).reload().version == 1


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.code)
def test_a_change_counts_although_pruning_fails(
    store: MemoryStore, clock: ManualClock, refusal: errors.SparklogError
) -> None:
    """A store that refuses deletes costs space, and has no other effect."""
    faults = [Fault(operation="delete", error=refusal, count=n) for n in range(1, 99)]
    meta = MetadataStore(store.view(ScriptedFaults(*faults)), clock=clock)
    count_slowly(meta, clock, 3 * _EVERY)
    assert len(versions(store, "json")) == meta.current.next_producer_id == 3 * _EVERY
    assert MetadataStore(store, clock=clock).reload() == meta.current
