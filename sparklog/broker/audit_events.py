"""Lines of the audit file: the events that they are made of, and the bounds on their number.

Events that others can cause at will, failed logins and refusals, have a budget of lines per second,
and so have logins that have succeeded, and the rarer ones, changes and administrative requests: a
flood of the one kind cannot displace another. Logins and refusals that equal one of the last
seconds are counted instead: a line with their number follows. Lines that exceed a budget, or that
wait for a file that cannot be written, are counted in a line `dropped`.

No line has text of unbounded length, and all but printable ASCII characters are escaped.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

import msgspec

from sparklog import limits
from sparklog.clock import Clock
from sparklog.security.acl import Acl
from sparklog.security.quota import QuotaKey
from sparklog.security.state import Author, Policy, SecurityState, StateDelta, User

LINES_PER_SECOND: Final = 100
"""The maximum for each class of events."""
EQUAL_SECONDS: Final = 10.0
"""The time in which equal logins and refusals are counted."""
STEADY_SECONDS: Final = 3_600.0
"""The time in which equal events of programs that log in with each of their calls are counted."""
QUEUE_BYTES: Final = 1 * limits.MIB
"""The maximum size of the lines of a class that wait to be written."""
EQUALS_KEPT: Final = 2_048
"""Events of a class with which later ones are compared."""
TEXT_LENGTH: Final = 249
"""The maximum length of a name or a reason; that of a topic's name."""
ITEMS_NAMED: Final = 100
"""The maximum number of users, ACLs or resources in a line."""
SUCCESS: Final = "success"
"""The outcome of a login."""
ROOT: Final = "Root:"
"""The beginning of a name that a program with access to the root has given itself."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """One event; its fields are those of the line."""

    equal_seconds: ClassVar[float] = 0.0
    """The time in which equal events are counted."""


class Login(Event, frozen=True, kw_only=True, tag="login"):
    """A login that has succeeded or failed."""

    equal_seconds: ClassVar[float] = EQUAL_SECONDS

    outcome: str
    """"success" or "failure"."""
    listener: str
    mechanism: str
    """That of SASL, "SSL" for a TLS handshake, or "token"; empty if the client has not come so
    far."""
    principal: str = ""
    """"User:alice"; the name is a claim if the login has failed."""
    host: str = ""
    reason: str = ""
    """Why it has failed."""


class CallLogin(Login, frozen=True, kw_only=True, tag="login"):
    """A successful login of a program that logs in with each of its calls."""

    equal_seconds: ClassVar[float] = STEADY_SECONDS


class RootCall(Event, frozen=True, kw_only=True, tag="root"):
    """A call of a program that has the root's keys, to which ACLs do not apply."""

    equal_seconds: ClassVar[float] = STEADY_SECONDS

    listener: str
    claimed_principal: str
    """As the program names itself."""
    host: str


class Refusal(Event, frozen=True, kw_only=True, tag="refusal"):
    """An operation on a resource that no ACL allows."""

    equal_seconds: ClassVar[float] = EQUAL_SECONDS

    outcome: str
    """"refused", or "observed" if it was served since ACLs are only observed."""
    principal: str
    host: str
    operation: str
    resource: str
    name: str


class AdminRequest(Event, frozen=True, kw_only=True, tag="request"):
    """A request that administers topics, groups or brokers, and was authorized."""

    action: str
    """As Kafka names the request, or as the Flight listener names the action."""
    outcome: str
    """The name of Kafka's error, or of the exception; "NONE" without an error."""
    listener: str = ""
    principal: str = ""
    claimed_principal: str = ""
    """The name that a program with the root's keys has given itself, instead of `principal`."""
    host: str = ""
    resource: str = ""
    names: Sequence[str] = ()
    """The resources; only the first of many."""
    more_names: int = 0
    details: Mapping[str, Any] = {}


class Change(Event, frozen=True, kw_only=True, tag="change"):
    """A version of the security state, which each broker of the root reads."""

    version: int
    made_at: str
    """By the clock of its author."""
    principal: str = ""
    claimed_principal: str = ""
    """The name that a program with access to the root has given itself."""
    host: str = ""
    users: Mapping[str, str] = {}
    acls_added: Sequence[str] = ()
    acls_removed: Sequence[str] = ()
    quotas: Mapping[str, Mapping[QuotaKey, float]] = {}
    """The values of each entity whose quotas have changed; none: removed."""
    policy: Mapping[str, Any] = {}
    others: Sequence[str] = ()
    """Other parts of the state that have changed, such as "root_key"."""
    more: int = 0
    """Users, ACLs and entities with quotas that have changed in addition."""


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """The broker has started, and goes by this version of the security state."""

    version: int
    mode: str
    users: int
    acls: int


