"""`sparklog topics dead-letters`: copies records whose values do not fit to another topic.

The command is a member of a consumer group. A batch of the topic counts as processed, and is
committed, after the copies of its records were acked: a command that is killed repeats copies, and
the next one leaves none out.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog import errors, limits
from sparklog.display import counted
from sparklog.terminal.options import (
    BootstrapOption,
    RootOption,
    TopicArgument,
    WaitOption,
    open_log,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from sparklog.client.log import Log
    from sparklog.client.producer.producer import Producer
    from sparklog.formats.values.columns import Plan
    from sparklog.terminal.meter import CopyMeter


def dead_letters(
    topic: TopicArgument,
    to: Annotated[
        str,
        typer.Option(
            metavar="TOPIC",
            help="The topic to copy to, which is created if it does not exist.",
            show_default=False,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new records until Ctrl-C.")
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The consumer group that has the position. Default: dead-letters-TO.",
            show_default=False,
        ),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Copy the records of a typed topic whose values do not fit to another topic.

    Copies have the same bytes, and headers with the reason, the topic, the partition and the
    offset. The next command continues where the last one ended. One that was killed may have
    copied records without having committed its position, and these are copied again.

    Example: sparklog topics dead-letters orders --to orders.dead --root ./data
    """
    if to == topic:
        raise typer.BadParameter("--to must name a different topic than TOPIC")
    with open_log(root, bootstrap, wait) as log:
        copier = _Copier(log, topic, to)
        copier.check()
        try:
            with contextlib.ExitStack() as stack:
                copier.producer = stack.enter_context(log.producer())
                name = group or f"dead-letters-{to}"
                member = stack.enter_context(log.consumer(topic, follow=follow, group=name))
                meter = stack.enter_context(_meter())
                for batch in member.batches():
                    copier.copy(batch)
                    if meter is not None:
                        meter.show(copier.records, copier.copied, left=member.statistics().lag)
        finally:
            typer.echo(copier.summary, err=True)


def _meter() -> contextlib.AbstractContextManager[CopyMeter | None]:
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from sparklog.terminal.meter import CopyMeter

    return CopyMeter("dead letters")


class _Copier:
    """The copy of one topic's records to another, and the columns by which they are judged."""

    producer: Producer

    def __init__(self, log: Log, topic: str, to: str) -> None:
        from sparklog.client.schemas import BrokerSchemas  # it loads pyarrow

        self._log = log
        self._topic = topic
        self._to = to
        self._clock = log.connection.clock
        self._schemas = BrokerSchemas(log.connection, topic)
        self._plan: Plan | None = None
        self._planned_at = 0.0
        self.records = 0
        """The number of records that were examined."""
        self.copied = 0
        """The number of dead letters that were acked."""

    def check(self) -> None:
        """Creates the target if it does not exist. Raises `WrongSchema` for an untyped topic."""
        self._look()
        if self._plan is None:
            add = f"sparklog topics columns {self._topic} --accept"
            reason = f"topic {self._topic} has no typed columns; to add some: {add}"
            raise errors.WrongSchema(reason=reason)
        try:
            self._log.describe(self._to)
        except errors.UnknownTopic:
            self._log.create_topic(self._to, if_absent=True)
            typer.echo(f"sparklog: created topic {self._to}", err=True)

    def copy(self, rows: pa.RecordBatch) -> None:
        """Copies those of the rows that do not fit, and waits until the copies are durable."""
        if self._clock.monotonic() - self._planned_at > limits.METADATA_AGE_SECONDS:
            self._look()
        found = self._dead_letters(rows)
        if found is not None and found.num_rows:
            try:
                self.producer.send_table(self._to, found).result()
            except (errors.RecordTooLarge, errors.MessageTooLarge) as error:
                first, last = (rows.column("offset")[at].as_py() for at in (0, -1))
                partition = rows.column("partition")[0].as_py()
                error.add_note(
                    f"The record is one of {self._topic}-{partition}, offsets {first} to {last}; a"
                    " copy is larger than its record, because it has more headers."
                )
                raise
            self.copied += found.num_rows
        self.records += rows.num_rows

    def _dead_letters(self, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        from sparklog.client.dead_letters import dead_letters

        if self._plan is None:
            return None
        return dead_letters(rows, self._plan, self._topic, self._schemas)

    def _look(self) -> None:
        self._plan = self._log.describe(self._topic).plan
        self._planned_at = self._clock.monotonic()

    @property
    def summary(self) -> str:
        found = counted(self.copied, "dead letter")
        return f"{found} of {counted(self.records, 'record')} copied to {self._to}"
