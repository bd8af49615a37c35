"""The topic that a job writes to, and the runs that it contains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import sparklog
from sparklog import errors
from sparklog.clock import SystemClock
from sparklog.display import counted
from sparklog.options import BOOTSTRAP_VARIABLE, ROOT_VARIABLE, check_root, storage_options
from sparklog.sinks.options import check_name, to_topic
from sparklog.storage.metadata.cluster_file import read_cluster
from sparklog.storage.metadata.identity import place_of
from sparklog.storage.objects import open_store
from sparklog.storage.staging import manifest
from sparklog.storage.staging.manifest import Destination, Manifest
from sparklog.storage.table.names import begun_app_id, key_app_id, query_app_id
from sparklog.storage.table.topic_table import TopicTable
from sparklog.terminal.options import root_metadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter

    from sparklog.client.log import Log
    from sparklog.formats.flight_messages import TopicInfo

_RUN_NAME_LENGTH: Final = 180
"""Maximum length of a run's name, to which the topic's id is appended."""

PartitionsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Create the topic with this many partitions if it does not exist.",
        show_default=False,
    ),
]
TargetTopicOption = Annotated[
    str, typer.Option(metavar="TOPIC", help="The topic to write to.", show_default=False)
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be written, without writing.")
]


def root_for_spark(root: str | None) -> str:
    """Returns the root that the command line or the environment names.

    Raises `typer.BadParameter` if none is named, or the address of a broker instead.
    """
    if not root and os.environ.get(BOOTSTRAP_VARIABLE):
        raise typer.BadParameter("Spark needs the root: pass --root, not the address of a broker")
    found = root or os.environ.get(ROOT_VARIABLE)
    if not found:
        raise typer.BadParameter(f"no log is named: pass --root, or set {ROOT_VARIABLE}")
    return check_root("--root", found, " Spark needs the root, not the address of a broker.")


def check_run_name(name: str | None) -> str | None:
    """Returns the value of `--once-as`. Raises `BadOption` for a name that the sink rejects."""
    if name is not None:
        check_name("--once-as", name, most=_RUN_NAME_LENGTH)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A topic of a root.

    A run of a job has a name. It is one write, under an idempotency key, or a sequence of numbered
    writes. The topic's table records which of them it has, or a receipt if several brokers lead it.
    """

    root: str
    topic: str
    partitions: int | None
    """The number of partitions of a new topic; None: the topic must exist."""

    def find(self) -> int | None:
        """Returns the number of the topic's partitions; None if it must be created.

        Does not turn a folder into a root. Raises `UnknownTopic`, `NotARoot`.
        """
        try:
            root_metadata(self.root)
        except errors.NotARoot:
            if self.partitions is None:
                raise
            return None
        with sparklog.connect(self.root, detached=True) as log:
            try:
                return len(log.describe(self.topic).partitions)
            except errors.UnknownTopic as error:
                if self.partitions is None:
                    error.add_note("To create it, pass --partitions N.")
                    raise
                return None

    def is_topic(self, log: Log, info: TopicInfo) -> bool:
        """Returns whether it is this topic of `log`, however the root is named.

        Ids decide. A copy of a root has the ids of its original, but a different folder.
        """
        store = open_store(self.root, storage_options(self.root))
        try:
            cluster_id = read_cluster(store).cluster_id
        except errors.NotARoot:
            return False
        if (cluster_id, self.topic) != (log.cluster().cluster_id, info.topic):
            return False
        place, other = place_of(store), place_of(open_store(log.root, storage_options(log.root)))
        if place and other and place != other:
            return False
        with sparklog.connect(self.root, detached=True) as own:
            try:
                return own.describe(self.topic).topic_id == info.topic_id
            except errors.UnknownTopic:
                return False

    def create(self) -> None:
        with sparklog.connect(self.root, detached=True) as log:
            log.create_topic(self.topic, self.partitions, if_absent=True)

    def topic_id(self) -> str:
        """Returns the id of the current topic. Raises `UnknownTopic`."""
        with sparklog.connect(self.root, detached=True) as log:
            return log.describe(self.topic).topic_id

    def name_of(self, run: str) -> str:
        """Returns the name of a run's writes to the current topic."""
        return _named(run, self.topic_id())

    def check(self, name: str, run: str) -> None:
        """Raises `BadRequest` if `name`, that of the run's writes, is for a deleted topic."""
        if self.name_of(run) != name:
            raise errors.BadRequest(
                reason=f"Topic {self.topic!r} was deleted and created again during this run. Run it"
                " again to write all of its records to the current topic."
            )

    def has(self, run: str) -> bool:
        """Returns whether the run's single write is in the topic."""
        table, topic_id = self._table()
        name = to_topic(_named(run, topic_id), self.topic)
        if table.txn(key_app_id(topic_id, name)) is not None:
            return True
        # Each leader of a cluster commits its part, and a receipt records that all have.
        topics = {self.topic: Destination(topic_id, table.snapshot.partitions)}
        attempt = manifest.open_attempt(table.store, name, 0, topics)
        write = Manifest(query=name, batch=0, attempt=attempt, topic_ids={self.topic: topic_id})
        receipt = manifest.find_receipt(table.store, write)
        return receipt is not None and self.topic in receipt.holders(topics)

    def newest(self, run: str) -> int | None:
        """Returns the number of the run's last write in the topic; None if there is none."""
        table, topic_id = self._table()
        name = to_topic(_named(run, topic_id), self.topic)
        whole = table.txn(query_app_id(topic_id, name))
        begun = table.txn(begun_app_id(topic_id, name))
        # Parts of the newest write may be missing: writing it again completes it.
        newest = max(whole.version if whole else -1, begun.version - 1 if begun else -1)
        return newest if newest >= 0 else None

    def _table(self) -> tuple[TopicTable, str]:
        with sparklog.connect(self.root, detached=True) as log:
            log.flush_to_table(self.topic)
        store = open_store(self.root, storage_options(self.root))
        table = TopicTable(store, self.topic, clock=SystemClock(), only_reads=True)
        return table, table.refresh().topic_id or ""

    def writer(self, records: DataFrame, **options: Any) -> DataFrameWriter:
        """Returns a writer for a batch to the topic."""
        given = {"root": self.root, "topic": self.topic, **options}
        return records.write.format("sparklog").mode("append").options(**given)


def _named(run: str, topic_id: str) -> str:
    """Returns the name of a run's writes, distinct from writes to a deleted topic of that name."""
    return f"{run}.{topic_id}"


def last_line(topic: str, count: int, seconds: float) -> str:
    """Returns the result of a job that has written records."""
    return f"{topic}: {in_seconds(count, seconds)}"


def in_seconds(count: int, seconds: float) -> str:
    """Returns a record count and a duration as text, with the rate if it is at least 1/s."""
    took, rate = f"{counted(count, 'record')} in {seconds:.1f} s", round(count / seconds)
    return f"{took} ({counted(rate, 'record')}/s)" if rate else took
