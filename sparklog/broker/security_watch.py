"""The security state of the root, as one broker follows it.

A look is a read of the newest version. The state is looked at every tenth of a second (on an object
store, every second), so a change is in force at each broker within that time. While no look
succeeds, the state in use grows older: `check_fresh` refuses it once it is as old as the silence
after which a broker counts as dead.

A root may get its first user or ACL while a broker serves it. Until then there is nothing to look
at, and the state is empty.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Final

from sparklog import errors, limits
from sparklog.broker.loops import Loops
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock, Moment
from sparklog.security.state import Mode, SecurityState, StateDelta
from sparklog.settings import BrokerSettings
from sparklog.storage.objects import Store
from sparklog.storage.security_store import SecurityStore, check_home, open_security, security_of

_FOLLOW_REMOTE_SECONDS: Final = 1.0
_AWAIT_SECONDS: Final = 0.25
"""Between two looks at the metadata for a first security state; it is in memory."""
_LOOKS_MISSED: Final = 3
"""The number of looks that may be late before the state counts as too old."""
_LOOKS_ON_DEMAND: Final = 10
"""The number of looks that requests may cause in the time between two regular ones."""


class SecurityWatch:
    """Follows the security state. May be used by several threads."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        follow_seconds: float,
        stale_seconds: float,
        refused: RefusedWork,
    ) -> None:
        """Creates a watch that has read nothing yet.

        Args:
            store: of the root.
            clock: for the age of the last look.
            follow_seconds: the time between two looks.
            stale_seconds: the age of the last look from which on the state is not used.
            refused: notes the work that is refused for that.
        """
        self._store = store
        self._clock = clock
        self._follow_seconds = follow_seconds
        self._stale_seconds = stale_seconds
        self._refused = refused
        self._security: SecurityStore | None = None
        self._lock = threading.Lock()
        """Held during a look."""
        self._begun = 0
        self._succeeded = 0
        """The numbers of the newest look that began, and of the newest that succeeded."""
        self._failed = 0
        """The number of the newest look that failed."""
        self._looked = self._attempted = Moment.now(clock)
        """When the newest look that succeeded began, and when the newest one did."""
        self.state = self._announced = SecurityState()
        """The newest version that is known; without a security state, an empty one."""
        self.has_logins = False
        """True if clients log in: their logins are refused while the state is too old."""
        self.on_change: list[Callable[[], None]] = []
        """Called in this order after `state` has changed, in the thread that has looked."""
        self.chain_id: Callable[[], str] = lambda: ""
        """Returns `ClusterMetadata.security` as it is known now; set by the owner."""
        self.on_read: Callable[[SecurityState, StateDelta], None] | None = None
        """See `SecurityStore.on_read`."""

    @property
    def has_state(self) -> bool:
        """True if the root has users, ACLs or a policy."""
        return self._security is not None

    @property
    def is_enforced(self) -> bool:
        """True if ACLs are enforced, or may be, as the state has not been read yet."""
        return self.is_unread or self.state.policy.mode is Mode.ENFORCE

    @property
    def is_unread(self) -> bool:
        """True if the root has a state that this broker has not been able to read at all."""
        return self._security is not None and not self.state.version

    def open(self) -> None:
        """Reads the state that the root has now, if any.

        Raises `CorruptObject` if it is missing, and the errors of the store.
        """
        with contextlib.suppress(errors.NotARoot):
            self._security = open_security(self._store, clock=self._clock)
        self.refresh()

    def refresh(self) -> None:
        """Looks for changes. Raises `CorruptObject` and the errors of the store."""
        with self._lock:
            self._look()

    def refresh_after(self, looks: int) -> None:
        """Returns after a look that is not one of the first `looks`; calls that wait share one.

        Raises `SecurityNotRead` if that look has failed.
        """
        with self._lock:
            if self._succeeded > looks:
                return
            if self._failed > looks:
                raise self._refusal(Work.REQUESTS)
            pause_seconds = self._follow_seconds / _LOOKS_ON_DEMAND
            since_seconds = self._attempted.age_seconds(self._clock)
            if since_seconds < pause_seconds:
                self._clock.sleep(pause_seconds - since_seconds)
            try:
                self._look()
            except errors.SparklogError as error:
                raise self._refusal(Work.REQUESTS) from error

    @property
    def looks(self) -> int:
        """The number of looks that have begun."""
        return self._begun

    def _look(self) -> None:
        self._begun += 1
        number, began = self._begun, Moment.now(self._clock)
        self._attempted = began
        try:
            self._read()
        except BaseException:
            self._failed = number
            raise
        self._looked, self._succeeded = began, number

    def _read(self) -> None:
        security = self._security
        if security is None and (chain_id := self.chain_id()):
            security = security_of(self._store, chain_id, clock=self._clock)
        if security is None:
            return
        security.on_read = self.on_read
        try:
            newest = security.look()
            if newest is not self.state:
                check_home(self._store, newest)
                self.state = newest
        finally:
            self._security = security  # after a first look that succeeds, the state is not unread
        if self._announced is not self.state:
            for each in self.on_change:
                each()
            self._announced = self.state

    def follow(self, loops: Loops) -> None:
        """Looks for changes, and starts a thread that continues to do so."""
        with contextlib.suppress(errors.SparklogError):  # the thread reports it
            self.refresh()
        repeat = functools.partial(
            loops.repeat, "reading the users and ACLs", self._pause_seconds, self.refresh
        )
        loops.start("security", repeat)

    def _pause_seconds(self) -> float:
        return self._follow_seconds if self._security is not None else _AWAIT_SECONDS

    # -------------------------------------------------------------------------- age

    @property
    def is_stale(self) -> bool:
        """True if the state is too old to be used."""
        is_old = self._looked.age_seconds(self._clock) >= self._stale_seconds
        return self.is_unread or (self._security is not None and is_old)

    def check_fresh(self) -> None:
        """Raises `SecurityNotRead` if the state is too old to be used."""
        if self.is_stale:
            raise self._refusal(*self._dependent_work())

    def note_if_stale(self) -> None:
        """Notes that work is refused, if it is."""
        with contextlib.suppress(errors.SecurityNotRead):
            self.check_fresh()

    def _dependent_work(self) -> Iterator[Work]:
        """Yields the work that is refused while the state is too old."""
        if self.has_logins:
            yield Work.LOGINS
        if self.is_enforced:
            yield Work.REQUESTS

    def _refusal(self, *works: Work) -> errors.SecurityNotRead:
        refusal = errors.SecurityNotRead(seconds=round(self._looked.age_seconds(self._clock)))
        for work in works:
            self._refused.note(work, str(refusal))
        return refusal


def watch_security(
    settings: BrokerSettings, store: Store, *, clock: Clock, refused: RefusedWork
) -> SecurityWatch:
    """Returns a watch that has read nothing yet, with the times of a broker of these settings."""
    follow_seconds = limits.WATCH_SECONDS if store.is_local else _FOLLOW_REMOTE_SECONDS
    dead_after_seconds = settings.liveness.on(local=store.is_local).dead_after_seconds
    return SecurityWatch(
        store,
        clock=clock,
        follow_seconds=follow_seconds,
        stale_seconds=max(dead_after_seconds, _LOOKS_MISSED * follow_seconds),
        refused=refused,
    )
