"""`sparklog produce`: sends files or standard input to a topic."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, cast

import typer

from sparklog import errors
from sparklog.cli.formats import Fields, InputFormat, format_of
from sparklog.display import counted
from sparklog.terminal.options import (
    BootstrapOption,
    RootOption,
    TopicArgument,
    WaitOption,
    open_log,
)

if TYPE_CHECKING:
    from io import BufferedIOBase

    import pyarrow as pa

    from sparklog.cli.reading import Lines
    from sparklog.client.producer.batch import TableFuture
    from sparklog.client.producer.producer import Producer
    from sparklog.terminal.meter import Meter

_STDIN: Final = Path("-")
_LINE_FORMATS: Final = (InputFormat.JSONL, InputFormat.TEXT)
_Position: TypeAlias = "tuple[_Input, int]"
"""An input and a line number in it."""

FilesArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE",
        help="Files to send, in order; - or none is standard input.",
        show_default=False,
    ),
]

FormatOption = Annotated[
    InputFormat | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="jsonl, text: each line is a value. csv, parquet: each row becomes a JSON object;"
        " files of a topic's table are read as records. Default: by the suffix of the file's"
        " name; standard input is text, or jsonl with --key-field or --timestamp-field.",
        show_default=False,
    ),
]

KeyFieldOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The field to use as key.", show_default=False)
]

TimestampFieldOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The field to use as timestamp: ISO 8601 (UTC by default), or milliseconds"
        " since 1970. Default: the time of arrival.",
        show_default=False,
    ),
]

PartitionOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Send all records to this partition, regardless of their keys.",
        show_default=False,
    ),
]

FromLineOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Start at this line (counted from 1) of a single file of lines, such as the line at"
        " which an earlier command stopped.",
        show_default=False,
    ),
]

SkipBadOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append invalid lines of JSON to this file, and continue. By default, the first one"
        " ends the command.",
        show_default=False,
    ),
]


def produce(
    topic: TopicArgument,
    files: FilesArgument = None,
    kind: FormatOption = None,
    key_field: KeyFieldOption = None,
    timestamp_field: TimestampFieldOption = None,
    partition: PartitionOption = None,
    from_line: FromLineOption = None,
    skip_bad: SkipBadOption = None,
    root: RootOption = None,
    bootstrap: BootstrapOption = None,
    wait: WaitOption = None,
) -> None:
    """Send records from files to a topic.

    The command waits until all records are durable. If it stops early, it prints the line from
    which to continue, so that no record is sent twice.

    Example: sparklog produce flights a.jsonl --key-field carrier --root ./data
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
        log.describe(topic)  # report a wrong name before reading anything
        producer = stack.enter_context(log.producer())
        meter = _meter(inputs)
        if meter is not None:
            stack.enter_context(meter)
        acks = _Acks()
        reader = _Reader(inputs, fields, lines)
        try:
            for batch in reader.batches(meter):
                table = batch if partition is None else _placed(batch, partition)
                acks.send(producer, topic, table, reader.at)
                reader.mark_sent()
            acks.wait_for_all()
        except (errors.SparklogError, OSError) as error:
            acks.count_the_rest()
            error.add_note(reader.summary(acks, error))
            raise
        except KeyboardInterrupt:
            acks.count_the_rest()
            reader.drop_unsent()
            typer.echo(f"sparklog: {reader.summary(acks, None)}", err=True)
            raise
    _check_begin(inputs[0], from_line, lines.count)
    seconds = time.monotonic() - began
    typer.echo(f"{counted(acks.records, 'record')} acked in {seconds:.1f} s", err=True)
    if lines.bad_count:
        skipped = counted(lines.bad_count, "invalid line")
        typer.echo(f"{skipped} skipped and written to {skip_bad}", err=True)


# ------------------------------------------------------------------------------ in


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    path: Path
    kind: InputFormat
    is_guessed: bool
    """The format was not given, but derived from the name."""

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
        raise typer.BadParameter(f"{str(file)!r} is a folder: name the files in it")
    if file != _STDIN and not file.exists():
        raise typer.BadParameter(f"file {str(file)!r} does not exist")
    found = _Input(path=file, kind=kind or _kind(file, fields), is_guessed=kind is None)
    if found.kind is InputFormat.TEXT and fields != Fields():
        raise typer.BadParameter(f"text has no fields: set --format for {found.name}")
    if fields.key is not None and fields.key == fields.timestamp:
        raise typer.BadParameter("--key-field and --timestamp-field name the same field")
    return found


def _kind(file: Path, fields: Fields) -> InputFormat:
    """Returns the format of an input by its name; standard input with fields is JSON."""
    if file == _STDIN and fields != Fields():
        return InputFormat.JSONL
    return format_of(file.name)


def _check_lines(inputs: list[_Input], from_line: int | None, skip_bad: Path | None) -> None:
    """Raises a usage error for a line option if the input has a different format."""
    if from_line is not None:
        if len(inputs) > 1:
            raise typer.BadParameter("--from-line allows a single file: send the others afterwards")
        if inputs[0].kind not in _LINE_FORMATS:
            raise typer.BadParameter(
                f"--from-line requires a line-based format, not {inputs[0].kind}"
            )
    if skip_bad is not None:
        if not any(each.kind is InputFormat.JSONL for each in inputs):
            raise typer.BadParameter("--skip-bad requires lines of JSON (--format jsonl)")
        for each in inputs:
            if each.path != _STDIN and skip_bad.exists() and skip_bad.samefile(each.path):
                raise typer.BadParameter(
                    f"--skip-bad {str(skip_bad)!r} is an input: name a different file"
                )


def _check_begin(given: _Input, from_line: int | None, count: int | None) -> None:
    """Raises `BadRequest` if --from-line is beyond the input, in which case nothing was sent.

    The line after the last one is allowed: a command may have stopped at the very end.
    """
    if from_line is None or count is None or from_line <= count:
        return
    length = f"{given.name} ends with line {count:,}" if count else f"{given.name} is empty"
    if from_line > count + 1:
        reason = f"{length}, so --from-line {from_line:,} is beyond it. Nothing was sent."
        raise errors.BadRequest(reason=reason)
    typer.echo(f"{length}: nothing is left to send", err=True)


class _Reader:
    """Reads the inputs in order, and tracks which lines have been read and sent."""

    def __init__(self, inputs: list[_Input], fields: Fields, lines: Lines) -> None:
        self._inputs = inputs
        self._fields = fields
        self._lines = lines
        self._current = inputs[0]
        self._sent_up_to = lines.first

    def mark_sent(self) -> None:
        """Records that all lines read so far have been sent."""
        self._sent_up_to = self._lines.next

    def drop_unsent(self) -> None:
        """Rewinds to the first unsent line: an interrupt may arrive before lines are sent."""
        self._lines.next = self._sent_up_to

    @property
    def at(self) -> _Position:
        """The start of the last batch."""
        return self._current, self._lines.at

    def batches(self, meter: Meter | None) -> Iterator[pa.RecordBatch]:
        from sparklog.cli.reading import read

        for each in self._inputs:
            self._current = each
            self._lines.at = self._lines.next = self._sent_up_to = self._lines.first
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
                    if meter is not None:
                        meter.advance(batch.num_rows, stream.tell() if each.size_bytes else 0)
            if meter is not None:
                meter.next_input()

    def summary(self, acks: _Acks, error: BaseException | None) -> str:
        """Returns how many records were acked, and how to continue without duplicates."""
        current, line = acks.unacked or (self._current, self._lines.next)
        is_at_start = current is self._inputs[0] and line == self._lines.first
        is_unsent = acks.unacked is None or isinstance(error, errors.RootReadOnly)
        if is_unsent and not acks.records and is_at_start:
            remedy = self._remedy(error, " Correct the line")
            return f"Nothing was sent.{remedy}{'.' if remedy else ''}"
        were = "was" if acks.records == 1 else "were"
        advice = self._advice(acks, current, line, error)
        return f"{counted(acks.records, 'record')} {were} acked{advice}."

    def _remedy(self, error: BaseException | None, first: str) -> str:
        """Returns `first` and the alternative to it if a line is invalid."""
        if isinstance(error, errors.BadRequest) and self._lines.is_line_wrong:
            return f"{first}, or write invalid lines to a file with --skip-bad FILE"
        return ""

    def _advice(self, acks: _Acks, current: _Input, line: int, error: BaseException | None) -> str:
        if current.kind not in _LINE_FORMATS:
            return ""
        where = f" of {current.name}" if len(self._inputs) > 1 else ""
        if acks.unacked and line == 1 and not where:
            return ", and some lines may have been written; the same command resends all of them"
        if acks.unacked:
            return (
                f": all lines before {line}{where}, and perhaps later ones;"
                f" --from-line {line} resends those"
            )
        remedy = self._remedy(error, " after correcting the line")
        return f": all lines before {line}{where}; continue with --from-line {line}{remedy}"


def _placed(batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
    import pyarrow as pa

    if "partition" in batch.schema.names:
        batch = batch.drop_columns(["partition"])
    column = pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows)
    return batch.append_column("partition", column)


# ------------------------------------------------------------------------------ out


def _meter(inputs: list[_Input]) -> Meter | None:
    """Returns a progress bar if standard error is a terminal and the input is not typed."""
    is_typed = any(each.path == _STDIN for each in inputs) and sys.stdin.isatty()
    if is_typed or not sys.stderr.isatty():
        return None
    from sparklog.terminal.meter import Meter

    return Meter([each.size_bytes for each in inputs])


class _Acks:
    """Batches in flight, in order; a failure is raised once its batch is the oldest."""

    def __init__(self) -> None:
        self.records = 0
        """The number of acked records."""
        self.unacked: _Position | None = None
        """The start of the first batch that is not fully acked."""
        self._in_flight: deque[tuple[TableFuture, int, _Position]] = deque()

    def send(
        self, producer: Producer, topic: str, table: pa.RecordBatch, position: _Position
    ) -> None:
        try:
            future = producer.send_table(topic, table)
        except (errors.SparklogError, KeyboardInterrupt):
            self.unacked = self.unacked or position
            raise
        self.add(future, table.num_rows, position)

    def add(self, future: TableFuture, rows: int, position: _Position) -> None:
        self._in_flight.append((future, rows, position))
        while self._in_flight and self._in_flight[0][0].done():
            self._take()

    def wait_for_all(self) -> None:
        while self._in_flight:
            self._take()

    def count_the_rest(self) -> None:
        """Counts the remaining acks after a failure, and ignores further failures."""
        while self._in_flight:
            with contextlib.suppress(errors.SparklogError):
                self._take()

    def _take(self) -> None:
        future, rows, position = self._in_flight.popleft()
        try:
            future.result()
        except (errors.SparklogError, KeyboardInterrupt):
            self.unacked = self.unacked or position
            raise
        self.records += rows
