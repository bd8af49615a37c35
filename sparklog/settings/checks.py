"""Checks of settings that depend on each other, or that have no bounds of a number."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from sparklog import errors, listeners
from sparklog.listeners import PROTOCOLS, SASL_PLAINTEXT, SASL_SSL, SSL, Listener
from sparklog.options import check_root, is_address, is_folder
from sparklog.security.oauth_bearer import OAUTHBEARER
from sparklog.security.scram import MECHANISMS, PLAIN
from sparklog.settings.values import (
    ANY_HOST,
    DEFAULT,
    NOT_ABOVE,
    BrokerSettings,
    ListenerSettings,
    OAuthSettings,
    RegistrySettings,
    TlsSettings,
)

_LISTENER_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_together(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a setting that no broker can have, or that contradicts another."""
    if not settings.root:
        raise errors.BadOption(
            option="root",
            value="",
            reason="name a folder, or an s3://, gs:// or az:// address (--root, SPARKLOG_ROOT, or"
            " the key root of the settings file)",
        )
    check_root("root", settings.root, " Addresses to listen on are kafka.listen and flight.listen.")
    _check_listeners(settings)
    _check_advertised("flight", settings.flight, lowest_port=0)
    _check_advertised("kafka", settings.kafka, lowest_port=1)
    for each in settings.kafka.listeners:
        if each.host in ANY_HOST and not settings.kafka.advertised_of(each.name):
            raise errors.BadOption(
                option="kafka.listen",
                value=settings.kafka.listen,
                reason="clients cannot connect to this host; set kafka.advertised to one that they"
                " can",
            )
    _check_anonymous(settings)

    for low, high in NOT_ABOVE:
        value, bound = attrgetter(low, high)(settings)
        if value > bound:
            reason = f"must not be above {high} = {bound}"
            raise errors.BadOption(option=low, value=value, reason=reason)

    for name in (
        "liveness.heartbeat_seconds",
        "liveness.dead_after_seconds",
        "publisher.interval_seconds",
    ):
        value = attrgetter(name)(settings)
        if value <= 0 and value != DEFAULT:
            raise errors.BadOption(option=name, value=value, reason="expected more than 0, or -1")
    liveness = settings.liveness.on(local=is_folder(settings.root))
    if liveness.dead_after_seconds < 2 * liveness.heartbeat_seconds:
        raise errors.BadOption(
            option="liveness.dead_after_seconds",
            value=liveness.dead_after_seconds,
            reason="must be at least twice liveness.heartbeat_seconds"
            f" = {liveness.heartbeat_seconds}, or one late heartbeat counts as a death",
        )


def _check_listeners(settings: BrokerSettings) -> None:
    _check_protocols("flight", settings.flight, settings.tls)
    _check_protocols("kafka", settings.kafka, settings.tls)
    _check_sasl(settings)
    _check_oauth(settings)
    _check_registry(settings.registry)
    for listener in settings.flight.listeners:
        if listener.protocol == SASL_PLAINTEXT and not listener.is_loopback:
            raise errors.BadOption(
                option="flight.listen",
                value=settings.flight.listen,
                reason=f"passwords and tokens could be read on the way: use {SASL_SSL}://, or a"
                " loopback address",
            )
    for key, value in msgspec.structs.asdict(settings.tls).items():
        # Without a Kafka listener, the broker may be one that a program has started for itself.
        is_unused = settings.kafka.listen and not settings.has_tls
        if is_unused and value != getattr(TlsSettings(), key):
            reason = (
                f"it has no effect: kafka.listen, flight.listen or metrics.listen needs {SSL}:// or"
                f" {SASL_SSL}:// before an address"
            )
            raise errors.BadOption(option=f"tls.{key}", value=value, reason=reason)
    listening = [("flight.listen", each.address) for each in settings.flight.listeners]
    if not listening:
        raise errors.BadOption(option="flight.listen", value="", reason="expected host:port")
    listening += [("kafka.listen", each.address) for each in settings.kafka.listeners]
    if settings.metrics.listener is not None:
        _check_metrics(settings)
        listening.append(("metrics.listen", settings.metrics.listener.address))
    found: dict[str, str] = {}
    for option, address in listening:
        _check_address(option, address, lowest_port=0)
        if address in found and not address.endswith(":0"):
            reason = f"{found[address]} has the same address; give each listener its own port"
            raise errors.BadOption(option=option, value=address, reason=reason)
        found[address] = option


