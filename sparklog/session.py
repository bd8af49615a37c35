"""`connect`: a client of a live broker, or of one that is started for the purpose.

Three ways to reach a log:

- an address, `host:port`: that broker, and none is ever started;
- a root with a live broker: the one that the root's metadata names, once it has said that it
  serves this root's cluster: an address may mean another machine than the one that wrote it down.
  One that answers is not asked for a heartbeat; only one that does not is watched;
- a root without one: an *embedded* broker in this process, on a loopback address. It is registered
  like any other, so a second process on the same root joins it, and takes over when it ends. With
  `detached`, the broker is a process of its own instead, which leaves after some idle time.

Brokers that are started here have the settings of the environment (`SPARKLOG_…`). A standing broker
(`sparklog broker`) takes over from them: this process goes on as its client, and starts another
embedded broker when the standing one has ended.

An embedded broker is the process's that started it: a forked child has none, and ends none.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from sparklog import errors, limits, wire
from sparklog.client import arguments
from sparklog.client.connection import Connection
from sparklog.client.log import Log
from sparklog.clock import Clock, SystemClock
from sparklog.options import (
    BOOTSTRAP_VARIABLE,
    ROOT_VARIABLE,
    STORAGE_PREFIX,
    check_bootstrap,
    check_root,
    is_address,
    is_loopback,
    storage_options,
)
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings, load_settings
from sparklog.storage.liveness import Leader, State, Watch, describe
from sparklog.storage.meta import BrokerKind, MetaStore
from sparklog.storage.objects import Store, open_store

if TYPE_CHECKING:
    from sparklog.broker.agent import Agent

_START_SECONDS: Final = 30.0
_START_ATTEMPTS: Final = 3
_LOOK_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 10.0
_MAY_PASS: Final = (errors.BrokerUnavailable, errors.BrokerClosing, errors.BrokerFenced)
_ANY_PORT: Final = "127.0.0.1:0"

_LOG_NAME_LENGTH: Final = 80

_log = logging.getLogger(__name__)


def connect(
    target: str | os.PathLike[str] | None = None,
    *,
    detached: bool = False,
    kafka: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Log:
    """A `Log` on a root (a folder or `s3://`, `gs://`, `az://` URI) or a broker's `host:port`.

    Args:
        target: None: `SPARKLOG_BOOTSTRAP`, or else `SPARKLOG_ROOT`.
        detached: where a broker must be started, start it as its own process.
        kafka: where a broker that must be started listens for Kafka clients, `host:port`; None:
            as `SPARKLOG_KAFKA_LISTEN` says, or nowhere.
        storage_options: credentials and the like for an object store; they go before those of the
            environment, `SPARKLOG_STORAGE_<OPTION>`.

    Raises:
        errors.BadOption: no target, or one that is neither address nor root; or a broker that can
            be reached only from its own host, or that serves Kafka elsewhere than `kafka`; or a
            variable `SPARKLOG_…` that is no setting of a broker.
        errors.RootNotWritable, errors.FormatTooNew, errors.CorruptObject: what is wrong with the
            root, where a broker had to be started.
        errors.BrokerUnavailable, errors.WrongPort: nobody speaks Flight at the address.
        errors.WrongCluster: the address that the root's broker gave is another's here.
    """
    place, names_broker = _place(target)
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
    if names_broker:
        if kafka is not None:
            reason = "it is of a broker that is started here, and the target is one that runs"
            raise errors.BadOption(option="kafka", value=kafka, reason=reason)
        log = Log(Connection.to(place), root=place)
        log.connection.channel()
        _visiting.add(log)
        _close_at_exit()
        return log
    session = _RootSession(place, detached=detached, kafka=kafka, given=storage_options)
    session.resolve(patience_seconds=limits.ACTION_TIMEOUT_SECONDS)
    try:
        session.check_kafka()
    except errors.BadOption:
        session.close()
        raise
    log = Log(Connection(session.resolve), root=place, on_close=session.close)
    _open[session] = weakref.ref(log)
    _close_at_exit()
    return log


def visit(root: str, *, storage_options: Mapping[str, str] | None = None) -> Connection:
    """To the root's live broker, whichever that is when it is used; none is ever started.

    Using it raises `BrokerUnavailable` while no broker lives, and as `connect` does where one does.
    """
    session = _RootSession(root, given=storage_options, starts=False)
    return Connection(session.find)


def _place(target: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """The root or address that is meant, and whether it is an address. Raises `BadOption`."""
    if target is None:
        bootstrap = os.environ.get(BOOTSTRAP_VARIABLE)
        if bootstrap:
            return check_bootstrap(BOOTSTRAP_VARIABLE, bootstrap), True
        target = os.environ.get(ROOT_VARIABLE)
    if not target:
        raise errors.BadOption(
            option="target",
            value=target,
            reason=f"give a root or host:port, or set {ROOT_VARIABLE} or {BOOTSTRAP_VARIABLE}",
        )
    if not isinstance(target, str | os.PathLike):
        reason = "expected a folder, a URI or host:port, as a str or a path"
        raise errors.BadOption(option="target", value=repr(target), reason=reason)
    place = os.fspath(target)
    if is_address(place) and not Path(place).exists():
        return place, True
    hint = " Did you mean host:port, the address of one broker, which knows the others?"
    return check_root("target", place, hint), False


# ------------------------------------------------------------------------------ what is open

_open: dict[_RootSession, weakref.ref[Log]] = {}
"""What this process has not closed yet: a notebook rarely does."""

_visiting: weakref.WeakSet[Log] = weakref.WeakSet()
"""The same, on a broker's address."""

