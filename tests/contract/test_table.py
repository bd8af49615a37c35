"""A topic's table over every kind of store: versions, races, foreign changes and damage."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparklog import errors, limits
from sparklog.clock import ManualClock
from sparklog.storage.maintenance import sweeping as maintenance
from sparklog.storage.objects import (
    Fault,
    LocalStore,
    MemoryStore,
    NoFaults,
    ObjectMissing,
    Payload,
    PutUnresolved,
    ScriptedFaults,
    Store,
)
from sparklog.storage.objects.faults import Operation
from sparklog.storage.snapshot import TableFile, TableSnapshot
from sparklog.storage.table import data_file, delta_log, preparations
from sparklog.storage.table.changes import TOPIC_ID, TableChange, create_change, delete_change
from sparklog.storage.table.names import end_app_id, file_suffix, maintenance_app_id, start_app_id
from sparklog.storage.table.replay import NO_TABLE
from sparklog.storage.table.together import commit_all
from sparklog.storage.table.topic_table import TOMBSTONE_SECONDS, TopicTable
from tests.support import tables
from tests.support.tables import append, appending, create, table_file

LOG = "topics/t/_delta_log"
HOUR = 3_600.0


@pytest.fixture
def clock() -> ManualClock:
    """A fixed clock, close to the time stamps that a local store gives its files."""
    return tables.manual_clock(at_us=time.time_ns() // 1_000)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Store:
    """An empty store of each kind."""
    if request.param == "local":
        return LocalStore(tmp_path / "root")
    return MemoryStore(clock)


@pytest.fixture
def table(store: Store, clock: ManualClock) -> TopicTable:
    """Returns a topic's table that has not been created."""
    return TopicTable(store, "t", clock=clock)


def another(table: TopicTable) -> TopicTable:
    """A second process's view of the same table."""
    return TopicTable(table.store, table.topic, clock=table.clock)


def put_commit(store: Store, version: int, *actions: dict[str, Any]) -> None:
    """A commit as another engine would put it."""
    info = {"commitInfo": {"operation": "FOREIGN"}}
    store.put_new(
        f"{LOG}/{version:020d}.json", msgspec.json.Encoder().encode_lines([info, *actions])
    )


def remove_commits(store: Store, versions: range) -> None:
    """Cleans the log up as another engine would."""
    store.delete(f"{LOG}/{version:020d}.json" for version in versions)


def removal(seen: TableSnapshot, files: Sequence[TableFile]) -> TableChange:
    """Removes files as retention does."""
    assert seen.topic_id is not None
    txns = {maintenance_app_id(seen.topic_id): seen.version + 1}
    return TableChange(removes=tuple(files), txns=txns)


# ------------------------------------------------------------------------------ a topic's life


def test_no_table_yet(table: TopicTable) -> None:
    """A topic without a table is a snapshot of version -1, not an error."""
    assert table.refresh() == NO_TABLE


def test_created_topic_describes_itself(table: TopicTable) -> None:
    """Every reader of a new topic sees its id, partitions, config and offsets of zero."""
    made = create(table, 3)
    assert another(table).refresh() == made
    assert made == TableSnapshot(
        version=0,
        topic_id=tables.TOPIC_ID,
        partitions=3,
        config={"retention.ms": "1000"},
        ends=(0, 0, 0),
        starts=(0, 0, 0),
        files=((), (), ()),
    )


def test_appends_move_the_ends(table: TopicTable) -> None:
    """Files are kept in offset order per partition, and a reader that follows sees the same."""
    create(table)
    reader = another(table)
    reader.refresh()
    seen = append(table, 3)
    assert seen.version == 3
    assert seen.ends == (30, 30)
    assert [file.first for file in seen.files[1]] == [0, 10, 20]
    assert reader.refresh() == another(table).refresh() == seen


def test_untouched_partitions_are_shared(table: TopicTable, clock: ManualClock) -> None:
    """A commit to one partition costs nothing for the files of the others."""
    create(table)
    before = append(table)
    file = table_file(clock, 1, 10, 19)
    txns = {end_app_id(tables.TOPIC_ID, 1): 20}
    after = table.commit(lambda _: TableChange(adds=(file,), txns=txns))
    assert after.files[0] is before.files[0]
    assert after.files[1] == (*before.files[1], file)