def _check_anonymous(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a listener that strangers can reach without proving who they are."""
    if settings.security.anonymous == "anywhere":
        return
    has_certificates = settings.tls.client_auth == "required"
    for table, of in (("flight", settings.flight), ("kafka", settings.kafka)):
        for each in of.listeners:
            if each.is_loopback or each.has_sasl or (each.has_tls and has_certificates):
                continue
            raise errors.BadOption(
                option=f"{table}.listen",
                value=of.listen,
                reason=f"every program that can reach {each.address} could read and write the log."
                f" Have clients log in: write {SASL_SSL}:// before the address (`sparklog security"
                " init` prepares users and certificates). Or, in a network where that is intended,"
                ' set security.anonymous = "anywhere" (SPARKLOG_SECURITY_ANONYMOUS)',
            )


def _check_protocols(table: str, settings: ListenerSettings, tls: TlsSettings) -> None:
    """Raises `BadOption` for names, protocols and TLS that do not fit together."""

    def bad(reason: str) -> errors.BadOption:
        return errors.BadOption(option=f"{table}.listen", value=settings.listen, reason=reason)

    names: set[str] = set()
    for name, protocol, address in settings.listeners:
        if not address:
            raise bad("expected host:port; there is nothing after a comma, or before one")
        if protocol not in PROTOCOLS:
            raise bad(f"expected host:port or one of {', '.join(PROTOCOLS)} before ://")
        if _LISTENER_NAME.fullmatch(name) is None:
            raise bad(f"the name {name!r} has other characters than letters, digits, _ and -")
        if name in names:
            raise bad(f"two listeners are called {name}: write NAME={protocol}://host:port")
        names.add(name)
    if settings.has_tls and not (tls.certificate and tls.key):
        raise bad("a listener with TLS needs tls.certificate and tls.key, the paths of PEM files")


def _check_metrics(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a port for metrics with several addresses, or without protection."""
    listen, listener = settings.metrics.listen, settings.metrics.listener
    assert listener is not None
    reason = ""
    if "," in listen or listener.name != listener.protocol:
        reason = "expected one address without a name: host:port, or PROTOCOL://host:port"
    elif listener.protocol not in PROTOCOLS:
        reason = f"expected host:port or one of {', '.join(PROTOCOLS)} before ://"
    elif listener.has_tls and not (settings.tls.certificate and settings.tls.key):
        reason = "TLS needs tls.certificate and tls.key, the paths of PEM files"
    elif listener.protocol == SASL_PLAINTEXT and not listener.is_loopback:
        reason = f"passwords could be read on the way: use {SASL_SSL}://, or a loopback address"
    elif listener.has_sasl and PLAIN not in settings.mechanisms:
        reason = f"its login sends passwords, and kafka.sasl_mechanisms does not have {PLAIN}"
    if reason:
        raise errors.BadOption(option="metrics.listen", value=listen, reason=reason)


def _check_sasl(settings: BrokerSettings) -> None:
    """Raises `BadOption` for unknown mechanisms, and for a listener that would have none."""

    def bad(reason: str) -> errors.BadOption:
        given = settings.kafka.sasl_mechanisms
        return errors.BadOption(option="kafka.sasl_mechanisms", value=given, reason=reason)

    known = (*MECHANISMS, OAUTHBEARER)
    for each in settings.kafka.sasl_mechanisms.split(","):
        if each.strip() not in known:
            raise bad(f"expected some of {', '.join(known)}, separated by commas")
    for listener in settings.kafka.listeners:
        if not listener.has_sasl or settings.mechanisms_of(listener):
            continue
        if not settings.mechanisms:
            raise bad(f"{OAUTHBEARER} needs the table [oauth]")
        raise bad(
            f"{' and '.join(settings.mechanisms)} can be read on the way: the listener {listener}"
            f" offers it only with {SASL_SSL}://, or on a loopback address"
        )


def _check_oauth(settings: BrokerSettings) -> None:
    """Raises `BadOption` for a table [oauth] that is not complete, or has no effect."""
    given = msgspec.structs.asdict(settings.oauth)

    def bad(key: str, reason: str) -> errors.BadOption:
        return errors.BadOption(option=f"oauth.{key}", value=given[key], reason=reason)

    if not settings.oauth.is_configured:
        for key, value in given.items():
            if value != getattr(OAuthSettings(), key):
                raise bad(key, "it has no effect without oauth.jwks")
        return
    for key in ("issuer", "audience", "scope_claim", "sub_claim"):
        if not given[key].strip():
            raise bad(key, "it is required with oauth.jwks")
    url = urlsplit(settings.oauth.jwks)
    if url.scheme in ("https", "http") and not _is_web_address(url):
        raise bad("jwks", "expected https://host/path, without a user")
    if url.scheme == "http" and not Listener("", "", f"{url.hostname}:0").is_loopback:
        raise bad("jwks", "keys that others could replace on the way prove nothing: use https://")
    if url.scheme not in ("https", "http") and "://" in settings.oauth.jwks:
        raise bad("jwks", "expected https://… or the path of a file")
    if settings.oauth.ca and url.scheme != "https":
        raise bad("ca", "it has no effect: oauth.jwks does not begin with https://")
    # Without a Kafka listener, the broker may be one that a program has started for itself.
    if settings.kafka.listen and not (settings.kafka.has_sasl or settings.flight.has_sasl):
        raise bad(
            "jwks",
            "it has no effect: kafka.listen or flight.listen needs"
            f" {SASL_SSL}:// before an address",
        )


def _check_registry(settings: RegistrySettings) -> None:
    """Raises `BadOption` for a table [registry] that is not complete, or has no effect."""
    given = msgspec.structs.asdict(settings)

    def bad(key: str, reason: str) -> errors.BadOption:
        return errors.BadOption(option=f"registry.{key}", value=given[key], reason=reason)

    url = urlsplit(settings.url)
    for key in ("user_file", "token_file", "ca", "certificate", "key"):
        if given[key] and not settings.is_configured:
            raise bad(key, "it has no effect without registry.url")
    if not settings.is_configured:
        return
    if url.scheme not in ("https", "http") or not _is_web_address(url) or url.query or url.fragment:
        raise bad("url", "expected https://host:port, without a user: it belongs to user_file")
    if settings.user_file and settings.token_file:
        raise bad("token_file", "registry.user_file is given too: use one of them")
    is_readable = url.scheme == "http" and not Listener("", "", f"{url.hostname}:0").is_loopback
    for key in ("user_file", "token_file"):
        if given[key] and is_readable:
            raise bad(key, "its content could be read on the way: use https:// in registry.url")
    for key in ("ca", "certificate", "key"):
        if given[key] and url.scheme != "https":
            raise bad(key, "it has no effect: registry.url does not begin with https://")
    if settings.key and not settings.certificate:
        raise bad("key", "it has no effect without registry.certificate")


def _is_web_address(url: SplitResult) -> bool:
    try:
        return bool(url.hostname) and url.port != 0 and "@" not in url.netloc
    except ValueError:  # of the port
        return False


def _check_advertised(table: str, settings: ListenerSettings, *, lowest_port: int) -> None:
    """Raises `BadOption` unless the advertised addresses are those of listeners."""
    option = f"{table}.advertised"
    names = [each.name for each in settings.listeners]
    given = listeners.parse_addresses(settings.advertised)
    for name, address in given:
        _check_address(option, address, lowest_port=lowest_port)
        reason = ""
        if len(dict(given)) < len(given):
            reason = "it has several addresses for a listener: clients get one"
        elif not name and len(names) > 1:
            reason = f"there are several listeners: write NAME=host:port, of {', '.join(names)}"
        elif name and name not in names:
            reason = f"no listener is called {name}; there is {', '.join(names) or 'none'}"
        if reason:
            raise errors.BadOption(option=option, value=settings.advertised, reason=reason)


def _check_address(option: str, address: str, *, lowest_port: int) -> None:
    if not is_address(address, lowest_port=lowest_port):
        reason = f"expected host:port, the port from {lowest_port} to 65535"
        raise errors.BadOption(option=option, value=address, reason=reason)
