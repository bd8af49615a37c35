"""The listeners of a broker: their ports, from binding to closing, and their servers.

A port is bound before the root is taken over, so that a broker that cannot serve changes nothing.
It listens once the broker has recovered.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from sparklog import errors
from sparklog.broker import ports
from sparklog.broker.acceptors import Acceptor
from sparklog.broker.access_control import AccessControl
from sparklog.broker.audit import ListenerAudit
from sparklog.broker.broker import Broker
from sparklog.broker.counts import Budget
from sparklog.broker.flight.gate import Gate
from sparklog.broker.flight.hooks import RequestHooks
from sparklog.broker.flight.listener import FlightListener
from sparklog.broker.flight.streams import StreamBounds
from sparklog.broker.groups.coordinator import Coordinator
from sparklog.broker.log.takeover import Leadership
from sparklog.broker.loops import Loops
from sparklog.formats.flight_messages import BrokerInfo
from sparklog.listeners import Listener, parse, text_of
from sparklog.options import may_others_use
from sparklog.settings import BrokerSettings, FlightSettings, KafkaSettings
from sparklog.storage.metadata.liveness import Leader
from sparklog.storage.metadata.model import Membership
from sparklog.storage.metadata.processes import this_process
from sparklog.version import VERSION

if TYPE_CHECKING:
    from sparklog.broker.kafka.listener import KafkaListener
    from sparklog.broker.metrics.server import MetricsServer
    from sparklog.broker.tls.contexts import ServerTls

KAFKA_PACKAGES: Final = ("cramjam", "kio", "numba", "uvloop")
"""Packages from the extra `broker` that the Kafka listener needs."""
TLS_PACKAGES: Final = ("cryptography",)
"""Packages from the extra `broker` that listeners with TLS need."""
OAUTH_PACKAGES: Final = ("joserfc",)
"""Packages from the extra `broker` that logins with OAuth tokens need."""
METRICS_PACKAGES: Final = ("prometheus_client", "starlette", "uvicorn")
"""Packages from the extra `broker` that the metrics port needs."""

_log = structlog.get_logger("sparklog.broker")
_SLOW_SECONDS = 3.0
_CERTIFICATE_SECONDS = 1.0  # between two checks whether its files have changed
_LEAVING_SECONDS = 0.7
"""The time a broker needs to close its ports after marking its heartbeat as stopped."""


class Listeners:
    """The ports for Flight, Kafka and metrics, and their servers."""

    def __init__(self, settings: BrokerSettings, *, hooks: RequestHooks | None = None) -> None:
        """Raises `BadOption` if the files of `settings.tls` are needed and not valid, and
        `NotInstalled` without the package that reads them.

        `hooks`: called for each request from a Flight client; for tests.
        """
        self._settings = settings
        self._hooks = hooks
        self._flight_ports = {
            each: ports.BoundPort("flight.listen", each.address)
            for each in settings.flight.listeners
        }
        self._kafka_ports = {
            each: ports.BoundPort("kafka.listen", each.address) for each in settings.kafka.listeners
        }
        self.tls = _server_tls(settings) if settings.has_tls else None
        """TLS of the listeners; None if all are plaintext."""
        listener = settings.metrics.listener
        self._metrics_port = listener and ports.BoundPort("metrics.listen", listener.address)
        self.flight: FlightListener | None = None
        self.kafka: KafkaListener | None = None
        self._metrics: MetricsServer | None = None

    # -------------------------------------------------------------------------- addresses

    @property
    def flight_address(self) -> str:
        """The address of the first Flight listener, for clients and brokers; its port is bound."""
        return self.flight_advertised[0].client_address

    @property
    def flight_advertised(self) -> list[Listener]:
        """The Flight listeners with the addresses for clients, once their ports are bound."""
        return _all_advertised(self._settings.flight, self._flight_ports)

    @property
    def flight_listeners_text(self) -> str:
        """All Flight listeners as `sparklog.listeners` writes them; empty if there is one."""
        found = self.flight_advertised
        return text_of(found) if len(found) > 1 else ""

    @property
    def kafka_advertised(self) -> list[Listener]:
        """The Kafka listeners with the addresses for clients, once their ports are bound."""
        return _all_advertised(self._settings.kafka, self._kafka_ports)

    @property
    def kafka_open(self) -> list[Listener]:
        """Returns `kafka_advertised` while the listeners are open, and nothing before."""
        return self.kafka_advertised if self.kafka is not None else []

    @property
    def kafka_address(self) -> str:
        """The address of the first listener for Kafka clients; empty while none is open."""
        found = self.kafka_open
        return found[0].address if found else ""

    def info(self, leadership: Leadership, *, kind: str, started_us: int, wal: str) -> BrokerInfo:
        """Returns the broker as clients see it. `wal`: the storage of its write-ahead log."""
        process = this_process()
        return BrokerInfo(
            broker=leadership.broker,
            epoch=leadership.epoch,
            address=self.flight_address,
            flight_listeners=text_of(self.flight_advertised),
            kafka=self.kafka_address,
            kafka_listeners=text_of(self.kafka_open),
            metrics=self.metrics_address,
            kind=kind,
            version=VERSION,
            host=process.host,
            pid=process.pid,
            started_us=started_us,
            log=self._settings.log.file,
            wal=wal,
        )

    def membership(self) -> Membership:
        """Returns the addresses for clients as a member of a cluster registers them."""
        advertised = self.kafka_advertised
        return Membership(
            kafka=advertised[0].address if advertised else "",
            listeners={each.name: each.address for each in advertised},
            flight=(
                {each.name: each.client_address for each in self.flight_advertised}
                if self.flight_listeners_text
                else {}
            ),
            rack=self._settings.cluster.rack,
        )

    @property
    def metrics_address(self) -> str:
        """The address of the HTTP port for metrics, after its protocol; empty without one."""
        listener, port = self._settings.metrics.listener, self._metrics_port
        return str(listener._replace(address=port.address)) if listener and port else ""

    @property
    def has_metrics(self) -> bool:
        return self._metrics_port is not None

    # -------------------------------------------------------------------------- opening

    def bind(self, ports_of_leader: Callable[[], Collection[int]]) -> None:
        """Binds the ports. Raises `BadOption` for one that another program uses.

        A port that the root's live leader uses is bound later, once that broker has been replaced
        and has closed it.
        """
        for each in self._ports():
            if not each.try_bind() and each.port not in ports_of_leader():
                each.bind(patience_seconds=_LEAVING_SECONDS)
        for each, other in itertools.combinations(self._ports(), 2):
            if other.overlaps(each):
                reason = f"{each.option} has the same port; each listener needs one of its own"
                raise errors.BadOption(
                    option=other.option, value=other.listen_address, reason=reason
                )

    def bind_all(self, *, patience_seconds: float) -> None:
        """Binds the ports of a replaced broker, which needs a moment to close them."""
        for each in self._ports():
            each.bind(patience_seconds=patience_seconds)

    def open_kafka(
        self,
        broker: Broker,
        groups: Coordinator,
        access: AccessControl,
        *,
        patience_seconds: float,
    ) -> None:
        """Opens the Kafka listener, if there is one; it serves once it is started."""
        if not self._kafka_ports:
            return
        from sparklog.broker.kafka.listener import KafkaListener

        acceptors = self._acceptors(self._kafka_ports, self.kafka_advertised, patience_seconds)
        self.kafka = KafkaListener(
            broker,
            groups,
            acceptors,
            settings=self._settings.kafka,
            authentication=access.authentication,
            authorization=access.authorization,
            security_admin=access.security_admin,
            quotas=access.quotas,
            login_delays=access.login_delays,
        )

    def open_flight(
        self,
        broker: Broker,
        groups: Coordinator,
        gate: Gate,
        access: AccessControl,
        *,
        patience_seconds: float,
    ) -> FlightListener:
        """Opens the Flight listener, which serves immediately. `gate`: admits calls."""
        self.flight = FlightListener(
            broker,
            groups,
            self._acceptors(self._flight_ports, self.flight_advertised, patience_seconds),
            bounds=StreamBounds(streams=self._settings.flight.max_streams),
            max_batch_bytes=self._settings.writer.max_batch_bytes,
            gate=gate,
            logins=access.logins(gate) if self._settings.flight.has_sasl else None,
            quotas=access.quotas,
            hooks=self._hooks,
        )
        return self.flight

    def _acceptors(
        self,
        bound: Mapping[Listener, ports.BoundPort],
        advertised: Iterable[Listener],
        patience_seconds: float,
    ) -> list[Acceptor]:
        """Returns the listening sockets; those for Flight need no mechanisms."""
        return [
            Acceptor(
                listener=clients,
                listening=port.listen(patience_seconds=patience_seconds),
                tls=self.tls if each.has_tls else None,
                # Of the address that it listens on: the advertised one may be a tunnel's.
                mechanisms=self._settings.mechanisms_of(each) if each.has_sasl else (),
            )
            for (each, port), clients in zip(bound.items(), advertised, strict=True)
        ]

    def open_metrics(
        self,
        *,
        collect: Callable[[], Sequence[bytes] | None],
        is_healthy: Callable[[], bool],
        is_ready: Callable[[], bool],
        access: AccessControl,
        patience_seconds: float | None,
    ) -> None:
        """Opens the HTTP port for metrics, if there is one and it is not yet open.

        `patience_seconds`: None: only if the port is already bound.
        """
        port = self._metrics_port
        if port is None or self._metrics is not None:
            return
        if patience_seconds is None and not port.is_bound:
            return
        from sparklog.broker.metrics.logins import MetricsLogins
        from sparklog.broker.metrics.server import MetricsServer

        listener, tls, logins = self._settings.metrics.listener, self.tls, None
        if listener is not None and listener.has_sasl:
            assert access.authentication is not None
            logins = MetricsLogins(
                access.authentication,
                access.authorization,
                audit=ListenerAudit(access.audit, f"metrics.{listener.protocol}"),
                delays=access.login_delays,
            )

        def context() -> ssl.SSLContext:
            assert tls is not None
            assert tls.http_context is not None
            return tls.http_context

        self._metrics = MetricsServer(
            port.listen(patience_seconds=patience_seconds or 0.0),
            collect=collect,
            is_healthy=is_healthy,
            is_ready=is_ready,
            context=context if self._settings.metrics.has_tls else None,
            logins=logins,
        )
        self._metrics.start()

    def watch_certificate(self, loops: Loops) -> None:
        """Starts a thread that loads changed files of the certificate, if a listener uses TLS."""
        if (tls := self.tls) is not None:
            repeat = functools.partial(
                loops.repeat, "loading the certificate", _CERTIFICATE_SECONDS, tls.refresh
            )
            loops.start("certificate", repeat)

    # -------------------------------------------------------------------------- clients

    def has_clients(self) -> bool:
        """Returns whether clients are connected whose requests have to be redirected.

        Each request is answered with the new leader of its partition. If the connection were closed
        instead, a client would ask any other member for the leaders, and trust one that has not
        seen the change yet.
        """
        return (self.kafka is not None and self.kafka.connection_count > 0) or (
            self.flight is not None and self.flight.open_calls > 0
        )

    def budgets(self) -> list[Budget]:
        """Returns the memory budgets of the open listeners."""
        of_kafka = self.kafka.memory.budgets() if self.kafka is not None else ()
        of_flight = self.flight.budgets() if self.flight is not None else ()
        return [*of_kafka, *of_flight]

    def cut_connections(self) -> None:
        """Cuts all client connections; the clients may reconnect; for tests."""
        for listener in (self.kafka, self.flight):
            if listener is not None:
                listener.cut_connections()

    def close(self) -> None:
        """Closes servers and ports."""
        for listener in (self.kafka, self.flight, self._metrics):
            if listener is not None:
                listener.close()
        for each in self._ports():
            each.close()

    def _ports(self) -> list[ports.BoundPort]:
        found = (*self._flight_ports.values(), *self._kafka_ports.values(), self._metrics_port)
        return [each for each in found if each is not None]


def _server_tls(settings: BrokerSettings) -> ServerTls:
    """Returns the TLS of the listeners. Raises what `Listeners` raises."""
    check_installed(settings)
    from sparklog.broker.tls.contexts import ServerTls, TlsFiles
    from sparklog.security.certificates import covers

    tls = settings.tls
    found = ServerTls(
        TlsFiles(
            certificate=tls.certificate,
            key=tls.key,
            key_password_file=tls.key_password_file,
            ca=tls.ca,
            client_auth=tls.client_auth,
            min_version=tls.min_version,
            principal=tls.principal,
        ),
        with_http=settings.metrics.has_tls,
    )
    for path in (tls.key, tls.key_password_file):
        if path and may_others_use(Path(path)):
            _log.warning(
                "other users of this machine can read or change a file with a secret: chmod o=",
                file=path,
            )
    for of in (settings.flight, settings.kafka):
        for each in of.listeners:
            advertised = each._replace(address=of.advertised_of(each.name) or each.address)
            if each.has_tls and not covers(found.certificate, advertised.host):
                _log.warning(
                    "clients that check host names refuse the certificate: it lacks the host that"
                    " they connect to; add it to the certificate, or advertise a host that it has",
                    host=advertised.host,
                    listener=str(each),
                    certificate=tls.certificate,
                )
    return found


def _all_advertised(
    settings: FlightSettings | KafkaSettings, bound: Mapping[Listener, ports.BoundPort]
) -> list[Listener]:
    """Returns the listeners with the addresses for clients."""
    return [
        each._replace(address=_advertised(settings.advertised_of(each.name), port.address))
        for each, port in bound.items()
    ]


def _advertised(advertised: str, listen: str) -> str:
    """Returns the address for clients; port 0 of `advertised` means the port that was bound."""
    host, _, port = advertised.rpartition(":")
    return f"{host}:{ports.port_of(listen)}" if port == "0" else advertised or listen


def ports_of(leaders: Iterable[Leader]) -> set[int]:
    """Returns the ports at which brokers listen, as far as their heartbeats name them."""
    addresses: list[str] = []
    for each in leaders:
        addresses.append(each.flight)
        if (heartbeat := each.heartbeat) is not None:
            kafka = parse(heartbeat.kafka_listeners or heartbeat.kafka)
            others = *kafka, *parse(heartbeat.flight_listeners)
            metrics = parse(heartbeat.metrics)
            addresses += [one.address for one in (*others, *metrics)]
    return {ports.port_of(address) for address in addresses if address}


def check_installed(settings: BrokerSettings) -> None:
    """Raises `NotInstalled` if a listener is configured and its packages are missing."""
    kafka_packages = (*KAFKA_PACKAGES, *(TLS_PACKAGES if settings.kafka.has_tls else ()))
    flight_packages = TLS_PACKAGES if settings.flight.has_tls else ()
    metrics_packages = (*METRICS_PACKAGES, *(TLS_PACKAGES if settings.metrics.has_tls else ()))
    for what, listen, packages, without in (
        ("TLS for Flight", settings.flight.listen, flight_packages, "--flight 127.0.0.1:8815"),
        ("the verification of tokens", settings.oauth.jwks, OAUTH_PACKAGES, 'oauth.jwks = ""'),
        ("the Kafka listener", settings.kafka.listen, kafka_packages, "--kafka ''"),
        ("the port for metrics", settings.metrics.listen, metrics_packages, 'metrics.listen = ""'),
    ):
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if listen and missing:
            raise errors.NotInstalled(
                what=f"{what} at {listen}",
                missing=", ".join(missing),
                hint=f"pip install 'sparklog[broker]', or start the broker without it: {without}",
            )


@functools.cache
def compile_loops() -> None:
    """Loads or compiles the loops over Kafka's records, before the first client needs them."""
    began = time.monotonic()
    slow = threading.Timer(
        _SLOW_SECONDS,
        lambda: _log.info(
            "loading the loops over Kafka's records; compiling them takes some seconds, once per"
            " machine"
        ),
    )
    slow.daemon = True
    slow.start()
    try:
        from sparklog.formats import kernel_cache, record_batch, record_kernels

        unsaved = record_batch.compile_loops()
    finally:
        slow.cancel()
    seconds = round(time.monotonic() - began, 1)
    folder = record_kernels.CACHE
    if folder is None or unsaved is not None:
        _log.warning(
            "the loops over Kafka's records cannot be kept, and are compiled at each start: set"
            " NUMBA_CACHE_DIR to a folder that this user can write",
            folder=str(folder),
            reason=str(unsaved) if unsaved is not None else "no folder can be written",
            seconds=seconds,
        )
    elif kernel_cache.is_temporary(folder):
        _log.warning(
            "the loops over Kafka's records are kept in a temporary folder, because neither the"
            " installation nor the user's cache can be written: set NUMBA_CACHE_DIR to another",
            folder=str(folder),
            seconds=seconds,
        )
    elif seconds >= _SLOW_SECONDS:
        _log.info("loaded the loops over Kafka's records", folder=str(folder), seconds=seconds)