def test_a_commit_looks_only_at_its_partitions(
    table: TopicTable, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit to one partition costs the same however many others there are."""
    create(table, 50)
    looked_at: list[int] = []

    def named(topic_id: str, partition: int) -> str:
        looked_at.append(partition)
        return end_app_id(topic_id, partition)

    monkeypatch.setattr("sparklog.storage.table.replay.end_app_id", named)
    file = table_file(clock, 7, 0, 9)
    txns = {end_app_id(tables.TOPIC_ID, 7): 10, start_app_id(tables.TOPIC_ID, 7): 3}
    after = table.commit(lambda _: TableChange(adds=(file,), txns=txns))
    assert set(looked_at) == {7}
    assert (after.ends[7], after.starts[7], after.files[7]) == (10, 3, (file,))
    assert after == another(table).refresh()


def test_file_in_between_is_sorted_in(table: TopicTable, clock: ManualClock) -> None:
    """A file of lower offsets, as a foreign rewrite leaves it, takes its place in the order."""
    create(table, 1)
    late, early = table_file(clock, 0, 10, 19), table_file(clock, 0, 0, 9)
    txns = {end_app_id(tables.TOPIC_ID, 0): 20}
    table.commit(lambda _: TableChange(adds=(late,), txns=txns))
    seen = table.commit(lambda _: TableChange(adds=(early,)))
    assert seen.files == ((early, late),)
    assert seen == another(table).refresh()


def test_deleted_topic_is_empty_and_may_return(table: TopicTable) -> None:
    """A deletion clears files and id; versions continue, and the next topic starts at zero."""
    create(table)
    append(table, 2)
    gone = table.commit(delete_change)
    assert gone == TableSnapshot(version=3, topic_id=None)
    back = create(table, 1, topic_id="second")
    assert (back.version, back.topic_id, back.ends, back.files) == (4, "second", (0,), ((),))
    assert another(table).refresh() == back


def test_checkpoint_forgets_dead_topics(table: TopicTable) -> None:
    """The `txn` of a deleted topic does not live in checkpoints forever."""
    create(table, 1, topic_id="first")
    table.commit(delete_change)
    create(table, 1, topic_id="second")
    table.checkpoint()
    app_ids = {
        txn.app_id for txn in table.log_reader.read_checkpoint([delta_log.checkpoint_name(2)]).txns
    }
    assert app_ids == {end_app_id("second", 0), start_app_id("second", 0)}


def test_files_left_in_a_dead_topic_go_when_it_returns(table: TopicTable, store: Store) -> None:
    """Rows that another engine adds to a deleted topic's table are not the next topic's records."""
    create(table, 1)
    table.commit(delete_change)
    put_commit(store, 2, foreign_add("partition=0/part-0.parquet"))
    assert table.refresh().topic_id is None
    assert create(table, 1, topic_id="second").files == ((),)


def test_properties_change_alone(table: TopicTable) -> None:
    """More partitions are a change of properties; other engines' properties stay."""
    create(table, 1)
    more = table.commit(
        lambda _: TableChange(
            properties={"sparklog.partitions": "2", "delta.logRetentionDuration": "interval 1 day"},
            txns={end_app_id(tables.TOPIC_ID, 1): 0},
        )
    )
    assert (more.partitions, more.ends, more.files) == (2, (0, 0), ((), ()))
    assert another(table).refresh() == more


def test_only_plain_appends_are_blind(table: TopicTable) -> None:
    """Other engines let their rewrites pass alongside our appends, and no other change of ours."""
    create(table)
    append(table)
    table.commit(lambda seen: removal(seen, seen.files[0]))
    infos = [
        msgspec.json.decode(
            table.store.get(f"{LOG}/{version:020d}.json").to_pybytes().split(b"\n")[0]
        )
        for version in range(3)
    ]
    assert [info["commitInfo"]["isBlindAppend"] for info in infos] == [False, True, False]


# ------------------------------------------------------------------------------ decisions


def test_decide_sees_the_version_before(table: TopicTable) -> None:
    """A loser decides again, on the version that beat it."""
    create(table)
    other = another(table)
    other.refresh()
    append(table)
    shown: list[int] = []

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        shown.append(snapshot.version)
        return appending(table.clock)(snapshot)

    landed = other.commit(decide)
    assert shown == [0, 1]
    assert landed.version == 2
    assert landed.ends == (20, 20)


def test_decide_may_give_up(table: TopicTable) -> None:
    """None from the decision leaves the table as it is."""
    made = create(table)
    assert table.commit(lambda _: None) == made
    assert another(table).refresh().version == 0


def test_decide_may_refuse(table: TopicTable) -> None:
    """An error of the decision is raised, and nothing is put."""
    create(table)

    def refuse(_: TableSnapshot) -> TableChange | None:
        raise errors.TopicChanged(topic="t", expected="a", found="b")

    with pytest.raises(errors.TopicChanged):
        table.commit(refuse)
    assert another(table).refresh().version == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda clock, _: TableChange(removes=(table_file(clock, 0, 0, 9),)),
        lambda _, seen: TableChange(adds=seen.files[0]),
        lambda *_: TableChange(txns={end_app_id(tables.TOPIC_ID, 0): 9}),
        lambda *_: TableChange(create=True),
    ],
    ids=["removes an unknown file", "adds twice", "txn goes back", "creates twice"],
)
def test_impossible_changes_are_not_put(
    table: TopicTable,
    clock: ManualClock,
    wrong: Callable[[ManualClock, TableSnapshot], TableChange],
) -> None:
    """A change that contradicts the version before it is a fault of the program, caught here."""
    create(table, 1)
    seen = append(table)
    with pytest.raises(AssertionError):
        table.commit(lambda snapshot: wrong(clock, snapshot))
    assert another(table).refresh() == seen


def test_old_file_is_not_added(table: TopicTable, clock: ManualClock) -> None:
    """Half the orphan grace after it was written, a file must be written again."""
    create(table, 1)
    file = table_file(clock, 0, 0, 9)
    clock.advance(limits.ORPHAN_GRACE_SECONDS / 2 + 1)
    with pytest.raises(errors.TimedOut):
        table.commit(lambda _: TableChange(adds=(file,)))
    assert another(table).refresh().version == 0


def test_commits_race_without_loss(store: Store, clock: ManualClock) -> None:
    """Eight threads with a table each: every append lands once, at offsets of its own."""
    first = TopicTable(store, "t", clock=clock)
    create(first, 1)

    def work(_: int) -> None:
        table = TopicTable(store, "t", clock=clock)
        for _ in range(12):
            table.commit(appending(clock))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    seen = first.refresh()
    assert seen.version == 96
    assert [file.first for file in seen.files[0]] == list(range(0, 960, 10))
    assert another(first).refresh() == seen


def test_one_table_serves_many_threads(store: Store, clock: ManualClock) -> None:
    """A table shared by threads takes their commits one after another."""
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: table.commit(appending(clock)), range(40)))
    assert table.snapshot.ends == (400,)
    assert another(table).refresh() == table.snapshot


# ------------------------------------------------------------------------------ the long past


def test_cleaned_up_log_is_followed(table: TopicTable, store: Store) -> None:
    """A reader whose next version has been cleaned up starts over from the newest checkpoint."""
    create(table)
    sleeper = another(table)
    sleeper.refresh()
    append(table, 5)
    table.checkpoint()
    remove_commits(store, range(5))
    append(table, 2)
    assert sleeper.refresh() == table.snapshot
    assert another(table).refresh() == table.snapshot


def test_a_look_for_something_new_lists_nothing(clock: ManualClock) -> None:
    """The cost of looking whether there is a newer version does not grow with the log."""
    asked: list[str] = []

    class Asked(NoFaults):
        def before(self, operation: str, path: str) -> None:
            asked.append(operation)

    store = MemoryStore(clock)
    table = TopicTable(store, "t", clock=clock)
    create(table)
    follower = TopicTable(store.view(Asked()), "t", clock=clock)
    follower.refresh()
    append(table)
    asked.clear()
    for _ in range(3):
        assert follower.refresh() == table.snapshot
    assert set(asked) == {"get", "stat"}


