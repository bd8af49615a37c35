"""`connect`: opens a log by a root or an address, and starts a broker for a root without one.

A log is reached in one of three ways:

- An address, `host:port`: the broker there. No broker is started.
- A root with a live broker: the broker that the root's metadata names, once it has confirmed that
  it serves this root's cluster, because the address may refer to a different machine here. A broker
  that answers needs no heartbeat; only one that does not answer is watched.
- A root without a live broker: an *embedded* broker in this process, on a loopback address. It is
  registered like any other, so another process on the root joins it, and takes over when it ends.
  With `detached` the broker is a separate process, which ends after some idle time. If this process
  can only read the root, no broker is started: reads go to the root itself.

Brokers that are started here take their settings from the environment (`SPARKLOG_…`). A standing
broker (`sparklog broker`) takes over from them: this process continues as its client, and starts a
new embedded broker once the standing one has ended.

An embedded broker belongs to the process that started it. A forked child has none, and stops none.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from sparklog import errors, limits, listeners
from sparklog.client import arguments
from sparklog.client.connection import Channel, Connection, Resolve, ask
from sparklog.client.credentials import ClientCredentials
from sparklog.client.log import Log
from sparklog.clock import Clock, SystemClock
from sparklog.formats import flight_messages
from sparklog.options import (
    BOOTSTRAP_VARIABLE,
    ROOT_VARIABLE,
    STORAGE_PREFIX,
    check_bootstrap,
    check_root,
    is_bootstrap,
    is_loopback,
    storage_options,
)
from sparklog.security.credentials import Security
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings, load_settings
from sparklog.storage.metadata import identity, placement
from sparklog.storage.metadata.cluster_file import open_cluster, read_cluster
from sparklog.storage.metadata.identity import Answer
from sparklog.storage.metadata.liveness import Leader, LeaderState, LeaderWatch, Sighting, describe
from sparklog.storage.metadata.model import BrokerKind
from sparklog.storage.objects import Store, open_store
from sparklog.storage.root_credentials import RootCredentials

if TYPE_CHECKING:
    from sparklog.broker.agent import Agent

EMBEDDED_BROKER_ID = 1_000_000
DETACHED_IDLE_SECONDS = 60.0

_START_SECONDS: Final = 30.0
_START_ATTEMPTS: Final = 3
_LOOK_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 10.0
_READ_ONLY_SECONDS: Final = 10.0
"""Between two attempts to start a broker on a root that this process could not write to."""
_TRANSIENT: Final = (errors.BrokerUnavailable, errors.BrokerClosing, errors.BrokerFenced)
_MISLED: Final = (errors.BadOption, errors.RootIsCopy, errors.WrongCluster)
"""The address in the metadata points elsewhere; a broker of this root may still be alive."""
_ANY_PORT: Final = "127.0.0.1:0"

_LOG_NAME_LENGTH: Final = 80

_log = logging.getLogger(__name__)


@arguments.suggests_keywords
def connect(
    target: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    detached: bool = False,
    kafka: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    security: Security | None = None,
) -> Log:
    """Opens a log by its root or by the addresses of its brokers.

    Args:
        target: a root: a folder, or a URI `s3://…`, `gs://…` or `az://…`. Or the Flight address of
            a broker, `host:port`, or `tls://host:port` if it uses TLS; with several, in a list or
            separated by commas, the first that answers is used. None: `SPARKLOG_BOOTSTRAP`, or
            else `SPARKLOG_ROOT`.
        detached: for a root without a live broker: start the broker as a separate process. By
            default it runs in this process.
        kafka: for a root without a live broker: the address `host:port` at which the new broker
            listens for Kafka clients. None: `SPARKLOG_KAFKA_LISTEN`, or else no Kafka listener.
        storage_options: credentials and other options of the object store, by obstore's names; they
            take precedence over the environment's `SPARKLOG_STORAGE_<OPTION>`.
        security: for addresses: the CA of the brokers, and a user. None: that of the environment's
            `SPARKLOG_CLIENT_CA`, `SPARKLOG_CLIENT_USER` and so on. Not with a root: the root has
            the CA of its brokers, and a program that can read it needs no user.

    Raises:
        errors.BadOption: no target, or one that is neither an address nor a root; an argument for
            roots with an address; a broker that only its own host can reach, or that serves Kafka
            at an address other than `kafka`; or an invalid value of a variable `SPARKLOG_…`.
        errors.UnknownOption: a variable `SPARKLOG_…` that is not a setting of a broker.
        errors.NotARoot, errors.RootNotEmpty, errors.RootNotWritable, errors.FormatTooNew,
            errors.CorruptObject: a broker cannot be started on the root, for this reason. A root
            that this process can only read is still opened, unless `detached` or `kafka` is given:
            its records are read without a broker, and other calls raise `RootReadOnly`.
        errors.BrokerUnavailable, errors.WrongPort: no broker answers at the address. With several
            addresses the error names each with its reason.
        errors.WrongCluster: the address of the root's broker belongs to a different cluster here.
        errors.RootIsCopy: the root is kept in step with another one, which that broker serves.
        TypeError: an unknown keyword; the message names the nearest parameter.
    """
    location, is_address = _location(target)
    arguments.flag("detached", detached)
    if kafka is not None:
        arguments.text("kafka", kafka)
    if storage_options is not None:
        for name, value in arguments.mapping(
            "storage_options", storage_options, "{name: text}"
        ).items():
            arguments.text("storage_options", name)
            if not isinstance(value, str):  # it may be a secret, and errors are logged
                reason = f"expected a str, not {type(value).__name__}"
                raise errors.BadOption(
                    option=f"storage_options[{name!r}]", value="…", reason=reason
                )
    if is_address:
        _refuse_with_address(
            location, detached=detached, kafka=kafka, storage=bool(storage_options)
        )
        credentials = ClientCredentials(security)
        log = Log(Connection.to(location, credentials=credentials), root=location)
        log.connection.channel()
        _visiting.add(log)
        _close_at_exit()
        return log
    if security is not None:
        reason = (
            f"it is for addresses of brokers, and {location} is a root: store the CA there, with"
            " `sparklog security set-ca`; a program that can read the root needs no user"
        )
        raise errors.BadOption(option="security", value=str(security), reason=reason)
    with _named_as_given(kafka):
        session = _RootSession(location, detached=detached, kafka=kafka, given=storage_options)
        session.resolve(patience_seconds=limits.ACTION_TIMEOUT_SECONDS)
    try:
        session.check_kafka()
    except errors.BadOption:
        session.close()
        raise
    log = Log(session.connection(session.resolve), root=location, on_close=session.close)
    _open[session] = weakref.ref(log)
    _close_at_exit()
    return log


def _refuse_with_address(address: str, *, detached: bool, kafka: str | None, storage: bool) -> None:
    """Raises `BadOption` for arguments that apply only to a root."""
    started = "a broker that is started here"
    for option, value, what in (
        ("detached", detached, started),
        ("kafka", kafka, started),
        ("storage_options", "…" if storage else None, "the object store under a root"),
    ):
        if value:
            reason = (
                f"it applies to {what}, but the target {address} is a running broker: omit it, or"
                " pass the root"
            )
            raise errors.BadOption(option=option, value=value, reason=reason)


@contextlib.contextmanager
def _named_as_given(kafka: str | None) -> Iterator[None]:
    """Makes errors about the Kafka listener name the argument `kafka`, if it was given."""
    try:
        yield
    except errors.BadOption as error:
        if kafka is None or error.option != "kafka.listen":
            raise
        raise errors.BadOption(option="kafka", value=kafka, reason=error.reason) from error


def visit(root: str, *, storage_options: Mapping[str, str] | None = None) -> Connection:
    """Returns a connection to the root's live broker at the time of use; never starts one.

    Its calls raise `BrokerUnavailable` if no broker is alive, and otherwise the same errors as
    `connect`.
    """
    session = _RootSession(root, given=storage_options, starts=False)
    return session.connection(session.find)


def _location(target: str | os.PathLike[str] | Sequence[str] | None) -> tuple[str, bool]:
    """Returns the root or the addresses, and True for addresses. Raises `BadOption`."""
    if target is None:
        bootstrap = os.environ.get(BOOTSTRAP_VARIABLE)
        if bootstrap:
            return check_bootstrap(BOOTSTRAP_VARIABLE, bootstrap), True
        target = os.environ.get(ROOT_VARIABLE)
    if not target:
        raise errors.BadOption(
            option="target",
            value=target if isinstance(target, str | None) else repr(target),
            reason=f"pass a root or host:port, or set {ROOT_VARIABLE} or {BOOTSTRAP_VARIABLE}",
        )
    if isinstance(target, list | tuple):
        return check_bootstrap("target", target), True
    if not isinstance(target, str | os.PathLike):
        reason = "expected a folder, a URI, host:port or a list of addresses"
        raise errors.BadOption(option="target", value=repr(target), reason=reason)
    location = os.fspath(target)
    if is_bootstrap(location) and not Path(location).exists():
        return check_bootstrap("target", location), True
    hint = " Did you mean host:port, the address of a broker?"
    return check_root("target", location, hint), False


# ------------------------------------------------------------------------------ open logs

_open: dict[_RootSession, weakref.ref[Log]] = {}
"""Logs on roots, to be closed at exit: notebooks rarely close them."""

_visiting: weakref.WeakSet[Log] = weakref.WeakSet()
"""Logs on addresses, to be closed at exit."""

_of_the_parent: list[object] = []
"""Brokers of the parent that a forked child keeps: destroying them would stop them."""


def _close_at_exit() -> None:
    # Last in, first out: Flight closes its server at exit too, and waits for our streams.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for visiting in list(_visiting):
        visiting.close()
    for session, log in list(_open.items()):
        (log() or session).close()


def _after_fork_in_child() -> None:
    _visiting.clear()
    for session in _open:
        agent = session.forget()
        if agent is not None:
            _of_the_parent.extend((agent, *_disarmed(agent.listeners.flight)))
    _open.clear()


def _disarmed(listener: object) -> list[object]:
    """Detaches the finalizers that shut down the Flight server at exit, and returns their objects.

    In a child the shutdown would never end: it waits for threads that only the parent has.
    """
    finalizers = [each.__callback__ for each in weakref.getweakrefs(listener)]
    return [each.detach() for each in finalizers if isinstance(each, weakref.finalize)]


os.register_at_fork(after_in_child=_after_fork_in_child)


# ------------------------------------------------------------------------------ one root


class _RootSession:
    """Finds the broker of a root, or starts one; `resolve` is called again if a channel breaks."""

    def __init__(
        self,
        root: str,
        *,
        given: Mapping[str, str] | None,
        detached: bool = False,
        kafka: str | None = None,
        starts: bool = True,
        clock: Clock | None = None,
    ) -> None:
        storage = storage_options(root, given)
        self._store: Store = open_store(root, storage)
        self._kind = BrokerKind.DETACHED if detached else BrokerKind.EMBEDDED
        self._settings = BrokerSettings(root=root)
        if starts:
            self._settings = _broker_settings(root, self._kind, kafka, storage)
        self._clock = clock or SystemClock()
        self._credentials = RootCredentials(
            self._store, lambda: self._watch.metadata, clock=self._clock
        )
        self._ask = functools.partial(ask, credentials=self._credentials.without_tokens())
        self._watch = LeaderWatch(
            self._store,
            clock=self._clock,
            dead_after_seconds=self._settings.liveness.on(
                local=self._store.is_local
            ).dead_after_seconds,
            answers=identity.answers(
                self._store, self._ask, timeout_seconds=limits.PROBE_TIMEOUT_SECONDS
            ),
        )
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._has_resolved = False
        self._asks_for_kafka = kafka is not None
        self._reader: Channel | None = None
        """Reads the root if this process may not write to it."""
        self._reads_until = -math.inf
        """Until then no further start of a broker is attempted, in monotonic seconds."""

    def connection(self, resolve: Resolve) -> Connection:
        """Returns a connection to the brokers of the root. `resolve`: a method of the session."""
        return Connection(resolve, credentials=self._credentials)

    def resolve(self, patience_seconds: float = 0.0) -> str | Channel:
        """Returns the Flight address of the root's live broker, which is started if there is none.

        Returns a channel to the root itself if this process can only read it.

        `patience_seconds`: how long to keep asking a live broker that does not answer. It may have
        just died, or still be recovering.
        """
        with self._lock:
            for _ in range(_START_ATTEMPTS):
                address = self._join(patience_seconds) or self._join_member()
                if address is None and self._clock.monotonic() < self._reads_until:
                    assert self._reader is not None
                    return self._reader
                try:
                    if address is None:
                        address = self._start()
                    self._has_resolved = True
                    return address
                except (errors.BrokerAlive, errors.BrokerFenced) as error:
                    refusal = error  # another process was faster
                except errors.RootNotWritable as error:
                    return self._root_itself(error)
            # Brokers are coming and going; there may be one that answers later.
            raise errors.BrokerUnavailable(address=self._store.uri, reason=str(refusal))

    def _join_member(self) -> str | None:
        """Returns the address of a live member of a cluster whose controller has just died."""
        metadata = self._watch.metadata
        others = {each.broker for each in placement.candidates(metadata)} - {metadata.controller}
        for broker in sorted(others):
            leader = Leader.of(metadata, self._store, broker=broker)
            if leader is None or leader.is_leaving:
                continue
            with contextlib.suppress(errors.SparklogError):
                self._check(leader)
                return leader.flight
        return None

    def _root_itself(self, refusal: errors.RootNotWritable) -> Channel:
        """Returns a channel for reading the root. Raises `refusal` if a broker was requested."""
        # Slow to import, and not needed if a broker is alive.
        from sparklog.root_channel import RootChannel

        if self._asks_for_kafka or self._kind is BrokerKind.DETACHED:
            raise refusal
        reason = refusal.reason
        if self._reader is None:
            try:
                self._reader = RootChannel(self._store, clock=self._clock, reason=reason)
            except errors.NotARoot:
                raise refusal from None
        if not self._has_resolved:
            self._has_resolved = True
            _log.info("sparklog: reading %s without a broker: %s", self._store.uri, reason)
        self._reads_until = self._clock.monotonic() + _READ_ONLY_SECONDS
        return self._reader

    def find(self) -> str:
        """Returns the Flight address of the live broker. Raises `BrokerUnavailable`."""
        address = self._join(0.0)
        if address is None:
            raise errors.BrokerUnavailable(address=self._store.uri, reason="no broker is alive")
        return address

    def _join(self, patience_seconds: float) -> str | None:
        """Returns the address of the live broker once it has answered; None if none is alive."""
        began = self._clock.monotonic()
        warned = False
        while (found := self._watch.poll()) is not None and found.state is not LeaderState.DEAD:
            try:
                self._check(found.leader)
                return found.leader.flight
            except (*_TRANSIENT, *_MISLED) as error:
                waited_seconds = self._clock.monotonic() - began
                if self._is_final(error, found, waited_seconds, patience_seconds):
                    raise
                is_copy = isinstance(error, errors.RootIsCopy)
            if (found.state is LeaderState.UNKNOWN or is_copy) and not warned:
                warned = True
                _log.warning(
                    "sparklog: waiting up to %g s to see whether %s is alive%s",
                    self._watch.patience_seconds(found.leader),
                    describe(found.leader, now_us=self._clock.now_us()),
                    " and writes to this copy of its root" if is_copy else "",
                )
            self._watch.pause()
        return None

    def _is_final(
        self,
        error: errors.SparklogError,
        found: Sighting,
        waited_seconds: float,
        patience_seconds: float,
    ) -> bool:
        """Returns whether waiting longer cannot resolve `error`."""
        if isinstance(error, _TRANSIENT):
            return waited_seconds >= patience_seconds
        if isinstance(error, errors.RootIsCopy):
            # The heartbeats in a copy stop soon, unless it is kept in step with its original.
            return waited_seconds > 2 * self._watch.patience_seconds(found.leader)
        # Only a heartbeat proves that a broker whose address belongs to another machine is alive.
        return found.state is LeaderState.ALIVE

    def _check(self, leader: Leader) -> None:
        """Checks that the broker at the address of `leader` is that leader, and serves this root.

        Raises `WrongCluster`, `RootIsCopy`, `BadOption`, and what asking it raises.
        """
        _check_is_no_loopback_of_others(leader)
        asked = identity.ask_broker(self._store, leader, self._ask, timeout_seconds=_ANSWER_SECONDS)
        match asked.answer:
            case Answer.NONE:
                assert asked.error is not None
                raise asked.error
            case Answer.UNPROVEN:
                reason = f"it cannot prove that it serves {self._store.uri}: {asked.reason}"
                raise errors.BrokerUnavailable(address=leader.flight, reason=reason)
            case Answer.ORIGINAL:
                raise errors.RootIsCopy(
                    root=self._store.uri, address=leader.flight, served=asked.root
                )
            case Answer.OTHER_CLUSTER:
                raise errors.WrongCluster(
                    root=self._store.uri,
                    expected=read_cluster(self._store).cluster_id,
                    address=leader.flight,
                    found=asked.cluster_id,
                    served=asked.root,
                )

    def _cluster(self, address: str) -> flight_messages.ClusterInfo:
        served: flight_messages.ClusterInfo = ask(
            address,
            "cluster",
            flight_messages.Empty(),
            timeout_seconds=_ANSWER_SECONDS,
            credentials=self._credentials,
        )
        return served

    def _answers(self, leader: Leader) -> bool:
        try:
            self._check(leader)
        except _TRANSIENT:
            return False
        return True

    def check_kafka(self) -> None:
        """Raises `BadOption` if `kafka` was given and the broker serves Kafka elsewhere."""
        wanted = self._settings.kafka.listeners
        found = self._watch.poll() if self._asks_for_kafka else None
        if found is None or self._agent is not None:
            return
        broker = self._cluster(found.leader.flight).brokers[0]
        served = listeners.parse(broker.kafka_listeners or broker.kafka)
        if not all(any(map(each.is_served_by, served)) for each in wanted):
            who = describe(found.leader, now_us=self._clock.now_us())
            where = f"with Kafka at {listeners.text_of(served)}" if served else "without Kafka"
            reason = f"{who} already serves the root, {where}: stop it, or omit this argument"
            raise errors.BadOption(option="kafka", value=listeners.text_of(wanted), reason=reason)

    def _start(self) -> str:
        is_new = not self._watch.metadata.brokers
        is_detached = self._kind is BrokerKind.DETACHED
        address = self._start_process() if is_detached else self._start_here()
        if is_new:  # a misspelt path would otherwise silently become a root
            _log.info("sparklog: created a new, empty log in %s", self._store.uri)
        return address

    def _start_here(self) -> str:
        # Slow to import, and not needed if a broker is alive.
        import structlog

        from sparklog.broker.agent import Agent
        from sparklog.broker.logging import configure

        if not structlog.is_configured():
            configure(self._settings.log)  # structlog's default would print to standard output
        settings = self._settings
        while True:
            agent = Agent(
                settings, store=self._store, kind=BrokerKind.EMBEDDED, watch=self._watch, ask=ask
            )
            try:
                agent.start()
            except errors.BadOption as error:
                # A program that was a client continues, even if another process took its ports.
                elsewhere = _without_port(settings, error.option)
                if not self._has_resolved or elsewhere is None:
                    raise
                _log.warning("sparklog: continuing without that port: %s", error)
                settings = elsewhere
                continue
            self._agent = agent
            return agent.address

    def _start_process(self) -> str:
        # Errors about the root are raised here with their class; the process could only print them.
        open_cluster(self._store, clock=self._clock, create=True)
        settings = self._settings
        environment = {
            **{name: os.environ[name] for name in os.environ if not _is_of_store(name)},
            "SPARKLOG_LIVENESS_IDLE_EXIT_SECONDS": str(settings.liveness.idle_exit_seconds),
            "SPARKLOG_LOG_LEVEL": settings.log.level,
            "SPARKLOG_LOG_FILE": settings.log.file,
            **{STORAGE_PREFIX + key.upper(): value for key, value in settings.storage.items()},
        }
        command = [sys.executable, "-m", "sparklog", "broker", "--root", settings.root]
        command += ["--id", str(settings.id), "--flight", settings.flight.listen]
        command += ["--kafka", settings.kafka.listen]
        # A file, because the broker may still write once this process, and its pipe, are gone.
        with tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # it outlives this process
            )
            # Otherwise a broker that dies first would remain as a zombie, which counts as alive.
            threading.Thread(target=process.wait, name="sparklog-reaper", daemon=True).start()
            deadline = self._clock.monotonic() + _START_SECONDS
            while self._clock.monotonic() < deadline:
                found = self._watch.poll()
                lives = found is not None and found.state is not LeaderState.DEAD
                if found is not None and lives and self._answers(found.leader):
                    if found.leader.process.pid == process.pid:
                        _log.warning(
                            "sparklog: started a broker for %s, pid %d; its log: %s",
                            settings.root,
                            process.pid,
                            settings.log.file or "none",
                        )
                    return found.leader.flight
                # It may also have ended because another broker was faster, but is not ready yet.
                if process.poll() is not None and not lives:
                    stderr.seek(0)
                    message = stderr.read().decode(errors="replace").strip()
                    raise errors.BrokerUnavailable(
                        address=settings.root,
                        reason=f"a broker did not start: {message} (log: {settings.log.file})",
                    )
                self._clock.sleep(_LOOK_SECONDS)
            process.terminate()
        raise errors.TimedOut(what="starting a broker", timeout_seconds=_START_SECONDS)

    def forget(self) -> Agent | None:
        """Returns the embedded broker in a forked child, which must not stop it."""
        self._lock = threading.Lock()  # a thread of the parent may hold the old one
        agent, self._agent = self._agent, None
        return agent

    def close(self) -> None:
        """Stops the embedded broker, if there is one, after it has published everything."""
        _open.pop(self, None)
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop("its program has closed the log")


# ------------------------------------------------------------------------------ starting brokers


def _broker_settings(
    root: str, kind: BrokerKind, kafka: str | None, storage: Mapping[str, str]
) -> BrokerSettings:
    """Returns the settings of a broker that is started here, from the environment.

    Raises `UnknownOption` and `BadOption`, as for `sparklog broker`.
    """
    is_detached = kind is BrokerKind.DETACHED
    settings = load_settings(
        None,
        {name: value for name, value in os.environ.items() if not _is_of_store(name)},
        {"root": root, "id": EMBEDDED_BROKER_ID, "kafka.listen": kafka},
        defaults={
            "flight.listen": _ANY_PORT,
            "kafka.listen": "",
            "liveness.idle_exit_seconds": DETACHED_IDLE_SECONDS,
            # An embedded broker logs to the standard error of its program.
            "log.level": "info" if is_detached else "warning",
            "log.file": str(log_file(root)) if is_detached else "",
        },
    )
    liveness = settings.liveness
    if not is_detached:
        liveness = msgspec.structs.replace(liveness, idle_exit_seconds=0.0)
    return msgspec.structs.replace(settings, storage=dict(storage), liveness=liveness)


def _without_port(settings: BrokerSettings, option: str) -> BrokerSettings | None:
    """Returns settings without the taken port of `option`; None if the option is not a port."""
    if option == "kafka.listen" and settings.kafka.listen:
        return msgspec.structs.replace(settings, kafka=KafkaSettings(listen=""))
    if option == "flight.listen" and settings.flight.listen != _ANY_PORT:
        return msgspec.structs.replace(settings, flight=FlightSettings(listen=_ANY_PORT))
    return None


def log_file(root: str) -> Path:
    """Returns the log file of a detached broker of `root`, unless `SPARKLOG_LOG_FILE` is set.

    It is in `$XDG_STATE_HOME`, or else `~/.local/state`; or in the temporary folder if that is not
    writable, as in a container.
    """
    if "://" not in root:
        root = str(Path(root).resolve())
    digest = hashlib.sha256(root.encode()).hexdigest()[:8]
    tail = re.sub(r"[^A-Za-z0-9._-]+", "-", root).strip("-")[-_LOG_NAME_LENGTH:]
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    folder = Path(state, "sparklog")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        is_usable = False
    else:
        is_usable = folder.is_absolute() and os.access(folder, os.W_OK)
    if not is_usable:
        folder = Path(tempfile.gettempdir(), f"sparklog-{os.getuid()}")
    return folder / f"{tail}-{digest}.log"


# ------------------------------------------------------------------------------ addresses


def _check_is_no_loopback_of_others(leader: Leader) -> None:
    """Raises `BadOption` if the leader's address is a loopback address of another host.

    An unspecified address such as `0.0.0.0` counts as one: it leads a client to its own host.
    """
    here, there = socket.gethostname(), leader.process.host
    if there and there != here and is_loopback(leader.flight):
        how = (
            "start it with SPARKLOG_FLIGHT_LISTEN=0.0.0.0:8815,"
            f" SPARKLOG_FLIGHT_ADVERTISED={there}:8815 and, unless clients log in,"
            " SPARKLOG_SECURITY_ANONYMOUS=anywhere in its environment"
        )
        if leader.known.kind != BrokerKind.STANDING:
            how += ", or run `sparklog broker` with these, which takes over"
        reason = (
            f"the root's broker, {leader.broker} ({leader.known.kind}), runs on host {there!r} and"
            f" can be reached only from there, not from {here!r}: {how}"
        )
        raise errors.BadOption(option="flight.advertised", value=leader.flight, reason=reason)


def _is_of_store(variable: str) -> bool:
    return variable.startswith(STORAGE_PREFIX)
