"""Commands of the command line and of jobs: their help, their messages and their exit codes.

Rules:

- Every failure becomes an exit code here, and nowhere else. Errors from sparklog, its store and the
  operating system are printed as one line on standard error, never as a traceback.
- Results go to standard output, all else to standard error. Colours and progress bars appear only
  on terminals.
- Command modules import nothing heavy at the top, so that a command starts quickly.
- Help is plain text for 80 columns: an option shows the name of its value, not a type.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from sparklog import errors
from sparklog.terminal.options import with_wait_seconds


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNHEALTHY = 3
    NO_BROKER = 4
    INTERRUPTED = 130
    """Ctrl-C, as shells report it."""
    PIPE_CLOSED = 141
    """The reader of a pipe has exited, as shells report it."""


EXIT_CODES: Final = (
    "Exit codes: 0 success; 1 an error, which is printed, or an anomaly found by check; 2 a usage"
    " error; 3 doctor, status or a command of cluster found a problem; 4 status, top or cluster"
    " describe found no broker; 130 interrupted by Ctrl-C; 141 the reader of a pipe has exited."
)


PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The context settings of a command that passes its arguments on."""

_EXAMPLE: Final = "Example: "
_TYPE: Final = re.compile(r" <.*>$")
_BOUNDS: Final = r"(?:[-\d.]+<=?x(?:<=?[-\d.]+)?|x[<>]=?[-\d.]+|required)"
_VALUE_RANGE: Final = re.compile(rf" *\[{_BOUNDS}(?:; {_BOUNDS})?\]$|; {_BOUNDS}(?=[;\]])")
"""The bounds that Typer appends to a help text; the texts state them if they matter."""


class Command(TyperCommand):
    """A command whose help is plain text, with its example on its own line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's prefix
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _plain_usage(super().collect_usage_pieces(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        _format_help_text(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self, ctx, formatter)


class CommandGroup(TyperGroup):
    """A command with subcommands, whose help is plain text, too."""

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
        return super().parse_args(ctx, with_wait_seconds(args))

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
        _silence_output()  # it may be what failed, and would fail again
        raise typer.Exit(ExitCode.FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _store_errors() -> tuple[type[Exception], ...]:
    """Returns the stores' own exceptions; none if no store is loaded."""
    objects = sys.modules.get("sparklog.storage.objects")
    names = ("ObjectExists", "ObjectMissing", "PutUnresolved", "SyncFailed")
    return () if objects is None else tuple(getattr(objects, name) for name in names)


def _outside_errors() -> tuple[type[Exception], ...]:
    """Returns exceptions with causes outside sparklog, rather than defects in it."""
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
    """Redirects standard output to the null device, since Python flushes it again at exit."""
    with contextlib.suppress(OSError, ValueError):  # a test's output has no descriptor
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