@pytest.mark.parametrize("version", [1, 5])
def test_commit_into_the_cleaned_up_past_does_not_count(
    table: TopicTable, store: Store, version: int
) -> None:
    """A put that succeeds only because version 1 was cleaned up is made again at the end."""
    create(table)
    sleeper = another(table)
    sleeper.refresh()
    append(table, version)
    table.checkpoint()
    remove_commits(store, range(version + 1))
    landed = append(sleeper)
    assert landed.version == version + 1
    assert landed.ends == (10 * landed.version,) * 2
    assert another(table).refresh() == landed


def test_first_commit_into_the_cleaned_up_past_does_not_count(
    table: TopicTable, store: Store
) -> None:
    """Version 0 is checked too: a writer that has seen no table must not create a second one."""
    late = another(table)
    shown: list[int] = []

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        shown.append(snapshot.version)
        if snapshot.topic_id:
            return None
        create(table)
        append(table, 5)
        table.checkpoint()
        remove_commits(store, range(5))
        return create_change("late", 1, {})

    assert late.commit(decide) == table.snapshot
    assert shown == [-1, 5]


def test_table_without_its_commits_goes_on(table: TopicTable, store: Store) -> None:
    """A copy that has only the newest checkpoint can be read and written."""
    create(table)
    append(table, 3)
    table.checkpoint()
    remove_commits(store, range(4))
    copy = another(table)
    assert copy.refresh() == table.snapshot
    assert append(copy).version == 4
    assert another(table).refresh() == copy.snapshot


def test_log_that_went_back_is_an_error(table: TopicTable, store: Store) -> None:
    """Nothing is committed on top of versions that have vanished."""
    create(table)
    append(table, 3)
    remove_commits(store, range(2, 4))
    with pytest.raises(errors.MissingObject, match="the log now ends at version 1"):
        table.refresh()


def test_hole_in_the_log_is_an_error(table: TopicTable, store: Store) -> None:
    """A commit that is missing below others is named."""
    create(table)
    append(table, 3)
    remove_commits(store, range(2, 3))
    with pytest.raises(errors.MissingObject) as found:
        another(table).refresh()
    assert found.value.path == f"{LOG}/{2:020d}.json"


# ------------------------------------------------------------------------------ checkpoints


def test_checkpoint_stands_for_the_log(table: TopicTable, store: Store) -> None:
    """From a checkpoint alone comes what the commits said, removals and ages included."""
    create(table)
    seen = append(table, 4)
    table.commit(lambda seen: removal(seen, seen.files[0][:1]))
    table.checkpoint()
    remove_commits(store, range(5))
    fresh = another(table)
    assert fresh.refresh() == table.snapshot
    assert fresh.checkpoint_version == table.checkpoint_version == 5
    assert fresh.is_named(seen.files[0][0].path)


def test_a_reader_sees_the_same_without_the_removals(table: TopicTable, store: Store) -> None:
    """Removed files are not remembered for one who only reads, from a checkpoint and after it."""
    create(table)
    append(table, 4)
    table.commit(lambda seen: removal(seen, seen.files[0][:1]))
    early = TopicTable(store, table.topic, clock=table.clock, only_reads=True)
    assert early.refresh() == table.snapshot
    table.checkpoint()
    remove_commits(store, range(5))
    late = TopicTable(store, table.topic, clock=table.clock, only_reads=True)
    assert late.refresh() == table.snapshot
    table.commit(lambda seen: removal(seen, seen.files[1][:1]))
    assert early.refresh() == late.refresh() == table.snapshot


@pytest.mark.parametrize("doing", ["commit", "checkpoint", "sweep", "ask"])
def test_a_reader_does_not_write(table: TopicTable, store: Store, doing: str) -> None:
    """Work that needs the removals is not done without them: it could take files for orphans."""
    create(table)
    reader = TopicTable(store, table.topic, clock=table.clock, only_reads=True)
    reader.refresh()
    acts: dict[str, Callable[[], object]] = {
        "commit": lambda: reader.commit(lambda _: TableChange()),
        "checkpoint": reader.checkpoint,
        "sweep": reader.expired,
        "ask": lambda: reader.is_named("a"),
    }
    with pytest.raises(AssertionError):
        acts[doing]()


def test_broken_hint_is_no_harm(table: TopicTable, store: Store) -> None:
    """`_last_checkpoint` is a hint: torn, missing or wrong, the listing finds the checkpoint."""
    create(table)
    append(table, 3)
    table.checkpoint()
    append(table)
    remove_commits(store, range(3))
    for hint in (b"", b'{"version":', b'{"version":2,"size":3}', b'{"version":99,"size":3}'):
        store.put(f"{LOG}/_last_checkpoint", hint)
        assert another(table).refresh() == table.snapshot
    store.delete([f"{LOG}/_last_checkpoint"])
    assert another(table).refresh() == table.snapshot


@pytest.mark.parametrize("kept_bytes", [0, 100, -1])
def test_torn_checkpoint_falls_back(table: TopicTable, store: Store, kept_bytes: int) -> None:
    """An unreadable checkpoint is passed over for an older one, or for the commits."""
    create(table)
    append(table, 3)
    table.checkpoint()
    append(table, 3)
    table.checkpoint()
    torn = f"{LOG}/{delta_log.checkpoint_name(6)}"
    store.put(torn, store.get(torn).to_pybytes()[:kept_bytes])
    assert another(table).refresh() == table.snapshot
    remove_commits(store, range(3))
    assert another(table).refresh() == table.snapshot
    remove_commits(store, range(3, 5))
    with pytest.raises(errors.CorruptObject) as found:
        another(table).refresh()
    assert found.value.path == torn


def test_checkpoint_is_read_back_before_it_is_named(table: TopicTable, store: Store) -> None:
    """A checkpoint that does not hold the table never becomes the one that readers start from."""
    create(table)
    append(table)
    wrong = delta_log.encode_checkpoint(
        delta_log.Actions(
            protocol=delta_log.PROTOCOL,
            metadata=delta_log.new_metadata(table_id="x", created_ms=0),
        )
    )
    store.put_new(f"{LOG}/{delta_log.checkpoint_name(1)}", wrong)
    with pytest.raises(errors.CorruptObject, match="names 0 files, not the 2"):
        table.checkpoint()
    with pytest.raises(ObjectMissing):
        store.get(f"{LOG}/_last_checkpoint")


