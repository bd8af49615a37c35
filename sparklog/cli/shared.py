"""What all commands share: how they reach a log, what they print, and how they end.

Rules of this room:

- Whatever ends a command becomes an exit code here, and nowhere else; what sparklog, its store or
  the operating system reports is one line on standard error, never a traceback.
- Results go to standard output, all else to standard error. Colours and bars are for terminals.
- Modules of commands import nothing heavy at the top, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

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


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNHEALTHY = 3
    NO_BROKER = 4
    INTERRUPTED = 130
    """As a shell reports Ctrl-C,"""
    PIPE_CLOSED = 141
    """and a reader that has gone."""


EXIT_CODES: Final = (
    "Exit codes: 0 all went well; 1 sparklog refused or failed, and said why; 2 the command line is"
    " wrong; 3 doctor or status found a problem; 4 status found no broker; 130 interrupted by"
    " Ctrl-C; 141 the reader of a pipe is gone."
)


class Commands(TyperGroup):
    """The group of all commands, which turns what they raise into exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_wait_seconds(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
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
    """What a store raises of its own; a store that was not loaded has raised nothing."""
    objects = sys.modules.get("sparklog.storage.objects")
    names = ("ObjectExists", "ObjectMissing", "PutUnresolved", "SyncFailed")
    return () if objects is None else tuple(getattr(objects, name) for name in names)


def _outside_errors() -> tuple[type[Exception], ...]:
    """What is reported by others than sparklog, and is no fault of its code."""
    return (OSError, *_store_errors())


def complain(error: BaseException) -> None:
    """Says in one line what is wrong, with what was noted about it on the way up."""
    words = str(error)
    if isinstance(error, _store_errors()):
        words = ": ".join([type(error).__name__, *map(str, error.args)])
    told = "; ".join([words, *getattr(error, "__notes__", [])])
    typer.echo(f"sparklog: {' '.join(told.split())}", err=True)


def _silence_output() -> None:
    """Python flushes standard output once more at its end, and would complain then."""
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
        help="The log's root: a folder, or s3://…, gs://…, az://…. Its live broker is used, or one"
        f" is started for the time of the command. Or {ROOT_VARIABLE}. Options of its store come"
        f" from {STORAGE_PREFIX}<OPTION>.",
        show_default=False,
    ),
]

BootstrapOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help=f"The Flight address of a broker, instead of a root. Or {BOOTSTRAP_VARIABLE}, which"
        f" goes before {ROOT_VARIABLE}.",
        show_default=False,
    ),
]

WaitOption = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="[SECONDS]",
        min=0.0,
        help="With --bootstrap: wait so long for a broker to answer there, and say so; without a"
        f" number, {_WAIT_SECONDS:g} s. Without the option, a closed port is an error at once.",
        show_default=False,
    ),
]

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]


def _with_wait_seconds(arguments: Sequence[str]) -> list[str]:
    """`--wait` may stand without a number, which Typer's options cannot."""
    found = list(arguments)
    for place, word in enumerate(found):
        if word == "--":
            break
        if word == _WAIT and not _is_number(found[place + 1 : place + 2]):
            found[place] = f"{_WAIT}={_WAIT_SECONDS:g}"
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
    """The log that the command line or the environment names.

    Args:
        root: a folder or a URI.
        bootstrap: the address of a broker.
        wait_seconds: how long to wait for a broker at `bootstrap`; None: not at all.
        create: an empty or missing root becomes one; else it is refused, so that a slip of the pen
            does not make a root.

    Raises:
        typer.BadParameter: no log is named, or two are, or there is nothing to wait for.
        errors.SparklogError: connecting failed.
    """
    root, bootstrap = log_target(root, bootstrap)
    if bootstrap is None and wait_seconds is not None:
        raise typer.BadParameter(
            f"{_WAIT} is for --bootstrap; with --root, a broker is started where none runs"
        )
    if bootstrap is not None:
        from sparklog.client.connection import Connection
        from sparklog.client.log import Log

        log = Log(Connection.to(check_bootstrap("bootstrap", bootstrap)), root=bootstrap)
        _reach(log, bootstrap, wait_seconds or 0.0)
    else:
        assert root is not None
        if not create:
            _check_root(root)
        from sparklog.broker.logging import configure
        from sparklog.session import connect
        from sparklog.settings import LogSettings

        # What an embedded broker has to say must not come among the results.
        configure(LogSettings(level="warning"))
        log = connect(root)
    with log:
        yield log


def _reach(log: Log, bootstrap: str, wait_seconds: float) -> None:
    """Returns when a broker has answered. Raises `BrokerUnavailable`, `WrongPort`."""
    deadline = time.monotonic() + wait_seconds
    is_told = False
    while True:
        try:
            log.connection.channel()
            return
        except errors.BrokerUnavailable as error:
            if time.monotonic() >= deadline:
                if not wait_seconds:
                    error.add_note(f"{_WAIT} waits for it")
                raise
            if not is_told:
                waiting = f"waiting up to {wait_seconds:g} s for a broker at {bootstrap}"
                typer.echo(f"sparklog: {waiting} ({error.reason})", err=True)
                is_told = True
        time.sleep(_LOOK_SECONDS)


def log_target(root: str | None, bootstrap: str | None) -> tuple[str | None, str | None]:
    """The one of both that counts; the command line goes before the environment."""
    if root and bootstrap:
        raise typer.BadParameter("give --root or --bootstrap, not both")
    if not root and not bootstrap:
        bootstrap = os.environ.get(BOOTSTRAP_VARIABLE)
        root = None if bootstrap else os.environ.get(ROOT_VARIABLE)
    if not root and not bootstrap:
        raise typer.BadParameter(
            f"which log? give --root or --bootstrap, or set {ROOT_VARIABLE} or {BOOTSTRAP_VARIABLE}"
        )
    if root:
        check_root("--root", root, f" Did you mean --bootstrap {root}?")
    return root or None, bootstrap or None


def _check_root(root: str) -> None:
    from sparklog.clock import SystemClock
    from sparklog.storage.meta import MetaStore
    from sparklog.storage.objects import open_store

    MetaStore(open_store(root, storage_options(root)), clock=SystemClock()).open(create=False)


# ------------------------------------------------------------------------------ words


def config_pairs(given: Iterable[str]) -> dict[str, str]:
    """`key=value` each. Raises a usage error for anything else."""
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs


def print_columns(rows: Sequence[Sequence[object]]) -> None:
    """Rows of words in columns as wide as they need; the first row is the heading."""
    texts = [[str(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())
