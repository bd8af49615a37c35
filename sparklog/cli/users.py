"""`sparklog users`: the users of a root."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sparklog import errors
from sparklog.cli.security_root import (
    BesideTheDataOption,
    SecurityRootOption,
    change_state,
    check_bucket,
    known_state,
    root_store,
)
from sparklog.security.login_method import LoginMethod
from sparklog.terminal.commands import Command
from sparklog.terminal.options import JsonOption, YesOption, confirm
from sparklog.terminal.printing import print_columns

if TYPE_CHECKING:
    from sparklog.security.state import User

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Add, change and remove the users that log in to Kafka and Flight listeners.",
)

_STANDARD_INPUT: Final = "-"
_NO_METHODS: Final = "none"
_PASSWORD_FILE_BYTES: Final = 65_536

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
    method: Annotated[
        list[LoginMethod] | None,
        typer.Option(
            help="Let the user log in without a password: by a certificate, or by an OAuth token."
            " May be repeated.",
            show_default=False,
        ),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Leave a user that exists as it is.")
    ] = False,
    beside_the_data: BesideTheDataOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Add a user with a password, or with the methods by which it logs in instead.

    With a password, the user can log in with SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN. The root gets
    a credential to check the password with, not the password. An empty or missing folder becomes a
    root.

    Example: sparklog users add alice --root ./data
    """
    from sparklog.security import users
    from sparklog.security.state import NO_USERS

    store = root_store(root)
    known = known_state(store, may_create=True)
    check_bucket(store, known, beside_the_data=beside_the_data)
    # Before the password is asked for.
    if users.added(name, {}, may_exist=if_not_exists)(known or NO_USERS) is None:
        typer.echo(f"user {name} exists")
        return
    has_password = not method or password_file is not None
    credentials = users.credentials_of(_password(password_file)) if has_password else {}
    change = users.added(name, credentials, methods=method or (), may_exist=if_not_exists)
    change_state(store, change, create=True)
    typer.echo(f"user {name} added")


@app.command(cls=Command)
def set_methods(
    name: _NameArgument,
    methods: Annotated[
        str,
        typer.Argument(
            metavar="METHODS",
            help=f"{', '.join(LoginMethod)}, separated by commas; or none.",
            show_default=False,
        ),
    ],
    root: SecurityRootOption = None,
) -> None:
    """Set the methods by which a user can log in, in addition to its password.

    Connections by a method that is no longer permitted are cut.

    Example: sparklog users set-methods alice certificate --root ./data
    """
    from sparklog.security import users

    change_state(root_store(root), users.with_methods(name, _methods_in(methods)))
    typer.echo(f"methods of user {name} changed")


@app.command(cls=Command)
def set_password(
    name: _NameArgument,
    password_file: _PasswordOption = None,
    cut: Annotated[
        bool, typer.Option("--cut", help="Also cut the connections that the user has.")
    ] = False,
    root: SecurityRootOption = None,
) -> None:
    """Change the password of a user.

    Open connections stay, as in Kafka, unless `--cut` is given.

    Example: sparklog users set-password alice --root ./data
    """
    from sparklog.security import users
    from sparklog.security.state import NO_USERS

    store = root_store(root)
    users.with_credentials(name, {})(known_state(store) or NO_USERS)  # before it asks
    credentials = users.credentials_of(_password(password_file))
    change_state(store, users.with_credentials(name, credentials, cut=cut))
    typer.echo(f"password of user {name} changed")


@app.command(cls=Command)
def disable(name: _NameArgument, root: SecurityRootOption = None) -> None:
    """Keep a user from logging in, and cut its connections.

    Example: sparklog users disable alice --root ./data
    """
    from sparklog.security import users

    change_state(root_store(root), users.disabled(name, True))
    typer.echo(f"user {name} disabled")


@app.command(cls=Command)
def enable(name: _NameArgument, root: SecurityRootOption = None) -> None:
    """Let a disabled user log in again.

    Example: sparklog users enable alice --root ./data
    """
    from sparklog.security import users

    change_state(root_store(root), users.disabled(name, False))
    typer.echo(f"user {name} enabled")


@app.command(cls=Command)
def remove(
    name: _NameArgument,
    yes: YesOption = False,
    root: SecurityRootOption = None,
) -> None:
    """Remove a user, and cut its connections.

    A client with a certificate or a token of this name can log in again, as one without a user; a
    disabled user keeps it out.

    Example: sparklog users remove alice --root ./data
    """
    from sparklog.security import users

    store = root_store(root)
    state = known_state(store)
    known = state.users.get(name) if state is not None else None
    if not yes:
        confirm(f"Remove user {name}?")
    change_state(store, users.removed(name))
    typer.echo(f"user {name} removed")
    if known is not None and known.methods:
        ways = " and ".join(known.methods)
        hint = f"sparklog: its {ways} can log in again; add and disable it to keep them out"
        typer.echo(hint, err=True)


@app.command("list", cls=Command)
def list_users(as_json: JsonOption = False, root: SecurityRootOption = None) -> None:
    """List the users.

    Example: sparklog users list --root ./data
    """
    import msgspec

    state = known_state(root_store(root))
    known = state.users if state is not None else {}
    if as_json:
        found = [
            {"name": name, "disabled": user.disabled, "methods": _methods_of(user)}
            for name, user in sorted(known.items())
        ]
        typer.echo(msgspec.json.encode(found).decode())
        return
    rows = [
        (name, ",".join(_methods_of(user)), "disabled" if user.disabled else "")
        for name, user in sorted(known.items())
    ]
    print_columns([("user", "methods", "state"), *rows])


def _methods_of(user: User) -> list[str]:
    """Returns the ways in which a user can log in."""
    return [*(["password"] if user.credentials else []), *user.methods]


def _methods_in(text: str) -> list[LoginMethod]:
    if text == _NO_METHODS:
        return []
    try:
        return [LoginMethod(each.strip()) for each in text.split(",")]
    except ValueError:
        known = ", ".join(LoginMethod)
        raise typer.BadParameter(f"{text!r}: the methods are {known}; or {_NO_METHODS}") from None


def _password(file: str | None) -> str:
    """Returns the password from a file, from standard input, or from the user."""
    from sparklog.security.credentials import password_in

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
        return password_in(data.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadOption(
            option="--password-file", value=file, reason=f"it cannot be read: {error}"
        ) from None