def test_hint_never_goes_back(table: TopicTable, store: Store) -> None:
    """A checkpoint that is written late does not hide a newer one."""
    create(table)
    slow = another(table)
    slow.refresh()
    append(table)
    table.checkpoint()
    slow.checkpoint()
    assert delta_log.decode_last_checkpoint(store.get(f"{LOG}/_last_checkpoint")) == 1


def test_multi_part_checkpoint_is_read(table: TopicTable, store: Store) -> None:
    """A classic checkpoint in parts counts when all of them are there, and not before."""
    create(table)
    append(table, 3)
    whole = table._replay.compacted()
    remove_commits(store, range(3))
    halves = [
        dataclasses.replace(whole, adds=whole.adds[:2], txns=(), removes=()),
        dataclasses.replace(whole, adds=whole.adds[2:], protocol=None, metadata=None),
    ]
    for number, half in enumerate(halves, 1):
        with pytest.raises(errors.MissingObject):
            another(table).refresh()
        name = f"{3:020d}.checkpoint.{number:010d}.{2:010d}.parquet"
        store.put_new(f"{LOG}/{name}", delta_log.encode_checkpoint(half))
    assert another(table).refresh() == table.snapshot


def test_v2_checkpoint_is_refused_by_name(table: TopicTable, store: Store) -> None:
    """A table that can only be opened through a v2 checkpoint is not ours to open."""
    create(table)
    append(table)
    name = f"{1:020d}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet"
    store.put_new(f"{LOG}/{name}", b"whatever")
    assert another(table).refresh() == table.snapshot
    remove_commits(store, range(1))
    with pytest.raises(errors.ForeignTable, match="v2 checkpoint"):
        another(table).refresh()


def test_tombstones_are_forgotten(table: TopicTable, clock: ManualClock) -> None:
    """A removal is remembered beyond the file's grace, and then no checkpoint carries it."""
    create(table, 1)
    append(table)
    path = table.snapshot.files[0][0].path
    table.commit(lambda seen: removal(seen, seen.files[0]))
    table.checkpoint()
    assert table.is_named(path)
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + TOMBSTONE_SECONDS + 1)
    append(table)
    table.checkpoint()
    assert not table.is_named(path)
    assert not table.log_reader.read_checkpoint([delta_log.checkpoint_name(3)]).removes


