"""The parts that all commands share: connecting to a log, help texts, messages and exit codes.

Rules:

- Every failure becomes an exit code here, and nowhere else. Errors of sparklog, its store and the
  operating system are printed as one line on standard error, never as a traceback.
- Results go to standard output, all else to standard error. Colours and progress bars are for
  terminals.
- Modules of commands import nothing heavy at the top, so that a command starts quickly.
- Help is plain text for 80 columns: an option shows the name of its value, not a type.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from sparklog import errors
from sparklog.options import (
    BOOTSTRAP_VARIABLE,
    ROOT_VARIABLE,
    STORAGE_PREFIX,
    check_bootstrap,
    check_root,
    storage_options,
)

if TYPE_CHECKING:
    from sparklog.client.log import Log
    from sparklog.storage.metadata_store import MetadataStore


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNHEALTHY = 3
    NO_BROKER = 4
    INTERRUPTED = 130
    """By Ctrl-C, as shells report it."""
    PIPE_CLOSED = 141
    """The reader of a pipe has exited, as shells report it."""


EXIT_CODES: Final = (
    "Exit codes: 0 success; 1 an error, which is printed, or an anomaly found by check; 2 a usage"
    " error; 3 doctor, status or a command of cluster found a problem; 4 status, top or cluster"
    " describe found no broker; 130 interrupted by Ctrl-C; 141 the reader of a pipe has exited."
)


_EXAMPLE: Final = "Example: "
_TYPE: Final = re.compile(r" <.*>$")
_BOUNDS: Final = r"(?:[-\d.]+<=?x(?:<=?[-\d.]+)?|x[<>]=?[-\d.]+|required)"
_VALUE_RANGE: Final = re.compile(rf" *\[{_BOUNDS}(?:; {_BOUNDS})?\]$|; {_BOUNDS}(?=[;\]])")
"""The bounds that Typer appends to a help text, which states them where they matter."""


class Command(TyperCommand):
    """A command whose help is plain text, with its example on a line of its own."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _plain_usage(super().collect_usage_pieces(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        _format_help_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)


class CommandGroup(TyperGroup):
    """Such a command that has further commands below it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _plain_usage(super().collect_usage_pieces(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        _format_help_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def _plain_usage(pieces: Iterable[str]) -> list[str]:
    return [piece.replace("{", "").replace("}", "") for piece in pieces]


def _format_help_text(command: Any, formatter: Any) -> None:
    text, _, example = inspect.cleandoc(command.help or "").partition(_EXAMPLE)
    for paragraph in filter(None, text.split("\n\n")):
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(" ".join(paragraph.split()))
    if example:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write(f"{'':>{formatter.current_indent}}{_EXAMPLE}{example}\n")


def _format_options(command: Any, ctx: Any, formatter: Any) -> None:
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        rows = [
            (_TYPE.sub("", name), _VALUE_RANGE.sub("", text))
            for each in command.get_params(ctx)
            if each.param_type_name == kind
            for name, text in filter(None, [each.get_help_record(ctx)])
        ]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


class Commands(TyperGroup):
    """The group of all commands, which turns errors into exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_wait_seconds(args))

    def invoke(self, ctx: Any) -> Any:
        with exit_codes():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Prints errors as one line each, and raises `typer.Exit` with their codes."""
    try:
        yield
    except errors.SparklogError as error:
        complain(error)
        raise typer.Exit(ExitCode.FAILED) from None
    except BrokenPipeError:
        _silence_output()
        raise typer.Exit(ExitCode.PIPE_CLOSED) from None
    except _outside_errors() as error:
        complain(error)
        _silence_output()  # it may be what failed, and would again
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _store_errors() -> tuple[type[Exception], ...]:
    """Returns the stores' own exceptions; none if no store is loaded."""
    objects = sys.modules.get("sparklog.storage.objects")
    names = ("ObjectExists", "ObjectMissing", "PutUnresolved", "SyncFailed")
    return () if objects is None else tuple(getattr(objects, name) for name in names)


def _outside_errors() -> tuple[type[Exception], ...]:
    """Returns exceptions that other parties cause, rather than a defect of sparklog."""
    return (OSError, *_store_errors())


def complain(error: BaseException) -> None:
    """Prints an error and its notes, which are sentences, as one line on standard error."""
    message = str(error)
    if isinstance(error, _store_errors()):
        message = ": ".join([type(error).__name__, *map(str, error.args)])
    notes = getattr(error, "__notes__", [])
    if notes and not message.endswith((".", "?")):
        message += "."
    line = " ".join(" ".join([message, *notes]).split())
    typer.echo(f"sparklog: {line}", err=True)


def _silence_output() -> None:
    """Redirects standard output to nowhere, because Python flushes it again as it exits."""
    with contextlib.suppress(OSError, ValueError):  # a test's output has no descriptor
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


# ------------------------------------------------------------------------------ which log

_WAIT: Final = "--wait"
_WAIT_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.2

RootOption = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="The root of the log: a folder, or s3://…, gs://…, az://…. The command uses its live"
        f" broker, or runs one while it lasts. Default: {ROOT_VARIABLE}. Options of the object"
        f" store come from {STORAGE_PREFIX}<OPTION>.",
        show_default=False,
    ),
]

BootstrapOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,…",
        help="The Flight address of a broker, or of several of a cluster, instead of a root."
        f" Default: {BOOTSTRAP_VARIABLE}, which takes precedence over {ROOT_VARIABLE}.",
        show_default=False,
    ),
]

WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="[SECONDS]",
        min=0.0,
        help="With --bootstrap: wait up to this long for a broker to answer, instead of failing at"
        f" once. Without a number, {_WAIT_SECONDS:g} s.",
        show_default=False,
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
CANNOT_ASK: Final = "standard input is not a terminal, so the command cannot ask: give --yes"

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The name of the topic.", show_default=False)
]


def _with_wait_seconds(arguments: Sequence[str]) -> list[str]:
    """Adds the default number to a `--wait` without one, which Typer does not support."""
    found = list(arguments)
    for index, word in enumerate(found):
        if word == "--":
            break
        if word == _WAIT and not _is_number(found[index + 1 : index + 2]):
            found[index] = f"{_WAIT}={_WAIT_SECONDS:g}"
    return found


def _is_number(words: Sequence[str]) -> bool:
    try:
        return bool(words) and float(words[0]) >= 0
    except ValueError:
        return False


@contextlib.contextmanager
def open_log(
    root: str | None, bootstrap: str | None, wait_seconds: float | None, *, create: bool = False
) -> Iterator[Log]:
    """Opens the log that the command line or the environment names.

    Args:
        root: a folder or a URI.
        bootstrap: the address of a broker.
        wait_seconds: how long to wait for a broker at `bootstrap`; None: not at all.
        create: make a root of an empty or missing folder. Otherwise it is an error, so that a
            misspelt path does not become a root.

    Raises:
        typer.BadParameter: no log is named, or two are, or there is nothing to wait for.
        errors.SparklogError: connecting failed.
    """
    root, bootstrap = log_target(root, bootstrap, wait_seconds)
    if bootstrap is not None:
        from sparklog.client.connection import Connection
        from sparklog.client.log import Log

        log = Log(Connection.to(check_bootstrap("bootstrap", bootstrap)), root=bootstrap)
        _reach(log, bootstrap, wait_seconds or 0.0)
    else:
        assert root is not None
        is_new = False
        try:
            root_metadata(root)
        except errors.NotARoot:
            if not create:
                raise
            is_new = True
        from sparklog.connecting import connect

        log = connect(root)
        if is_new:
            typer.echo(f"sparklog: created a new log in {root}", err=True)
    with log:
        yield log


def _reach(log: Log, bootstrap: str, wait_seconds: float) -> None:
    """Waits until a broker answers. Raises `BrokerUnavailable`, `WrongPort`."""
    deadline = time.monotonic() + wait_seconds
    is_announced = False
    while True:
        try:
            log.connection.channel()
            return
        except errors.BrokerUnavailable as error:
            if time.monotonic() >= deadline:
                if not wait_seconds:
                    error.add_note(f"To wait for it, give {_WAIT}.")
                raise
            if not is_announced:
                waiting = f"waiting up to {wait_seconds:g} s for a broker at {bootstrap}"
                typer.echo(f"sparklog: {waiting} ({error.reason})", err=True)
                is_announced = True
        time.sleep(_LOOK_SECONDS)


def log_target(
    root: str | None, bootstrap: str | None, wait_seconds: float | None = None
) -> tuple[str | None, str | None]:
    """Returns the one of root and bootstrap to use; the command line overrides the environment.

    Raises `typer.BadParameter` if no log is named, or two are, or `--wait` is given with a root.
    """
    if root and bootstrap:
        raise typer.BadParameter("give --root or --bootstrap, not both")
    if not root and not bootstrap:
        bootstrap = os.environ.get(BOOTSTRAP_VARIABLE)
        root = None if bootstrap else os.environ.get(ROOT_VARIABLE)
    if not root and not bootstrap:
        raise typer.BadParameter(
            f"no log is named: give --root or --bootstrap, or set {ROOT_VARIABLE} or"
            f" {BOOTSTRAP_VARIABLE}"
        )
    if root:
        check_root("--root", root, f" Did you mean --bootstrap {root}?")
        if wait_seconds is not None:
            raise typer.BadParameter(f"{_WAIT} needs --bootstrap: a root needs no running broker")
    return root or None, bootstrap or None


def root_metadata(root: str) -> MetadataStore:
    """Opens the metadata of a root. Raises `NotARoot`, `FormatTooNew`, `CorruptObject`."""
    from sparklog.clock import SystemClock
    from sparklog.storage.cluster import open_cluster
    from sparklog.storage.metadata_store import MetadataStore
    from sparklog.storage.objects import open_store

    store = open_store(root, storage_options(root))
    open_cluster(store, clock=SystemClock(), create=False)
    return MetadataStore(store, clock=SystemClock())


# ------------------------------------------------------------------------------ words


def config_pairs(given: Iterable[str]) -> dict[str, str]:
    """Parses `key=value` texts. Raises a usage error for anything else."""
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs


def print_columns(rows: Sequence[Sequence[object]]) -> None:
    """Prints rows as columns as wide as their longest text; the first row is the heading."""
    texts = [[str(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())
