"""`sparklog produce`: files, or standard input, into a topic."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import typer

from sparklog import errors
from sparklog.cli.formats import Fields, InputFormat, format_of
from sparklog.cli.shared import BootstrapOption, RootOption, TopicArgument, WaitOption, open_log

if TYPE_CHECKING:
    from io import BufferedIOBase

    import pyarrow as pa

    from sparklog.client import TableFuture

_STDIN = Path("-")


def produce(
    topic: TopicArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            help="One after the other; - or nothing is standard input.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        InputFormat | None,
        typer.Option(
            "--format",
            help="jsonl and text: a line is a value. csv and parquet: a row is, as a JSON object;"
            " but the files of a topic's own table are taken for the records that they are."
            " Without it, by the ending of the file's name; standard input is text, and jsonl where"
            " a field is named.",
            show_default=False,
        ),
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The field whose text is the key.", show_default=False),
    ] = None,
    timestamp_field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The field that is the record's time: ISO 8601 (UTC without a zone), or"
            " milliseconds since 1970. Without it, the time of arrival.",
            show_default=False,
        ),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            min=0, help="All records to this one, whatever their keys.", show_default=False
        ),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Send the records of files to a topic; done when all of them are acked, so durable.

    Example: sparklog produce flights flights.jsonl --key-field carrier --root ./data
    """
    fields = Fields(key=key_field, timestamp=timestamp_field)
    inputs = [_input(file, kind, fields) for file in files or [_STDIN]]
    began = time.monotonic()
    with open_log(root, bootstrap, wait) as log:
        log.describe(topic)  # a wrong name is told before anything is read
        with log.producer() as producer, _Meter(inputs) as meter:
            acks = _Acks()
            try:
                for batch in _batches(inputs, fields, meter):
                    table = batch if partition is None else _placed(batch, partition)
                    acks.add(producer.send_table(topic, table), batch.num_rows)
                acks.wait_for_all()
            except (errors.SparklogError, OSError) as error:
                acks.count_the_rest()
                error.add_note(f"{acks.records:,} records were acked")
                raise
    seconds = time.monotonic() - began
    typer.echo(f"{acks.records:,} records acked in {seconds:.1f} s", err=True)


# ------------------------------------------------------------------------------ in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    path: Path
    kind: InputFormat

    @property
    def name(self) -> str:
        return "standard input" if self.path == _STDIN else str(self.path)

    @property
    def size_bytes(self) -> int | None:
        return self.path.stat().st_size if self.path.is_file() else None

    @contextlib.contextmanager
    def open(self) -> Iterator[BufferedIOBase]:
        if self.path == _STDIN:
            yield cast("BufferedIOBase", sys.stdin.buffer)
        else:
            with self.path.open("rb") as stream:
                yield stream


def _input(file: Path, kind: InputFormat | None, fields: Fields) -> _Input:
    if file != _STDIN and (not file.exists() or file.is_dir()):
        raise typer.BadParameter(f"there is no file {str(file)!r}")
    found = _Input(path=file, kind=kind or _kind(file, fields))
    if found.kind is InputFormat.TEXT and fields != Fields():
        raise typer.BadParameter(f"text has no fields; say what {found.name} is by --format")
    if fields.key is not None and fields.key == fields.timestamp:
        raise typer.BadParameter("--key-field and --timestamp-field are the same field")
    return found


def _kind(file: Path, fields: Fields) -> InputFormat:
    """Of an input of which nobody has said it; what comes in has no name, but text no fields."""
    if file == _STDIN and fields != Fields():
        return InputFormat.JSONL
    return format_of(file.name)


def _batches(inputs: list[_Input], fields: Fields, meter: _Meter) -> Iterator[pa.RecordBatch]:
    from sparklog.cli.reading import read

    for each in inputs:
        with each.open() as stream:
            for batch in read(stream, each.kind, fields=fields, name=each.name):
                yield batch
                meter.advance(batch.num_rows, stream.tell() if each.size_bytes else 0)
        meter.next_input()


def _placed(batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    import pyarrow as pa

    if "partition" in batch.schema.names:
        batch = batch.drop_columns(["partition"])
    column = pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows)
    return batch.append_column("partition", column)


# ------------------------------------------------------------------------------ out


class _Acks:
    """What is sent and not yet acked; a refusal is heard as soon as it is first in the line."""

    def __init__(self) -> None:
        self.records = 0
        """How many are acked."""
        self._waiting: deque[tuple[TableFuture, int]] = deque()

    def add(self, future: TableFuture, rows: int) -> None:
        self._waiting.append((future, rows))
        while self._waiting and self._waiting[0][0].done():
            self._take()

    def wait_for_all(self) -> None:
        while self._waiting:
            self._take()

    def count_the_rest(self) -> None:
        """After a failure: what else is acked counts, however much more failed."""
        while self._waiting:
            with contextlib.suppress(errors.SparklogError):
                self._take()

    def _take(self) -> None:
        future, rows = self._waiting.popleft()
        future.result()
        self.records += rows


class _Meter:
    """A bar on standard error, if that is a terminal."""

    def __init__(self, inputs: list[_Input]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        sizes = [each.size_bytes for each in inputs]
        self._sizes = iter(sizes)
        self._before_bytes = 0
        self._records = 0
        self._progress: Any = Progress(
            BarColumn(),
            TextColumn("{task.fields[records]:,} records"),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        total = None if None in sizes else sum(size or 0 for size in sizes)
        self._task = self._progress.add_task("", total=total, records=0)

    def advance(self, records: int, position_bytes: int) -> None:
        self._records += records
        done = self._before_bytes + position_bytes
        self._progress.update(self._task, completed=done, records=self._records)

    def next_input(self) -> None:
        self._before_bytes += next(self._sizes) or 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