_of_the_parent: list[object] = []
"""What a forked child keeps of its parent's brokers: it must not stop them when it ends."""


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
            _of_the_parent.extend((agent, *_disarmed(agent._door)))
    _open.clear()


def _disarmed(door: object) -> list[object]:
    """Takes away what would shut the Flight server down at exit, and gives it back to be kept.

    In a child that would never end: it waits for threads that only the parent has.
    """
    armed = [each.__callback__ for each in weakref.getweakrefs(door)]
    return [each.detach() for each in armed if isinstance(each, weakref.finalize)]


os.register_at_fork(after_in_child=_after_fork_in_child)


# ------------------------------------------------------------------------------ one root


class _RootSession:
    """Finds the broker of a root, or starts one; `resolve` is asked again when a channel breaks."""

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
        self._watch = Watch(
            self._store,
            clock=self._clock,
            dead_after_seconds=self._settings.liveness.dead_after_seconds,
        )
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._has_resolved = False
        self._asks_for_kafka = kafka is not None

    def resolve(self, patience_seconds: float = 0.0) -> str:
        """The Flight address of the root's live broker.

        `patience_seconds`: how long a broker that lives and does not answer is asked again. It may
        have died just now, or still be recovering.
        """
        with self._lock:
            for _ in range(_START_ATTEMPTS):
                address = self._join(patience_seconds)
                try:
                    if address is None:
                        address = self._start()
                    self._has_resolved = True
                    return address
                except (errors.BrokerAlive, errors.BrokerFenced) as error:
                    faster = error  # or as fast, and goes on
            raise faster

    def find(self) -> str:
        """The same, where one lives. Raises `BrokerUnavailable`."""
        address = self._join(0.0)
        if address is None:
            raise errors.BrokerUnavailable(address=self._store.uri, reason="no broker lives there")
        return address

    def _join(self, patience_seconds: float) -> str | None:
        """The address of the live broker, once it has answered as this root's; None: none lives."""
        began = self._clock.monotonic()
        told = False
        while (found := self._watch.look()) is not None and found.state is not State.DEAD:
            try:
                self._check(found.leader)
                return found.leader.flight
            except (*_MAY_PASS, errors.BadOption, errors.WrongCluster) as error:
                # Another machine's address is no proof that its broker lives; its heartbeat is.
                helps = isinstance(error, _MAY_PASS)
                is_over = self._clock.monotonic() - began >= patience_seconds
                if (is_over and helps) or (found.state is State.ALIVE and not helps):
                    raise
            if found.state is State.UNKNOWN and not told:
                told = True
                _log.warning(
                    "sparklog: waiting up to %g s to see whether %s is alive",
                    self._watch.patience_seconds(found.leader),
                    describe(found.leader, now_us=self._clock.now_us()),
                )
            self._watch.pause()
        return None

    def _check(self, leader: Leader) -> None:
        """Whether what is heard at the address of `leader` is that broker of this root.

        Raises `errors.WrongCluster`, `BadOption`, and what asking it raises.
        """
        _check_is_no_loopback_of_others(leader)
        cluster_id = MetaStore(self._store, clock=self._clock).open(create=False).cluster_id
        served = self._cluster(leader.flight)
        if served.cluster_id != cluster_id:
            raise errors.WrongCluster(
                root=self._store.uri,
                expected=cluster_id,
                address=leader.flight,
                found=served.cluster_id,
                served=served.root,
            )
        for each in served.brokers:
            if (each.broker, each.epoch) != (leader.broker, leader.epoch):
                reason = f"epoch {each.epoch} of broker {each.broker} is there still, and is over"
                raise errors.BrokerUnavailable(address=leader.flight, reason=reason)

    @staticmethod
    def _cluster(address: str) -> wire.ClusterInfo:
        with Connection.to(address) as connection:
            served: wire.ClusterInfo = connection.channel().action(
                "cluster", wire.Empty(), timeout_seconds=_ANSWER_SECONDS
            )
        return served

    def _answers(self, leader: Leader) -> bool:
        try:
            self._check(leader)
        except _MAY_PASS:
            return False
        return True

    def check_kafka(self) -> None:
        """Raises `BadOption` where Kafka was asked for and the broker serves it elsewhere."""
        wanted = self._settings.kafka.listen
        found = self._watch.look() if self._asks_for_kafka else None
        if found is None or self._agent is not None:
            return
        served = self._cluster(found.leader.flight).brokers[0].kafka
        if served != wanted and not (served and wanted.endswith(":0")):
            who = describe(found.leader, now_us=self._clock.now_us())
            where = f"with Kafka at {served}" if served else "without Kafka"
            reason = f"{who} serves the root already, {where}: stop it, or connect without this"
            raise errors.BadOption(option="kafka", value=wanted, reason=reason)

    def _start(self) -> str:
        return self._start_process() if self._kind is BrokerKind.DETACHED else self._start_here()

    def _start_here(self) -> str:
        # Heavy, and not needed where a broker lives.
        import structlog

        from sparklog.broker.agent import Agent
        from sparklog.broker.logging import configure

        if not structlog.is_configured():
            configure(self._settings.log)  # by default it writes between the program's own output
        settings = self._settings
        while True:
            agent = Agent(settings, store=self._store, kind=BrokerKind.EMBEDDED, watch=self._watch)
            try:
                agent.start()
            except errors.BadOption as error:
                # A program that has run as a client goes on, though somebody took its ports.
                elsewhere = _without_port(settings, error.option)
                if not self._has_resolved or elsewhere is None:
                    raise
                _log.warning("sparklog: going on without that port: %s", error)
                settings = elsewhere
                continue
            self._agent = agent
            return agent.address

    def _start_process(self) -> str:
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
        # A file, because nobody reads a pipe once we are gone, and the broker may still complain.
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                start_new_session=True,  # outlives us: that is the point
            )
            # Or, if it dies before us, its id would still count as a process.
            threading.Thread(target=process.wait, name="sparklog-reaper", daemon=True).start()
            deadline = self._clock.monotonic() + _START_SECONDS
            while self._clock.monotonic() < deadline:
                found = self._watch.look()
                lives = found is not None and found.state is not State.DEAD
                if found is not None and lives and self._answers(found.leader):
                    if found.leader.process.pid == process.pid:
                        _log.warning(
                            "sparklog: started a broker for %s, pid %d; its log: %s",
                            settings.root,
                            process.pid,
                            settings.log.file or "nowhere",
                        )
                    return found.leader.flight
                # It may also have left because another was faster, who is not ready yet.
                if process.poll() is not None and not lives:
                    complaints.seek(0)
                    complaint = complaints.read().decode(errors="replace").strip()
                    raise errors.BrokerUnavailable(
                        address=settings.root,
                        reason=f"a broker did not start: {complaint} (log: {settings.log.file})",
                    )
                self._clock.sleep(_LOOK_SECONDS)
            process.terminate()
        raise errors.TimedOut(what="starting a broker", timeout_seconds=_START_SECONDS)

    def forget(self) -> Agent | None:
        """In a forked child: the embedded broker, if there is one, which is not ours to stop."""
        self._lock = threading.Lock()  # a thread that is not here may hold the old one
        agent, self._agent = self._agent, None
        return agent

    def close(self) -> None:
        """Stops the embedded broker, if there is one: everything is published first."""
        _open.pop(self, None)
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.stop("its program has closed the log")


