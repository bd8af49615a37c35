"""`sparklog users`: the users of a root, who log in to Kafka listeners with SASL."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.options import ROOT_VARIABLE, STORAGE_PREFIX, check_root, storage_options
from sparklog.terminal.commands import Command
from sparklog.terminal.options import JsonOption, YesOption, confirm
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.security.state import SecurityState
    from sparklog.security.users import Change
    from sparklog.storage.objects import Store

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Add, change and remove the users that log in to Kafka listeners with SASL.",
)

_STANDARD_INPUT: Final = "-"
_PASSWORD_FILE_BYTES: Final = 65_536

_RootOption = Annotated[
    str | None,
    typer.Option(
        "--root",
        metavar="URI",
        help="The root of the log: a folder, or s3://…, gs://…, az://…. No broker is needed; those"
        f" that run follow within one or two seconds. Default: {ROOT_VARIABLE}. Options of the"
        f" object store come from {STORAGE_PREFIX}<OPTION>.",
        show_default=False,
    ),
]
_NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The name of the user.", show_default=False)
]
_PasswordOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Read the password from this file instead of asking for it, without the line break at"
        f" its end; {_STANDARD_INPUT} is standard input.",
        show_default=False,
    ),
]


@app.command(cls=Command)
def add(
    name: _NameArgument,
    password_file: _PasswordOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Leave a user that exists as it is.")
    ] = False,
    beside_the_data: Annotated[
        bool,
        typer.Option(
            "--beside-the-data",
            help="Accept that the first user of a bucket is stored in security/ of that bucket,"
            " where everybody who may read the whole bucket can try passwords.",
        ),
    ] = False,
    root: _RootOption = None,
) -> None:
    """Add a user with a password.

    The user can log in with SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN. The root gets a
    credential to check the password with, not the password. An empty or missing folder becomes a
    root.

    Example: sparklog users add alice --root ./data
    """
    from sparklog.security import users
    from sparklog.security.state import NO_USERS

    store = _store(root)
    known = _known_state(store)
    if not store.is_local and not beside_the_data and known is None:
        raise typer.BadParameter(
            "the users of a bucket are in security/ of it: deny that prefix to everybody but the"
            " brokers, then pass --beside-the-data (docs/security.md)"
        )
    # Before the password is asked for.
    if users.added(name, {}, may_exist=if_not_exists)(known or NO_USERS) is None:
        typer.echo(f"user {name} exists")
        return
    credentials = users.credentials_of(_password(password_file))
    _change(store, users.added(name, credentials, may_exist=if_not_exists), create=True)
    typer.echo(f"user {name} added")


@app.command(cls=Command)
def set_password(
    name: _NameArgument,
    password_file: _PasswordOption = None,
    cut: Annotated[
        bool, typer.Option("--cut", help="Also cut the connections that the user has.")
    ] = False,
    root: _RootOption = None,
) -> None:
    """Change the password of a user.

    Open connections stay, as in Kafka, unless `--cut` is given.

    Example: sparklog users set-password alice --root ./data
    """
    from sparklog.security import users
    from sparklog.security.state import NO_USERS

    store = _store(root)
    users.with_credentials(name, {})(_known_state(store) or NO_USERS)  # before it asks
    credentials = users.credentials_of(_password(password_file))
    _change(store, users.with_credentials(name, credentials, cut=cut))
    typer.echo(f"password of user {name} changed")


@app.command(cls=Command)
def disable(name: _NameArgument, root: _RootOption = None) -> None:
    """Keep a user from logging in, and cut its connections.

    Example: sparklog users disable alice --root ./data
    """
    from sparklog.security import users

    _change(_store(root), users.disabled(name, True))
    typer.echo(f"user {name} disabled")


@app.command(cls=Command)
def enable(name: _NameArgument, root: _RootOption = None) -> None:
    """Let a disabled user log in again.

    Example: sparklog users enable alice --root ./data
    """
    from sparklog.security import users

    _change(_store(root), users.disabled(name, False))
    typer.echo(f"user {name} enabled")


@app.command(cls=Command)
def remove(
    name: _NameArgument,
    yes: YesOption = False,
    root: _RootOption = None,
) -> None:
    """Remove a user, and cut its connections.

    Example: sparklog users remove alice --root ./data
    """
    from sparklog.security import users

    store = _store(root)
    if not yes:
        confirm(f"Remove user {name}?")
    _change(store, users.removed(name))
    typer.echo(f"user {name} removed")


@app.command("list", cls=Command)
def list_users(as_json: JsonOption = False, root: _RootOption = None) -> None:
    """List the users.

    Example: sparklog users list --root ./data
    """
    import msgspec

    state = _known_state(_store(root), may_create=False)
    known = state.users if state is not None else {}
    if as_json:
        found = [{"name": name, "disabled": user.disabled} for name, user in sorted(known.items())]
        typer.echo(msgspec.json.encode(found).decode())
        return
    rows = [(name, "disabled" if user.disabled else "") for name, user in sorted(known.items())]
    print_columns([("user", "state"), *rows])


def _store(root: str | None) -> Store:
    from sparklog.storage.objects import LocalStore, open_store

    root = root or os.environ.get(ROOT_VARIABLE)
    if not root:
        raise typer.BadParameter(f"no root is named: pass --root, or set {ROOT_VARIABLE}")
    check_root("--root", root, "")
    store = open_store(root, storage_options(root))
    if isinstance(store, LocalStore):
        _check_owner(Path(store.root))
    return store


def _check_owner(root: Path) -> None:
    """Raises a usage error for a root of another user: its brokers could not read the change."""
    owner = -1
    for path in (root / "cluster.json", root):  # a new root belongs to the folder's owner
        with contextlib.suppress(OSError):
            owner = path.stat().st_uid
            break
    else:
        return  # it is created, or another error says why not
    if owner != os.geteuid():
        raise typer.BadParameter(
            f"{root} belongs to {_name_of(owner)}, whose brokers could not read a change by"
            f" {_name_of(os.geteuid())}: run the command as that user, for example with"
            f" sudo -u {_name_of(owner)}"
        )


def _name_of(uid: int) -> str:
    """Returns the name of a user of this machine; its number in a container that knows no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _known_state(store: Store, *, may_create: bool = True) -> SecurityState | None:
    """Returns the newest security state; None if the root has none, or, with `may_create`, if it
    is not a root yet.
    """
    from sparklog.clock import SystemClock
    from sparklog.storage.security_store import open_security

    try:
        security = open_security(store, clock=SystemClock())
    except errors.NotARoot:
        if not may_create:
            raise
        return None
    return security.look() if security is not None else None


def _change(store: Store, change: Change, *, create: bool = False) -> None:
    from sparklog.clock import SystemClock
    from sparklog.security.state import Author
    from sparklog.storage.security_store import change_security

    clock = SystemClock()
    who = f"Root:{_name_of(os.geteuid())}@{socket.gethostname()}"
    author = Author(principal=who, at_us=clock.now_us())
    change_security(store, change, author=author, clock=clock, create=create)


def _password(file: str | None) -> str:
    """Returns the password from a file, from standard input, or from the user."""
    if file is None:
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                "standard input is not a terminal, so the command cannot ask for the password: pass"
                " --password-file FILE, or --password-file - to read it from standard input"
            )
        text: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return text
    try:
        data = (
            sys.stdin.buffer.read(_PASSWORD_FILE_BYTES)
            if file == _STANDARD_INPUT
            else Path(file).read_bytes()[:_PASSWORD_FILE_BYTES]
        )
        return data.decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadOption(
            option="--password-file", value=file, reason=f"it cannot be read: {error}"
        ) from None
