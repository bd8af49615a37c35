"""Settings of several brokers on one machine, derived from the settings of one.

Each broker has its own id and ports, counted up from those in the settings. Bounds on memory,
connections and unpublished records apply to the machine, so each broker gets an equal share. A
share must suffice for one request: see `_share`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from sparklog import errors, limits, listeners
from sparklog.settings import ANY_HOST, NOT_ABOVE, BrokerSettings

_DIVIDED: Final = (
    "flight.max_streams",
    "hot_tail.bytes",
    "kafka.max_connections",
    "kafka.max_connections_per_address",
    "kafka.memory_bytes",
    "publisher.staged_bytes",
    "publisher.unpublished_bytes",
    "writer.queue_bytes",
)
_MAY_BE_ZERO: Final = ("hot_tail.bytes", "publisher.staged_bytes")
_HIGHEST_PORT: Final = 65_535


def settings_of_each(settings: BrokerSettings, processes: int) -> list[BrokerSettings]:
    """Returns the settings of each of `processes` members of a cluster on this machine.

    Raises `BadOption` for a bound that is too small to be divided, for ports that overlap or do not
    exist, and for settings that several processes cannot share.
    """
    _check(settings, processes)
    divided = {name: _share(settings, name, processes) for name in _DIVIDED}
    return [
        _with(
            settings,
            {
                **divided,
                "id": settings.id + number,
                "cluster.join": True,
                "log.file": _log_file(settings.log.file, settings.id + number),
                **_addresses(settings, number, processes),
            },
        )
        for number in range(processes)
    ]


def _with(settings: BrokerSettings, values: Mapping[str, Any]) -> BrokerSettings:
    """Returns the settings with these values, given by dotted name, replaced."""
    for name, value in values.items():
        table, _, key = name.rpartition(".")
        if table:
            inner = msgspec.structs.replace(getattr(settings, table), **{key: value})
            settings = msgspec.structs.replace(settings, **{table: inner})
        else:
            settings = msgspec.structs.replace(settings, **{key: value})
    return settings


def _check(settings: BrokerSettings, processes: int) -> None:
    if settings.root.startswith("memory:"):
        reason = "a root in memory belongs to one process; name a folder or a bucket"
        raise errors.BadOption(option="root", value=settings.root, reason=reason)
    if settings.liveness.idle_exit_seconds:
        raise errors.BadOption(
            option="liveness.idle_exit_seconds",
            value=settings.liveness.idle_exit_seconds,
            reason="a broker that ends when it is idle cannot be a member of a cluster; set it to"
            " 0, or do without --processes",
        )
    if settings.id + processes - 1 > limits.BROKER_ID_MAX:
        reason = f"{processes} processes count up from it, to {limits.BROKER_ID_MAX} at most"
        raise errors.BadOption(option="id", value=settings.id, reason=reason)
    for one, two in itertools.combinations(_listening(settings), 2):
        _check_apart(settings, one, two, processes)


def _check_apart(
    settings: BrokerSettings, one: tuple[str, str], two: tuple[str, str], processes: int
) -> None:
    """Raises `BadOption` if two listeners of different processes would use the same port.

    `one`, `two`: the option and the address of each.
    """
    (name, address), (other, other_address) = one, two
    hosts, ports = zip(*map(_split, (address, other_address)), strict=True)
    is_one_host = hosts[0] == hosts[1] or not ANY_HOST.isdisjoint(
        each.strip("[]") for each in hosts
    )
    if 0 not in ports and is_one_host and abs(ports[0] - ports[1]) < processes:
        raise errors.BadOption(
            option=other,
            value=attrgetter(other)(settings),
            reason=f"{processes} processes take as many ports from here on, and as many from"
            f" {name} = {attrgetter(name)(settings)} on; leave at least {processes} between them",
        )


def _listening(settings: BrokerSettings) -> Iterator[tuple[str, str]]:
    """Yields the option and the address of each listener."""
    for option, of in (("flight.listen", settings.flight), ("kafka.listen", settings.kafka)):
        for each in of.listeners:
            yield option, each.address
    if (metrics := settings.metrics.listener) is not None:
        yield "metrics.listen", metrics.address


def _split(address: str) -> tuple[str, int]:
    """Returns the host and port; port 0 for an empty address."""
    host, _, port = address.rpartition(":")
    return host, int(port or 0)


def _addresses(settings: BrokerSettings, number: int, processes: int) -> dict[str, str]:
    """Returns the addresses of one process, by option."""

    def moved(option: str, address: str) -> str:
        return _moved(option, address, number, processes)

    def moved_all(option: str, listen: str) -> str:
        return listeners.text_of(
            each._replace(address=moved(option, each.address)) for each in listeners.parse(listen)
        )

    found = {"metrics.listen": moved_all("metrics.listen", settings.metrics.listen)}
    for table, of in (("flight", settings.flight), ("kafka", settings.kafka)):
        listen, advertised = f"{table}.listen", f"{table}.advertised"
        found[listen] = moved_all(listen, of.listen)
        found[advertised] = listeners.text_of_addresses(
            (name, moved(advertised, each))
            for name, each in listeners.parse_addresses(of.advertised)
        )
    return found


def _moved(name: str, address: str, number: int, processes: int) -> str:
    """Returns an address with its port raised by `number`, unless the port is 0 or missing."""
    host, port = _split(address)
    if not port:
        return address
    if port + number > _HIGHEST_PORT:
        reason = f"{processes} processes count ports up from it, to {_HIGHEST_PORT} at most"
        raise errors.BadOption(option=name, value=address, reason=reason)
    return f"{host}:{port + number}"


def _share(settings: BrokerSettings, name: str, processes: int) -> int:
    """Returns one broker's share of a bound, never less than one request needs.

    A bound at its default is divided only as far as possible, so the processes together may exceed
    it. Any other value was chosen for this machine, so too small a share is rejected.
    """
    value, default = attrgetter(name)(settings), attrgetter(name)(BrokerSettings())
    share = value // processes
    for need, least in _needs(settings, name):
        if share < least:
            if value == default:
                share = least
                continue
            raise errors.BadOption(
                option=name,
                value=value,
                reason=f"each of {processes} processes gets {share}, and needs {need}; set it to at"
                f" least {least * processes}, or run fewer processes",
            )
    return share


def _needs(settings: BrokerSettings, name: str) -> Iterable[tuple[str, int]]:
    """Yields the minimums for a share, in words and as numbers."""
    if name not in _MAY_BE_ZERO:
        yield "1", 1
    for low, high in NOT_ABOVE:
        if high == name:
            least = attrgetter(low)(settings)
            yield f"{low} = {least}", least


def _log_file(file: str, broker: int) -> str:
    """Returns a log file for one broker alongside `file`; empty for standard error."""
    suffix = Path(file).suffix
    return f"{file.removesuffix(suffix)}-{broker}{suffix}" if file else ""