class Dropped(Event, frozen=True, kw_only=True, tag="dropped"):
    """Events without a line."""

    of: str
    """The class of events."""
    count: int


def text(value: str) -> str:
    """Returns the beginning of a text that a client has chosen."""
    return value if len(value) <= TEXT_LENGTH else f"{value[:TEXT_LENGTH]}…"


def principal_fields(principal: str) -> dict[str, str]:
    """Returns the fields that name a principal: one of the root's is marked as a claim."""
    is_claim = principal.startswith(ROOT)
    return {"claimed_principal" if is_claim else "principal": text(principal)}


def request_of(
    action: str, outcome: str, principal: str, names: Iterable[str], **fields: Any
) -> AdminRequest:
    """Returns the event of a request. `fields`: others of `AdminRequest`."""
    known = [*names]
    return AdminRequest(
        action=action,
        outcome=outcome,
        names=[*map(text, known[:ITEMS_NAMED])],
        more_names=max(len(known) - ITEMS_NAMED, 0),
        **{**fields, **principal_fields(principal)},
    )


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="milliseconds")


# ------------------------------------------------------------------------------ changes


def change_of(before: SecurityState, delta: StateDelta) -> Change:
    """Returns the event of a version that follows `before`."""
    users = {name: _verb(before.users.get(name), user) for name, user in delta.users.items()}
    added, removed = [*map(_acl, delta.acls_added)], [*map(_acl, delta.acls_removed)]
    shown = {text(name): users[name] for name in sorted(users)[:ITEMS_NAMED]}
    others = [
        field.name
        for field in msgspec.structs.fields(StateDelta)
        if field.name not in _SHOWN_FIELDS and getattr(delta, field.name) != _default_of(field)
    ]
    policy: dict[str, Any] = {}
    if isinstance(delta.policy, Policy):
        policy = {
            name: value
            for name, value in msgspec.to_builtins(delta.policy).items()
            if value != msgspec.to_builtins(before.policy)[name]
        }
    quotas = {text(str(each.entity)): each.values for each in delta.quotas[:ITEMS_NAMED]}
    total = len(users) + len(added) + len(removed) + len(delta.quotas)
    kept = len(shown) + len(added[:ITEMS_NAMED]) + len(removed[:ITEMS_NAMED]) + len(quotas)
    return Change(
        version=delta.version,
        **_author(delta.author),
        users=shown,
        acls_added=added[:ITEMS_NAMED],
        acls_removed=removed[:ITEMS_NAMED],
        quotas=quotas,
        policy=policy,
        others=others,
        more=total - kept,
    )


_SHOWN_FIELDS: Final = frozenset(
    {
        "version",
        "change_id",
        "previous",
        "author",
        "policy",
        "users",
        "acls_added",
        "acls_removed",
        "quotas",
        "snapshot_crc",
    }
)
"""Fields of a delta that the event shows in its own way, or that change nothing."""


def _default_of(field: msgspec.structs.FieldInfo) -> object:
    """Returns the value of a delta's field that stands for no change."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _author(author: Author) -> dict[str, str]:
    made_at = _time(author.at_us)
    return {"made_at": made_at, **principal_fields(author.principal), "host": text(author.host)}


def _verb(before: User | None, after: User | None) -> str:
    """Describes the change of a user."""
    if after is None:
        return "removed"
    if before is None:
        return "added"
    verbs = []
    if before.id != after.id:
        verbs.append("replaced")
    if before.credentials != after.credentials:
        verbs.append("password changed")
    if before.methods != after.methods:
        verbs.append(f"methods: {', '.join(after.methods) or 'none'}")
    if before.disabled != after.disabled:
        verbs.append("disabled" if after.disabled else "enabled")
    elif before.epoch != after.epoch:
        verbs.append("cut")
    return ", ".join(verbs) or "changed"


def _acl(acl: Acl) -> str:
    what = f"{acl.operation.name} on {acl.pattern.name} {acl.resource.name} {text(acl.name)}"
    return f"{acl.permission.name} {text(acl.principal)} {what} from {acl.host}"


# ------------------------------------------------------------------------------ lines


@dataclass(slots=True)
class _Counted:
    """An event that has a line, and the number of equal ones since."""

    until: float
    more: int = 0


class _EventClass:
    """Events with a common budget of lines and a common queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: deque[bytes] = deque()
        self.bytes = 0
        self.equals: dict[Event, _Counted] = {}
        self.dropped = 0
        """Since the last line `dropped`."""
        self._second = -1
        self._in_second = 0

    def may_write(self, now: float) -> bool:
        """Takes a line from the budget; False if it is exhausted."""
        if self.bytes >= QUEUE_BYTES:
            return False
        if (second := int(now)) != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second <= LINES_PER_SECOND


class AuditLines:
    """Turns events into lines that wait to be written. Thread-safe; no call takes long."""

    def __init__(self, broker: int, *, clock: Clock) -> None:
        """`broker`: its id, which each line has: several brokers may share a file."""
        self._broker = broker
        self._clock = clock
        self._lock = threading.Lock()
        self._frequent = _EventClass("failed logins and refusals")
        self._logins = _EventClass("logins")
        self._steady = _EventClass("calls with a login of their own")
        self._rare = _EventClass("changes and administrative requests")
        self.written = 0
        """Lines that `take` has returned."""
        self.dropped = 0
        """Events without a line, not counting those that equal another one."""

    def note(self, event: Event) -> bool:
        """Adds the line of an event, or counts it. Returns False if it was dropped."""
        kind, now = self._class_of(event), self._clock.monotonic()
        with self._lock:
            known = kind.equals.get(event) if event.equal_seconds else None
            if known is not None and now < known.until:
                known.more += 1
                return True
            if known is not None:
                self._end(kind, event)
            if not kind.may_write(now):
                self._drop(kind, 1)
                return False
            if event.equal_seconds:
                if len(kind.equals) >= EQUALS_KEPT:
                    self._end(kind, next(iter(kind.equals)))
                kind.equals[event] = _Counted(now + event.equal_seconds)
            self._queue(kind, event)
            return True

    def drop(self, event: Event, count: int) -> None:
        """Counts events like this one that are not examined."""
        with self._lock:
            self._drop(self._class_of(event), count)

    @property
    def is_full(self) -> bool:
        """True if events are dropped because too many lines wait."""
        return any(kind.bytes >= QUEUE_BYTES for kind in self._classes)

    @property
    def _classes(self) -> tuple[_EventClass, ...]:
        return self._rare, self._steady, self._logins, self._frequent

    def take(self, *, is_last: bool = False) -> list[bytes]:
        """Returns the lines that wait, and forgets them. Each ends with a line break.

        `is_last`: also the numbers of equal events that could still grow.
        """
        now = self._clock.monotonic()
        found: list[bytes] = []
        with self._lock:
            for kind in self._classes:
                while kind.equals:
                    event, counted = next(iter(kind.equals.items()))
                    if now < counted.until and not is_last:
                        break
                    self._end(kind, event)
                if kind.dropped:
                    self._queue(kind, Dropped(of=kind.name, count=kind.dropped))
                    kind.dropped = 0
                found += kind.lines
                kind.lines.clear()
                kind.bytes = 0
            self.written += len(found)
        return found

    def _class_of(self, event: Event) -> _EventClass:
        if event.equal_seconds == STEADY_SECONDS:
            return self._steady
        if isinstance(event, Login) and event.outcome == SUCCESS:
            return self._logins
        return self._frequent if event.equal_seconds else self._rare

    def _drop(self, kind: _EventClass, count: int) -> None:
        kind.dropped += count
        self.dropped += count

    def _end(self, kind: _EventClass, event: Event) -> None:
        """Stops counting events that equal this one."""
        if more := kind.equals.pop(event).more:
            self._queue(kind, event, count=more)

    def _queue(self, kind: _EventClass, event: Event, **fields: int) -> None:
        line = {
            "time": _time(self._clock.now_us()),
            "broker": self._broker,
            **msgspec.to_builtins(event),
            **fields,
        }
        data = f"{json.dumps(line, separators=(',', ':'))}\n".encode()
        kind.lines.append(data)
        kind.bytes += len(data)
