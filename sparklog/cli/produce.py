"""`sparklog produce`: files, or standard input, into a topic."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeAlias, cast

import typer

from sparklog import errors
from sparklog.cli.formats import Fields, InputFormat, format_of
from sparklog.cli.shared import BootstrapOption, RootOption, TopicArgument, WaitOption, open_log

if TYPE_CHECKING:
    from io import BufferedIOBase

    import pyarrow as pa

    from sparklog.cli.reading import Lines
    from sparklog.client import Producer, TableFuture

_STDIN: Final = Path("-")
_OF_LINES: Final = (InputFormat.JSONL, InputFormat.TEXT)
_Place: TypeAlias = "tuple[_Input, int]"
"""An input and the number of a line of it."""


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
    from_line: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Begin at this line, counted from 1, of one file of lines: where an earlier"
            " command has stopped.",
            show_default=False,
        ),
    ] = None,
    skip_bad: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append lines of JSON that cannot be sent to this file, and go on; without it the"
            " first of them ends the command.",
            show_default=False,
        ),
    ] = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Send the records of files to a topic; done when all of them are acked, so durable.

    Where it ends early, it says from which line on to go on, so that no record is sent twice.

    Example: sparklog produce flights flights.jsonl --key-field carrier --root ./data
    """
    fields = Fields(key=key_field, timestamp=timestamp_field)
    from sparklog.cli.reading import Lines

    inputs = [_input(file, kind, fields) for file in files or [_STDIN]]
    _check_lines(inputs, from_line, skip_bad)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        lines = Lines(first=from_line or 1)
        if skip_bad is not None:
            lines.bad = stack.enter_context(skip_bad.open("ab"))
        log = stack.enter_context(open_log(root, bootstrap, wait))
        log.describe(topic)  # a wrong name is told before anything is read
        producer = stack.enter_context(log.producer())
        meter = stack.enter_context(_Meter(inputs))
        acks = _Acks()
        reader = _Reader(inputs, fields, lines)
        try:
            for batch in reader.batches(meter):
                table = batch if partition is None else _placed(batch, partition)
                acks.send(producer, topic, table, reader.at)
                reader.handed_on()
            acks.wait_for_all()
        except (errors.SparklogError, OSError) as error:
            acks.count_the_rest()
            error.add_note(f"{acks.records:,} records were acked{reader.advice(acks, error)}")
            raise
        except KeyboardInterrupt:
            acks.count_the_rest()
            reader.forget_what_was_not_handed_on()
            advice = reader.advice(acks, None)
            typer.echo(f"sparklog: {acks.records:,} records were acked{advice}", err=True)
            raise
    seconds = time.monotonic() - began
    typer.echo(f"{acks.records:,} records acked in {seconds:.1f} s", err=True)
    if lines.bad_count:
        left = f"{lines.bad_count:,} line{'' if lines.bad_count == 1 else 's'}"
        typer.echo(f"{left} left out, and written to {skip_bad}", err=True)


# ------------------------------------------------------------------------------ in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    path: Path
    kind: InputFormat
    is_guessed: bool
    """Nobody has said its format."""

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
    if file.is_dir():
        raise typer.BadParameter(f"{str(file)!r} is a folder; name the files in it")
    if file != _STDIN and not file.exists():
        raise typer.BadParameter(f"there is no file {str(file)!r}")
    found = _Input(path=file, kind=kind or _kind(file, fields), is_guessed=kind is None)
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


def _check_lines(inputs: list[_Input], from_line: int | None, skip_bad: Path | None) -> None:
    """Raises a usage error where an option has no lines to be about."""
    if from_line is not None:
        if len(inputs) > 1:
            raise typer.BadParameter("--from-line is for one file; send the others after it")
        if inputs[0].kind not in _OF_LINES:
            raise typer.BadParameter(f"--from-line is for lines, not for {inputs[0].kind}")
    if skip_bad is not None:
        if not any(each.kind is InputFormat.JSONL for each in inputs):
            raise typer.BadParameter("--skip-bad is for lines of JSON (--format jsonl)")
        for each in inputs:
            if each.path != _STDIN and skip_bad.exists() and skip_bad.samefile(each.path):
                raise typer.BadParameter(f"--skip-bad: {str(skip_bad)!r} is the file to be sent")


class _Reader:
    """Reads the inputs one after the other, and knows how far it has come."""

    def __init__(self, inputs: list[_Input], fields: Fields, lines: Lines) -> None:
        self._inputs = inputs
        self._fields = fields
        self._lines = lines
        self._current = inputs[0]
        self._handed_on = lines.first

    def handed_on(self) -> None:
        """What was read so far is sent."""
        self._handed_on = self._lines.next

    def forget_what_was_not_handed_on(self) -> None:
        """After an interrupt, which may come between reading and sending."""
        self._lines.next = self._handed_on

    @property
    def at(self) -> _Place:
        """Where the batch begins that came last."""
        return self._current, self._lines.at

    def batches(self, meter: _Meter) -> Iterator[pa.RecordBatch]:
        from sparklog.cli.reading import read

        for each in self._inputs:
            self._current = each
            self._lines.at = self._lines.next = self._handed_on = self._lines.first
            with each.open() as stream:
                for batch in read(
                    stream,
                    each.kind,
                    fields=self._fields,
                    name=each.name,
                    is_guessed=each.is_guessed,
                    lines=self._lines,
                ):
                    yield batch
                    meter.advance(batch.num_rows, stream.tell() if each.size_bytes else 0)
            meter.next_input()

    def advice(self, acks: _Acks, error: BaseException | None) -> str:
        """How to go on without sending a record twice, as far as that is known."""
        current, line = acks.unacked or (self._current, self._lines.next)
        if current.kind not in _OF_LINES:
            return ""
        where = f" of {current.name}" if len(self._inputs) > 1 else ""
        if acks.unacked:
            return (
                f"; all lines before {line}{where} are among them, of those from it on perhaps"
                f" some: --from-line {line} sends all of these"
            )
        told = f"; these are all lines before {line}{where}: go on by --from-line {line}"
        if isinstance(error, errors.BadRequest) and self._lines.is_line_wrong:
            told += " once it is corrected, or write bad lines elsewhere by --skip-bad FILE"
        return told


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
        self.unacked: _Place | None = None
        """Where the first batch begins of which not all was acked."""
        self._waiting: deque[tuple[TableFuture, int, _Place]] = deque()

    def send(self, producer: Producer, topic: str, table: pa.RecordBatch, place: _Place) -> None:
        try:
            future = producer.send_table(topic, table)
        except (errors.SparklogError, KeyboardInterrupt):
            self.unacked = self.unacked or place
            raise
        self.add(future, table.num_rows, place)

    def add(self, future: TableFuture, rows: int, place: _Place) -> None:
        self._waiting.append((future, rows, place))
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
        future, rows, place = self._waiting.popleft()
        try:
            future.result()
        except (errors.SparklogError, KeyboardInterrupt):
            self.unacked = self.unacked or place
            raise
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
