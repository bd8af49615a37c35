"""Options that several commands share, and the log that they name."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

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
    from sparklog.storage.metadata.store import MetadataStore

_WAIT: Final = "--wait"
_WAIT_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.2

RootOption = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="The root of the log: a folder, or s3://…, gs://…, az://…. The command uses the root's"
        f" live broker, or embeds one for its duration. Default: {ROOT_VARIABLE}. Object store"
        f" options come from {STORAGE_PREFIX}<OPTION>.",
        show_default=False,
    ),
]

BootstrapOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,…",
        help="The Flight address of one or more brokers of a cluster, instead of a root; with TLS,"
        " tls://HOST:PORT, and the CA in SPARKLOG_CLIENT_CA. Default:"
        f" {BOOTSTRAP_VARIABLE}, which takes precedence over {ROOT_VARIABLE}.",
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
CANNOT_ASK: Final = "standard input is not a terminal, so the command cannot ask: pass --yes"

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The name of the topic.", show_default=False)
]
OnlyPartitionsOption = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N", min=0, help="Only this partition; repeat it for more.", show_default=False
    ),
]


def confirm(question: str) -> None:
    """Asks for confirmation, and ends the command if it is denied.

    Raises a usage error if standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise typer.BadParameter(CANNOT_ASK)
    typer.confirm(question, abort=True)


def with_wait_seconds(arguments: Sequence[str]) -> list[str]:
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
        wait_seconds: how long to wait for a broker at `bootstrap`; None: do not wait.
        create: turn an empty or missing folder into a root. Otherwise such a folder is an error,
            so that a misspelt path does not become a root.

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
                    error.add_note(f"To wait for it, pass {_WAIT}.")
                raise
            if not is_announced:
                waiting = f"waiting up to {wait_seconds:g} s for a broker at {bootstrap}"
                typer.echo(f"sparklog: {waiting} ({error.reason})", err=True)
                is_announced = True
        time.sleep(_LOOK_SECONDS)


def log_target(
    root: str | None, bootstrap: str | None, wait_seconds: float | None = None
) -> tuple[str | None, str | None]:
    """Returns (root, bootstrap), one of them None; the command line overrides the environment.

    Raises `typer.BadParameter` if no log is named, or two are, or `--wait` is passed with a root.
    """
    if root and bootstrap:
        raise typer.BadParameter("pass --root or --bootstrap, not both")
    if not root and not bootstrap:
        bootstrap = os.environ.get(BOOTSTRAP_VARIABLE)
        root = None if bootstrap else os.environ.get(ROOT_VARIABLE)
    if not root and not bootstrap:
        raise typer.BadParameter(
            f"no log is named: pass --root or --bootstrap, or set {ROOT_VARIABLE} or"
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
    from sparklog.storage.metadata.cluster_file import open_cluster
    from sparklog.storage.metadata.store import MetadataStore
    from sparklog.storage.objects import open_store

    store = open_store(root, storage_options(root))
    open_cluster(store, clock=SystemClock(), create=False)
    return MetadataStore(store, clock=SystemClock())


def config_pairs(given: Iterable[str]) -> dict[str, str]:
    """Parses `key=value` strings. Raises a usage error for anything else."""
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs
