"""The audit of a broker: its file, and the thread that writes to it.

A listener that notes an event never waits for the file. While the file cannot be written, its lines
wait in memory; once there are too many, further ones are dropped and counted. The broker's log and
its status say so.

The file only grows. A program that rotates logs renames it: the next line goes to a new one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
import structlog

from sparklog import errors, limits
from sparklog.broker.audit_events import (
    ITEMS_NAMED,
    SUCCESS,
    AuditLines,
    CallLogin,
    Event,
    Login,
    Refusal,
    RootCall,
    Started,
    change_of,
    text,
)
from sparklog.broker.refused_work import RefusedWork, Work
from sparklog.clock import Clock
from sparklog.security.state import SecurityState, StateDelta

CHECK_SECONDS: Final = 1.0
"""Between two checks for counted lines, for a renamed file, and whether it can be written again."""
_CLOSE_SECONDS: Final = 2.0
_MODE: Final = 0o600
_TAIL_BYTES: Final = 64 * limits.KIB

_log = structlog.get_logger("sparklog.audit")


class _Versioned(msgspec.Struct):
    """A line, as far as it names a version of the security state."""

    version: int = 0


_VERSIONED: Final = msgspec.json.Decoder(_Versioned)


class AuditFile:
    """A file that lines are appended to. For one thread."""

    def __init__(self, path: Path) -> None:
        """Raises `BadOption` if it cannot be opened for writing."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        except OSError as error:
            reason = f"{error}; name a file that can be written"
            raise errors.BadOption(
                option="security.audit_file", value=str(path), reason=reason
            ) from error
        self._unwritten = b"\n" if self._is_torn() else b""

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)

    def _is_torn(self) -> bool:
        """Returns whether the last line is incomplete, such as after a power cut."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                return file.read() != b"\n"
        return False

    def last_version(self) -> int:
        """Returns the version of the security state in the newest line that has one; 0 if its end
        has none.
        """
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(msgspec.MsgspecError):
                    if version := _VERSIONED.decode(line).version:
                        return version
        return 0

    def append(self, data: bytes = b"") -> None:
        """Appends lines, after those that could not be written before.

        Raises `OSError` if not all can be written; the next call continues.
        """
        self._unwritten += data
        if not self._unwritten:
            return
        self._follow_rename()
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def _follow_rename(self) -> None:
        """Opens a new file if the path names another one than the open file, or none."""
        try:
            found = self._path.stat()
            now = os.fstat(self._file)
            if (found.st_dev, found.st_ino) == (now.st_dev, now.st_ino):
                return
        except FileNotFoundError:
            pass
        old, self._file = self._file, self._open()
        os.close(old)

    def close(self) -> None:
        os.close(self._file)


class Audit:
    """Writes the events of one broker to its audit file, in a thread. Thread-safe."""

    def __init__(self, path: Path, broker: int, *, clock: Clock, refused: RefusedWork) -> None:
        """Opens the file. Raises `BadOption` if it cannot be written.

        `refused`: notes that lines are not written.
        """
        self._file = AuditFile(path)
        self._path = path
        self._refused = refused
        self._noted_version = self._file.last_version()
        """The newest version of the security state that has a line."""
        self.lines = AuditLines(broker, clock=clock)
        self._due = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="sparklog-audit", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------- events

    def note(self, event: Event) -> None:
        """Adds an event to the file, soon."""
        if not self.lines.note(event):
            return
        self._due.set()

    def logged_in(
        self,
        *,
        listener: str,
        mechanism: str,
        principal: str,
        host: str,
        is_repeated: bool = False,
    ) -> None:
        """Notes a login that has succeeded. `is_repeated`: the client logs in with each call."""
        kind = CallLogin if is_repeated else Login
        self.note(
            kind(
                outcome=SUCCESS,
                listener=listener,
                mechanism=mechanism,
                principal=principal,
                host=host,
            )
        )

    def login_failed(
        self, *, listener: str, mechanism: str, user: str, host: str, reason: str
    ) -> None:
        """Notes a login that has failed. `user`: the name that the client has sent, if any."""
        self.note(
            Login(
                outcome="failure",
                listener=listener,
                mechanism=mechanism,
                principal=text(f"User:{user}") if user else "",
                host=host,
                reason=text(reason),
            )
        )

    def root_called(self, *, listener: str, principal: str, host: str) -> None:
        """Notes a call of a program that has the root's keys."""
        self.note(RootCall(listener=listener, claimed_principal=text(principal), host=host))

    def refused(
        self,
        principal: str,
        host: str,
        operation: str,
        resource: str,
        names: Collection[str],
        *,
        is_refused: bool,
    ) -> None:
        """Notes an operation that is not allowed on resources; see `Authorization.note_denied`."""
        outcome = "refused" if is_refused else "observed"
        event = None
        for name in [*names][:ITEMS_NAMED]:
            event = Refusal(
                outcome=outcome,
                principal=text(principal),
                host=host,
                operation=operation,
                resource=resource,
                name=text(name),
            )
            self.note(event)
        if event is not None and len(names) > ITEMS_NAMED:
            self.lines.drop(event, len(names) - ITEMS_NAMED)

    def changed(self, before: SecurityState, delta: StateDelta) -> None:
        """Notes a version of the security state that this broker has read.

        A broker that starts reads the newest ones, and adds those that are not in its file yet.
        """
        if delta.version <= self._noted_version:
            return
        self._noted_version = delta.version
        try:
            self.note(change_of(before, delta))
        except Exception:  # the broker has to follow the change in any case
            _log.exception("a change is missing in the audit", version=delta.version)

    def started(self, state: SecurityState) -> None:
        """Notes that the broker has started, with this security state."""
        self._noted_version = state.version  # also if it is older, as in a restored root
        self.note(
            Started(
                version=state.version,
                mode=state.policy.mode.value,
                users=len(state.users),
                acls=len(state.acls),
            )
        )

    # -------------------------------------------------------------------------- writing

    def _run(self) -> None:
        while not self._is_closing:
            self._due.wait(CHECK_SECONDS)
            self._due.clear()
            self._write()
        self._write(is_last=True)
        self._file.close()

    def note_if_stuck(self) -> None:
        """Notes that lines are dropped, if they are: the file system may not answer at all."""
        if self.lines.is_full:
            self._refused.note(Work.AUDIT_LINES, f"{self._path}: too many lines wait for it")

    def _write(self, *, is_last: bool = False) -> None:
        try:
            self._file.append()
            if lines := self.lines.take(is_last=is_last):
                self._file.append(b"".join(lines))
        except OSError as error:
            self._refused.note(
                Work.AUDIT_LINES, f"{self._path}: {error.strerror or error}; events wait in memory"
            )

    def close(self) -> None:
        """Writes the last lines, and ends the thread. Lines that cannot be written are lost."""
        self._is_closing = True
        self._due.set()
        self._thread.join(_CLOSE_SECONDS)


class ListenerAudit:
    """Notes the logins at one listener, if there is an audit."""

    def __init__(self, audit: Audit | None, listener: str) -> None:
        """`listener`: its name."""
        self._audit = audit
        self._listener = listener

    def logged_in(
        self, mechanism: str, principal: str, host: str, *, is_repeated: bool = False
    ) -> None:
        """See `Audit.logged_in`."""
        if self._audit is not None:
            self._audit.logged_in(
                listener=self._listener,
                mechanism=mechanism,
                principal=principal,
                host=host,
                is_repeated=is_repeated,
            )

    def login_failed(self, mechanism: str, user: str, host: str, reason: str) -> None:
        """See `Audit.login_failed`."""
        if self._audit is not None:
            self._audit.login_failed(
                listener=self._listener, mechanism=mechanism, user=user, host=host, reason=reason
            )
