"""Users of a root, as `sparklog users` changes them."""

from __future__ import annotations

from typing import Final

from sparklog.clock import SystemClock
from sparklog.security import users
from sparklog.security.state import Author
from sparklog.storage.objects import Store
from sparklog.storage.security_store import change_security

PASSWORD: Final = "alice-secret"


def change_users(store: Store, what: users.Change, *, create: bool = True) -> None:
    """Changes the users of a root, which is created if necessary."""
    author = Author(principal="Root:test")
    change_security(store, what, author=author, clock=SystemClock(), create=create)


def add_alice(store: Store) -> None:
    """Adds the user alice with `PASSWORD`."""
    change_users(store, users.added("alice", users.credentials_of(PASSWORD)))
