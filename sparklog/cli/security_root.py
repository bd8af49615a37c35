"""The root whose security state a command reads or changes; no broker is needed."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog import errors
from sparklog.options import ROOT_VARIABLE, STORAGE_PREFIX, check_root, storage_options

if TYPE_CHECKING:
    from sparklog.security.state import SecurityState
    from sparklog.security.users import Change
    from sparklog.storage.objects import Store

SecurityRootOption = Annotated[
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


def root_store(root: str | None) -> Store:
    """Opens the store of the root that the command line or the environment names.

    Raises a usage error if none is named, or if it belongs to another user of this machine.
    """
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


def known_state(store: Store, *, may_create: bool = False) -> SecurityState | None:
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


BesideTheDataOption = Annotated[
    bool,
    typer.Option(
        "--beside-the-data",
        help="Accept that the first user of a bucket is stored in security/ of that bucket, where"
        " everybody who may read the whole bucket can try passwords.",
    ),
]


def check_bucket(store: Store, known: SecurityState | None, *, beside_the_data: bool) -> None:
    """Raises a usage error before the first user of a bucket, unless its place is accepted."""
    if not store.is_local and not beside_the_data and known is None:
        raise typer.BadParameter(
            "the users of a bucket are in security/ of it: deny that prefix to everybody but the"
            " brokers, then pass --beside-the-data (docs/security.md)"
        )


def check_place(store: Store, known: SecurityState | None) -> None:
    """Raises a usage error for a bucket without a security state.

    Only the first user creates it there: that command has an option to accept the place.
    """
    if not store.is_local and known is None:
        raise typer.BadParameter(
            "the users, ACLs and keys of a bucket are in security/ of it, and it has none yet: deny"
            " that prefix to everybody but the brokers, then add the first user with `sparklog"
            " users add NAME --beside-the-data` (docs/security.md)"
        )


def change_state(store: Store, change: Change, *, create: bool = False) -> SecurityState:
    """Returns the newest state, after a change; with `create`, creates the root if necessary."""
    from sparklog.clock import SystemClock
    from sparklog.security.state import Author
    from sparklog.storage.security_store import change_security

    clock = SystemClock()
    who = f"Root:{_name_of(os.geteuid())}@{socket.gethostname()}"
    author = Author(principal=who, at_us=clock.now_us())
    return change_security(store, change, author=author, clock=clock, create=create)