# ------------------------------------------------------------------------------ what is started


def _broker_settings(
    root: str, kind: BrokerKind, kafka: str | None, storage: Mapping[str, str]
) -> BrokerSettings:
    """The settings of a broker that is started here: the environment's, or else modest ones.

    Raises `UnknownOption` and `BadOption`, as for `sparklog broker`.
    """
    is_detached = kind is BrokerKind.DETACHED
    settings = load_settings(
        None,
        {name: value for name, value in os.environ.items() if not _is_of_store(name)},
        {"root": root, "id": limits.EMBEDDED_BROKER_ID, "kafka.listen": kafka},
        defaults={
            "flight.listen": _ANY_PORT,
            "kafka.listen": "",
            "liveness.idle_exit_seconds": limits.DETACHED_IDLE_SECONDS,
            # What an embedded broker has to say comes between the program's own output.
            "log.level": "info" if is_detached else "warning",
            "log.file": str(log_file(root)) if is_detached else "",
        },
    )
    liveness = settings.liveness
    if not is_detached:
        liveness = msgspec.structs.replace(liveness, idle_exit_seconds=0.0)
    return msgspec.structs.replace(settings, storage=dict(storage), liveness=liveness)


def _without_port(settings: BrokerSettings, option: str) -> BrokerSettings | None:
    """The settings without the port of `option`, which is taken; None: that is not the trouble."""
    if option == "kafka.listen" and settings.kafka.listen:
        return msgspec.structs.replace(settings, kafka=KafkaSettings(listen=""))
    if option == "flight.listen" and settings.flight.listen != _ANY_PORT:
        return msgspec.structs.replace(settings, flight=FlightSettings(listen=_ANY_PORT))
    return None


def log_file(root: str) -> Path:
    """Where a detached broker of `root` logs unless `SPARKLOG_LOG_FILE` says otherwise.

    In the user's folder for such files, `$XDG_STATE_HOME` or else `~/.local/state`; in the one for
    temporary files where that cannot be written, as in a container.
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


# ------------------------------------------------------------------------------ what is reached


def _check_is_no_loopback_of_others(leader: Leader) -> None:
    """Raises `BadOption` where the address would be dialled on this host and is meant on another.

    An unspecified address, where a broker listens on all of its own, is dialled as loopback.
    """
    here, there = socket.gethostname(), leader.process.host
    if there and there != here and is_loopback(leader.flight):
        how = (
            "start it with SPARKLOG_FLIGHT_LISTEN=0.0.0.0:8815 and"
            f" SPARKLOG_FLIGHT_ADVERTISED={there}:8815 in its environment"
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