def test_followers_forget_tombstones_too(
    table: TopicTable, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that runs for days does not remember every file that ever existed."""
    monkeypatch.setattr(limits, "TABLE_CHECKPOINT_EVERY", 2)
    create(table, 1)
    path = append(table).files[0][0].path
    table.commit(lambda seen: removal(seen, seen.files[0]))
    follower = another(table)
    follower.refresh()
    clock.advance(limits.REMOVED_FILE_GRACE_SECONDS + TOMBSTONE_SECONDS + 1)
    append(table, 2)
    assert follower.is_named(path)
    follower.refresh()
    assert not follower.is_named(path)


# ------------------------------------------------------------------------------ preparations


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "read again"])
def test_leaders_prepare_files_beside_each_other(
    table: TopicTable, clock: ManualClock, is_known: bool
) -> None:
    """The preparations of two brokers are open at once, and each commit closes its own."""
    create(table, 2)
    numbers = {broker: preparations.prepare(table, tables.TOPIC_ID, broker) for broker in (1, 2)}
    if not is_known:
        table.checkpoint()
        table = another(table)
        table.refresh()
    assert len(set(numbers.values())) == 2
    for broker, left in ((2, {1}), (1, set[int]())):
        partition, number = broker - 1, numbers[broker]
        path = f"partition={partition}/id-0-9-{file_suffix(number)}.parquet"
        change = TableChange(
            adds=(dataclasses.replace(table_file(clock, partition, 0, 9), path=path),),
            txns={end_app_id(tables.TOPIC_ID, partition): 10},
            preparation=number,
        )
        assert table.is_prepared(path)
        table.commit(lambda _, change=change: change)  # type: ignore[misc]
        assert {*table.open_preparations} == {numbers[each] for each in left}
    assert preparations.prepare(table, tables.TOPIC_ID, 1) > max(numbers.values())


def test_preparations_survive_a_change_of_another_engine_that_is_undone(
    table: TopicTable, store: Store
) -> None:
    """Numbers are not used again after a table was foreign for a while."""
    create(table, 1)
    number = preparations.prepare(table, tables.TOPIC_ID, 1)
    put_commit(store, 2, with_property("delta.columnMapping.mode", "name"))
    with pytest.raises(errors.ForeignTable):
        table.refresh()
    put_commit(store, 3, {"metaData": METADATA})
    table.refresh()
    assert [*table.open_preparations] == [number]
    assert preparations.prepare(table, tables.TOPIC_ID, 1) > number


def test_a_new_preparation_ends_the_open_one(table: TopicTable) -> None:
    """If a broker prepares files twice, as after a start, the later one continues."""
    create(table, 1)
    first, second = (
        preparations.prepare(table, tables.TOPIC_ID, 1),
        preparations.prepare(table, tables.TOPIC_ID, 1),
    )
    files = {
        number: f"partition=0/id-0-9-{file_suffix(number)}.parquet" for number in (first, second)
    }
    assert [table.is_prepared(files[number]) for number in (first, second)] == [False, True]
    preparations.renew(table, second)
    with pytest.raises(errors.TimedOut):
        preparations.renew(table, first)
    with pytest.raises(errors.TimedOut):
        preparations.prepare(table, "another topic's id", 1)


def test_a_preparation_that_is_not_renewed_ends(table: TopicTable, clock: ManualClock) -> None:
    """A sweeper ends it once it was last renewed before some time, and then it may begin again."""
    create(table, 1)
    number = preparations.prepare(table, tables.TOPIC_ID, 1)
    clock.advance(60)
    preparations.renew(table, number)
    moment_us = clock.now_us()
    preparations.end_old(table, moment_us)
    assert another(table).refresh() == table.snapshot
    assert [*table.open_preparations] == [number]
    preparations.end_old(table, moment_us + 1)
    assert not table.open_preparations
    with pytest.raises(errors.TimedOut):
        preparations.renew(table, number)
    again = preparations.prepare(table, tables.TOPIC_ID, 1)
    assert ([*table.open_preparations], again > number) == ([again], True)


# ------------------------------------------------------------------------------ other engines


def foreign_add(path: str, **more: Any) -> dict[str, Any]:
    """An add action with nothing but what the protocol demands."""
    return {
        "add": {
            "path": path,
            "partitionValues": {"partition": "0"},
            "size": 10,
            "modificationTime": 0,
            "dataChange": True,
        }
        | more
    }


def test_file_without_statistics_comes_first(table: TopicTable, store: Store) -> None:
    """A file of another engine without statistics may hold any offset of its partition."""
    create(table, 1)
    append(table)
    put_commit(store, 2, foreign_add("partition=0/part-0.parquet"))
    seen = table.refresh()
    assert [(file.first, file.rows) for file in seen.files[0]] == [(None, None), (0, 10)]
    assert seen.ends == (10,)
    assert another(table).refresh() == seen


def test_file_added_again_replaces_itself(table: TopicTable, store: Store) -> None:
    """An engine that only recomputes statistics adds an active file again: it is still one."""
    create(table, 1)
    file = append(table).files[0][0]
    stats = '{"numRecords":10,"minValues":{"offset":2},"maxValues":{"offset":9}}'
    put_commit(store, 2, foreign_add(file.path, stats=stats, dataChange=False))
    assert [(each.path, each.first) for each in table.refresh().files[0]] == [(file.path, 2)]
    assert another(table).refresh() == table.snapshot


def test_paths_are_compared_decoded(table: TopicTable, store: Store) -> None:
    """A removal counts however its engine percent-encodes the path."""
    create(table, 1)
    path = append(table).files[0][0].path
    put_commit(store, 2, {"remove": {"path": path.replace("=", "%3D"), "dataChange": True}})
    assert table.refresh().files == ((),)


FIVE_ROWS = '{"numRecords":5,"minValues":{"offset":0},"maxValues":{"offset":4}}'


def test_rows_beyond_the_end_are_not_ours(table: TopicTable, store: Store) -> None:
    """The `txn` names the table's end; rows that another engine adds above it are refused by
    name.
    """
    create(table, 1)
    put_commit(store, 1, foreign_add("partition=0/x.parquet", stats=FIVE_ROWS))
    with pytest.raises(errors.ForeignTable, match="offset 4, but ends at 0"):
        table.refresh()
    assert table.bounds(tables.TOPIC_ID, 1).ends == (0,)  # type: ignore[union-attr]
    put_commit(store, 2, {"remove": {"path": "partition=0/x.parquet", "dataChange": True}})
    assert table.refresh() == another(table).refresh()
    assert table.snapshot.files == ((),)


METADATA: dict[str, Any] = {
    "id": "x",
    "format": {"provider": "parquet", "options": {}},
    "schemaString": delta_log.SCHEMA_STRING,
    "partitionColumns": ["partition"],
    "configuration": {
        TOPIC_ID: tables.TOPIC_ID,
        "sparklog.partitions": "1",
        "sparklog.config": "{}",
    },
}


def test_the_files_say_the_end_where_the_txn_was_lost(table: TopicTable, store: Store) -> None:
    """Another engine may drop a `txn`; the statistics still say where the partition ends."""
    put_commit(
        store,
        0,
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": METADATA},
        foreign_add("partition=0/x.parquet", stats=FIVE_ROWS),
    )
    assert table.refresh().ends == (5,)


def test_a_commit_that_was_written_over_is_noticed(clock: ManualClock) -> None:
    """On an object store what we have committed is read back, before the log lets go of it."""
    store = MemoryStore(clock)
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    append(table, 2)
    table.confirm()
    append(table)
    path = f"{LOG}/{3:020d}.json"
    store.put(path, store.get(f"{LOG}/{2:020d}.json"))
    for _ in range(2):
        with pytest.raises(errors.ForeignTable, match="overwritten commit 3"):
            table.confirm()
    store.delete([path])
    table.confirm()


def test_a_commit_is_read_back_only_once_it_is_old_enough(clock: ManualClock) -> None:
    """The put of an engine that overwrites a commit may come after ours."""
    store = MemoryStore(clock)
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    before = clock.monotonic()
    clock.advance(1)
    append(table)
    table.confirm(before)
    path = f"{LOG}/{1:020d}.json"
    store.put(path, store.get(f"{LOG}/{0:020d}.json"))
    table.confirm(before)
    with pytest.raises(errors.ForeignTable, match="overwritten commit 1"):
        table.confirm(clock.monotonic())


PROTOCOL = {"minReaderVersion": 1, "minWriterVersion": 2}


def with_property(name: str, value: str) -> dict[str, Any]:
    """A metadata action that sets a property besides ours."""
    return {"metaData": METADATA | {"configuration": METADATA["configuration"] | {name: value}}}


def with_schema(before: str, after: str) -> dict[str, Any]:
    """A metadata action whose schema has another text in one place."""
    assert before in delta_log.SCHEMA_STRING
    schema = delta_log.SCHEMA_STRING.replace(before, after, 1)
    return {"metaData": METADATA | {"schemaString": schema}}


FOREIGN: dict[str, dict[str, Any]] = {
    "its protocol is (1, 3) for check constraints": {
        "protocol": {"minReaderVersion": 1, "minWriterVersion": 3}
    },
    "for deletionVectors, v2Checkpoint": {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": ["deletionVectors"],
            "writerFeatures": ["deletionVectors", "v2Checkpoint"],
        }
    },
    "has a deletion vector": foreign_add("partition=0/x.parquet", deletionVector={"a": 1}),
    "s3://elsewhere/x.parquet is outside": foreign_add("s3://elsewhere/x.parquet"),
    "belongs to partition 1, but there are only 1": foreign_add(
        "partition=1/x.parquet", partitionValues={"partition": "1"}
    ),
    "belongs to partition None": foreign_add("x.parquet", partitionValues={"partition": None}),
    "actions that sparklog does not know: ['domainMetadata']": {"domainMetadata": {"domain": "x"}},
    "column mapping is on": with_property("delta.columnMapping.mode", "name"),
    "delta.setTransactionRetentionDuration is set": with_property(
        "delta.setTransactionRetentionDuration", "interval 1 day"
    ),
    "properties are damaged": with_property("sparklog.partitions", "many"),
    "are damaged: 0 partitions": with_property("sparklog.partitions", "0"),
    "are damaged: 10001 partitions": with_property("sparklog.partitions", "10001"),
    "partitioned by []": {"metaData": METADATA | {"partitionColumns": []}},
    "files are orc": {"metaData": METADATA | {"format": {"provider": "orc", "options": {}}}},
    "column 'offset' is": with_schema('"offset"', '"position"'),
    "column 'extra' is": with_schema(
        '"fields":[', '"fields":[{"name":"extra","type":"long","nullable":true,"metadata":{}},'
    ),
    "column 'key' is": with_schema('"key","type":"binary"', '"key","type":"string"'),
    "column 'timestamp' is": with_schema(
        '"timestamp","type":"timestamp","nullable":true',
        '"timestamp","type":"date","nullable":false',
    ),
    "column 'headers' is": with_schema('"containsNull":true', '"containsNull":false'),
    "column 'value' is": with_schema(
        '"value","type":"binary","nullable":true,"metadata":{',
        '"value","type":"binary","nullable":true,"metadata":{"delta.generationExpression":"key"',
    ),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_foreign_changes_are_refused_by_name(table: TopicTable, store: Store, reason: str) -> None:
    """An unsupported table is named; the last good snapshot stays, and no commit lands."""
    create(table, 1)
    good = append(table)
    put_commit(store, 2, FOREIGN[reason])
    with pytest.raises(errors.ForeignTable) as found:
        table.refresh()
    assert reason in found.value.reason
    assert table.snapshot == good
    with pytest.raises(errors.ForeignTable):
        append(table)
    with pytest.raises(errors.ForeignTable):
        table.checkpoint()
    with pytest.raises(errors.ForeignTable):
        another(table).refresh()


@pytest.mark.parametrize("action", [{"metaData": METADATA}, {"protocol": PROTOCOL}])
def test_half_a_table_is_refused(table: TopicTable, store: Store, action: dict[str, Any]) -> None:
    """A log without a protocol or a schema is not a table to be written to."""
    put_commit(store, 0, action)
    with pytest.raises(errors.ForeignTable, match="no protocol or no metadata"):
        table.refresh()


def test_foreign_change_may_be_undone(table: TopicTable, store: Store) -> None:
    """Once the property is removed, the topic continues."""
    create(table, 1)
    put_commit(store, 1, with_property("delta.columnMapping.mode", "name"))
    with pytest.raises(errors.ForeignTable):
        table.refresh()
    put_commit(store, 2, {"metaData": METADATA})
    assert append(table).ends == (10,)
    assert another(table).refresh() == table.snapshot


def test_an_append_only_table_gains_rows_and_loses_none(table: TopicTable, store: Store) -> None:
    """Appends and merges continue; a removal of rows has no effect; a topic may be deleted."""
    create(table, 1)
    first, second = (append(table).files[0][-1] for _ in range(2))
    put_commit(store, 3, with_property("delta.appendOnly", "TRUE"))
    assert append(table).append_only
    merged = dataclasses.replace(first, path="partition=0/m.parquet", last=second.last, rows=20)
    rearranged = TableChange(adds=(merged,), removes=(first, second), data_change=False)
    version = table.commit(lambda _: rearranged).version
    for change in (
        TableChange(removes=(merged,)),
        TableChange(removes=(merged,), data_change=False, drops_rows=True),
    ):
        with pytest.raises(errors.PolicyViolation, match=r"delta\.appendOnly"):
            table.commit(lambda _, change=change: change)  # type: ignore[misc]
    assert table.refresh().version == version
    assert another(table).refresh() == table.snapshot
    table.checkpoint()
    assert another(table).refresh().append_only
    ended = table.commit(delete_change)
    assert (ended.topic_id, ended.append_only) == (None, False)
    assert create(table, 1, topic_id="again").files == ((),)


def test_comments_on_columns_are_welcome(table: TopicTable, store: Store) -> None:
    """A schema that differs only in what people wrote about it is still ours."""
    create(table, 1)
    schema = delta_log.SCHEMA_STRING.replace('"metadata":{}', '"metadata":{"comment":"x"}', 1)
    put_commit(store, 1, {"metaData": METADATA | {"schemaString": schema}})
    assert table.refresh().version == 1


# ------------------------------------------------------------------------------ damage and doubt


@pytest.mark.parametrize("content", [b"", b"\n", b'{"add":{"path":', b"garbage", b'{"add":{}}'])
def test_torn_commit_is_named(table: TopicTable, store: Store, content: bytes) -> None:
    """A commit that is not whole is named with the check; the version before it stays usable."""
    create(table)
    follower = another(table)
    follower.refresh()
    seen = append(table)
    store.put_new(f"{LOG}/{2:020d}.json", content)
    for each in (follower, another(table)):
        with pytest.raises(errors.CorruptObject) as found:
            each.refresh()
        assert found.value.path == f"{LOG}/{2:020d}.json"
        assert each.snapshot == seen


def test_unanswered_put_that_landed_is_ours(clock: ManualClock) -> None:
    """A commit whose put got no answer counts once, where reading back shows our bytes."""
    store = MemoryStore(clock)
    create(TopicTable(store, "t", clock=clock), 1)
    fault = Fault(operation="put_new", moment="after", error=PutUnresolved("x", "timeout"))
    shaky = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
    assert append(shaky).version == 1
    assert TopicTable(store, "t", clock=clock).refresh() == shaky.snapshot


@pytest.mark.parametrize(
    "refusal",
    [
        errors.StorageUnavailable(operation="stat", path="x", reason="down"),
        errors.RootNotWritable(root="s3://b", reason="403"),
    ],
    ids=lambda error: error.code,
)
def test_doubt_after_the_put_is_told(clock: ManualClock, refusal: errors.SparklogError) -> None:
    """A commit that landed is never reported as refused, even if checking it fails."""
    store = MemoryStore(clock)
    create(TopicTable(store, "t", clock=clock), 1)
    # Refreshing asks for the predecessor once, the commit for the second time.
    fault = Fault(operation="stat", error=refusal, count=2)
    shaky = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
    with pytest.raises(errors.OutcomeUnknown):
        append(shaky)
    assert shaky.refresh().ends == (10,)


def test_too_many_lost_races_have_no_effect(
    table: TopicTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that always loses the race fails with a retriable error."""
    create(table, 1)
    monkeypatch.setattr("sparklog.storage.table.topic_table.TABLE_COMMIT_ATTEMPTS", 3)
    other = another(table)
    other.refresh()

    def decide(snapshot: TableSnapshot) -> TableChange | None:
        append(table)
        return appending(table.clock)(snapshot)

    with pytest.raises(errors.StorageUnavailable, match="other writers were faster 3 times"):
        other.commit(decide)
    assert another(table).refresh() == table.snapshot


# ------------------------------------------------------------------------------ power cuts


FOREIGN_ROWS = data_file.encode([tables.record_batch(0, 0, 1)]).data.to_pybytes()
"""Returns the rows of a file of another engine."""


def foreign_merge(store: MemoryStore, table: TopicTable, *, name: str) -> None:
    """Another engine replaces all files of partition 0 by one, and flushes nothing."""
    snapshot = table.refresh()
    files = snapshot.files[0]
    path = f"partition=0/{name}.parquet"
    store.put_unflushed(f"{table.folder}/{path}", FOREIGN_ROWS)
    bounds = {"minValues": {"offset": files[0].first}, "maxValues": {"offset": files[-1].last}}
    actions: list[dict[str, Any]] = [
        {"remove": {"path": file.path, "dataChange": False, "deletionTimestamp": 1}}
        for file in files
    ]
    added = {
        "path": path,
        "partitionValues": {"partition": "0"},
        "size": len(FOREIGN_ROWS),
        "modificationTime": 1,
        "dataChange": False,
        "stats": msgspec.json.encode({"numRecords": files[-1].last, **bounds}).decode(),
    }
    lines = msgspec.json.Encoder().encode_lines([*actions, {"add": added}])
    store.put_unflushed(f"{LOG}/{snapshot.version + 1:020d}.json", lines)


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_what_another_engine_wrote_is_durable_before_we_build_on_it(
    clock: ManualClock, *, from_checkpoint: bool
) -> None:
    """A power cut after our next commit takes neither the foreign commit nor the file it adds."""
    store = MemoryStore(clock, is_local=True)
    table = TopicTable(store, "t", clock=clock)
    create(table)
    append(table, 2)
    foreign_merge(store, table, name="part-1")
    if from_checkpoint:
        table.refresh()
        checkpoint = delta_log.encode_checkpoint(table._replay.compacted())
        store.put_unflushed(f"{LOG}/{delta_log.checkpoint_name(3)}", checkpoint)
        remove_commits(store, range(4))
        table = another(table)
    append(table, 1)
    expected = table.snapshot
    store.lose_unsynced(lambda _: True)
    assert another(table).refresh() == expected
    assert store.get(f"{table.folder}/partition=0/part-1.parquet").to_pybytes() == FOREIGN_ROWS


def test_what_another_engine_wrote_is_durable_before_our_checkpoint_names_it(
    clock: ManualClock,
) -> None:
    """A power cut after our checkpoint of a foreign commit leaves the file that both name."""
    store = MemoryStore(clock, is_local=True)
    table = TopicTable(store, "t", clock=clock)
    create(table)
    append(table, 2)
    foreign_merge(store, table, name="part-1")
    expected = dataclasses.replace(table.refresh(), gaps={})  # the janitor notes gaps before
    table.checkpoint()
    store.lose_unsynced(lambda _: True)
    assert another(table).refresh() == expected
    assert store.get(f"{table.folder}/partition=0/part-1.parquet").to_pybytes() == FOREIGN_ROWS


def foreign_store(clock: ManualClock) -> MemoryStore:
    """Has a table whose newest commit is another engine's merge, which nothing has flushed."""
    store = MemoryStore(clock, is_local=True)
    create(TopicTable(store, "t", clock=clock))
    append(TopicTable(store, "t", clock=clock), 2)
    foreign_merge(store, TopicTable(store, "t", clock=clock), name="part-1")
    return store


def test_a_file_of_another_engine_is_durable_before_its_commit(clock: ManualClock) -> None:
    """A power cut while a table is synced leaves no durable commit that names an empty file."""
    for steps in range(1, 12):
        store = foreign_store(clock)
        cut = errors.StorageUnavailable(operation="?", path="?", reason="the power is gone")
        fault = Fault(operation="sync_files", error=cut, count=steps)
        table = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
        table.refresh()
        try:
            table.sync()
        except errors.StorageUnavailable:
            store.lose_unsynced(lambda _: True)
            commit = store.get(f"{LOG}/{3:020d}.json") if _stands(store, 3) else b""
            if len(commit):
                data = store.get(f"{table.folder}/partition=0/part-1.parquet")
                assert data.to_pybytes() == FOREIGN_ROWS
        else:
            assert steps > 2
            break


def test_sync_that_failed_is_done_again(clock: ManualClock) -> None:
    """Wherever it failed, a table that is synced afterwards outlives a power cut."""
    for steps in range(1, 12):
        store = foreign_store(clock)
        down = errors.StorageUnavailable(operation="?", path="?", reason="for a moment")
        fault = Fault(operation="sync_files", error=down, count=steps)
        table = TopicTable(store.view(ScriptedFaults(fault)), "t", clock=clock)
        found = table.refresh()
        try:
            table.sync()
        except errors.StorageUnavailable:
            table.sync()
        else:
            assert steps > 2
            break
        store.lose_unsynced(lambda _: True)
        assert TopicTable(store, "t", clock=clock).refresh() == found
        assert store.get(f"{table.folder}/partition=0/part-1.parquet").to_pybytes() == FOREIGN_ROWS


def _stands(store: Store, version: int) -> bool:
    try:
        store.stat(f"{LOG}/{version:020d}.json")
    except ObjectMissing:
        return False
    return True


def test_a_foreign_file_is_durable_before_what_it_replaces_goes(clock: ManualClock) -> None:
    """The files that a foreign merge has replaced are swept once the merged one is durable."""
    store = MemoryStore(clock, is_local=True)
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    append(table, 2)
    foreign_merge(store, table, name="part-1")
    clock.advance(HOUR)
    assert maintenance.sweep_replaced(table) == 2
    store.lose_unsynced(lambda _: True)
    (file,) = another(table).refresh().files[0]
    assert store.get(f"{table.folder}/{file.path}").to_pybytes() == FOREIGN_ROWS


def test_a_foreign_file_is_durable_before_the_log_forgets_what_it_replaced(
    clock: ManualClock,
) -> None:
    """Old commits are cleaned up once what other engines have added after them is durable."""
    store = MemoryStore(clock, is_local=True)
    table = TopicTable(store, "t", clock=clock)
    create(table, 1)
    append(table, 2)
    foreign_merge(store, table, name="part-1")
    for version in (3, 4):  # another engine writes checkpoints too
        table.refresh()
        checkpoint = delta_log.encode_checkpoint(table._replay.compacted())
        store.put_unflushed(f"{LOG}/{delta_log.checkpoint_name(version)}", checkpoint)
        if version == 3:
            store.put_unflushed(f"{LOG}/{4:020d}.json", b'{"commitInfo":{}}\n')
    assert maintenance.clean_log(table, kept_versions=1) == 3
    store.lose_unsynced(lambda _: True)
    (file,) = another(table).refresh().files[0]
    assert store.get(f"{table.folder}/{file.path}").to_pybytes() == FOREIGN_ROWS
    store.put(f"{LOG}/{delta_log.checkpoint_name(4)}", b"damaged")
    assert another(table).refresh().files == ((file,),)  # from the other one that is kept


# ------------------------------------------------------------------------------ many tables


def tables_of(store: Store, clock: ManualClock, count: int) -> list[TopicTable]:
    """New tables with one partition each."""
    found = [TopicTable(store, f"t{number}", clock=clock) for number in range(count)]
    for each in found:
        each.commit(lambda _: create_change("0" * 16, 1, {}))
    return found


def set_end(end: int) -> Callable[[TableSnapshot], TableChange]:
    """Returns a change of the end of partition 0."""
    return lambda _: TableChange(txns={end_app_id("0" * 16, 0): end})


def test_tables_are_committed_to_together(store: Store, clock: ManualClock) -> None:
    """Every table gets its own outcome: a commit, one after a lost race, a refusal, an error."""
    tables = tables_of(store, clock, 4)
    TopicTable(store, "t1", clock=clock).commit(set_end(3))

    def fail(_: TableSnapshot) -> TableChange:
        raise errors.TopicExists(topic="t3")

    decides: list[Callable[[TableSnapshot], TableChange | None]] = [
        set_end(5),
        set_end(5),
        lambda _: None,
        fail,
    ]
    found = commit_all(store, list(zip(tables, decides, strict=True)), clock=clock)
    assert [(each.version, each.ends) for each in found[:3] if isinstance(each, TableSnapshot)] == [
        (1, (5,)),
        (2, (5,)),
        (0, (0,)),
    ]
    assert isinstance(found[3], errors.TopicExists)
    fresh = [TopicTable(store, each.topic, clock=clock).refresh() for each in tables]
    assert fresh[:3] == found[:3]


def test_lost_races_are_repeated_together(clock: ManualClock) -> None:
    """Tables whose versions were taken are committed to again, in one round of puts.

    An error of one of them, which shows when it is read again, is its own.
    """
    store = MemoryStore(clock)
    tables = tables_of(store, clock, 4)
    for name in ("t0", "t1", "t2"):
        TopicTable(store, name, clock=clock).commit(set_end(3))
    store.put_new("topics/t2/_delta_log/00000000000000000002.json", b"{")
    rounds: list[int] = []

    def put_all_new(objects: Sequence[tuple[str, Payload]]) -> list[Exception | None]:
        rounds.append(len(objects))
        return store.put_all_new(objects)

    commits = [(each, set_end(5)) for each in tables]
    found = commit_all(store, commits, clock=clock, put_all_new=put_all_new)
    assert rounds == [4, 2]
    assert [each.version for each in found if isinstance(each, TableSnapshot)] == [2, 2, 1]
    assert isinstance(found[2], errors.CorruptObject)


def test_a_failed_flush_of_many_tables_holds_up_none(clock: ManualClock) -> None:
    """Each table is then made durable by itself, and none has the error."""

    class OutOfMemory(NoFaults):
        failures = 1

        def before(self, operation: Operation, path: str) -> None:
            if operation == "sync_files" and self.failures:
                self.failures -= 1
                raise MemoryError

    store = MemoryStore(clock)
    tables = tables_of(store.view(OutOfMemory()), clock, 2)
    found = commit_all(
        store.view(OutOfMemory()), [(each, set_end(5)) for each in tables], clock=clock
    )
    assert [each.version for each in found if isinstance(each, TableSnapshot)] == [1, 1]


def test_others_that_are_always_faster_end_a_commit(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many lost races are an error, as of a single commit."""
    monkeypatch.setattr("sparklog.storage.table.topic_table.TABLE_COMMIT_ATTEMPTS", 3)
    store = MemoryStore(clock)
    table, steady = tables_of(store, clock, 2)

    def overtaken(before: TableSnapshot) -> TableChange:
        TopicTable(store, "t0", clock=clock).commit(set_end(before.version))
        return set_end(9)(before)

    lost, landed = commit_all(store, [(table, overtaken), (steady, set_end(5))], clock=clock)
    assert isinstance(lost, errors.StorageUnavailable)
    assert "3 times" in lost.reason
    assert isinstance(landed, TableSnapshot)
    assert landed.ends == (5,)


def test_a_commit_that_another_thread_has_read_counts(store: Store, clock: ManualClock) -> None:
    """A table may be refreshed between the put of a commit and the end of `commit_all`."""
    (table,) = tables_of(store, clock, 1)
    file = table_file(clock, 0, 0, 3)
    change = TableChange(adds=(file,), txns={end_app_id("0" * 16, 0): 4})
    prepared = table.prepare_commit(lambda _: change)
    assert not isinstance(prepared, TableSnapshot)
    store.put_new(prepared.path, prepared.data)
    table.refresh()
    landed = table.finish_commit(prepared)
    assert landed is not None
    assert (landed.version, landed.ends) == (1, (4,))
