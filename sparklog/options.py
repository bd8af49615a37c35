"""Options that name a log and its object store: keywords, addresses, the environment.

All environment variables that name a log are read here. Options of Spark's readers and writers are
strings with case-insensitive names. The error for an unknown option suggests the nearest known one.
`storage.*` is passed to the object store as it is. `storage.secret.*` is equivalent, under a name
that Spark redacts: Spark prints a query's options in plans and event logs, and by default hides
those whose names contain secret, password, token or accesskey, which misses most stores' keys. The
root is an option too: `root`, the path given to `load` or `save`, or the variable `SPARKLOG_ROOT`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from sparklog import errors
from sparklog.listeners import TLS_SCHEME, host_of

ROOT_VARIABLE: Final = "SPARKLOG_ROOT"
SPARK_ROOT_VARIABLE: Final = "SPARKLOG_SPARK_ROOT"
"""URI of that root in the notation of Spark's own readers, such as s3a://bucket/log."""

BOOTSTRAP_VARIABLE: Final = "SPARKLOG_BOOTSTRAP"
STORAGE_PREFIX: Final = "SPARKLOG_STORAGE_"
"""Prefix of variables for object store options, such as `SPARKLOG_STORAGE_AWS_REGION`."""

_STORAGE: Final = "storage."
_SECRET: Final = "secret."
_PRINTED: Final = re.compile(r"(?!.*secret).*(access|account|customer|encryption|master|sas)_key")
"""Secret options of object stores that Spark prints by default."""

_KAFKA: Final = "kafka."
_INSTEAD: Final = {
    "kafka.bootstrap.servers": " (set root, the folder or bucket of the log)",
    "kafka.group.id": " (set commitToGroup, the group in which a source shows its lag)",
}
_ADDRESS: Final = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:,\[\]/]+):(\d{1,5})")
_WHOLE: Final = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_DURATION: Final = re.compile(r"(\d{1,12})\s*(us|ms|s|m|min|h|d)?", re.ASCII)
_UNIT_SECONDS: Final = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
}
_SIZE: Final = re.compile(r"(\d{1,15})\s*(?:([kmgt])i?)?b?", re.ASCII)
_UNIT_BYTES: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SCHEMES_WITHOUT_OPTIONS: Final = ("file", "memory")

# Variables that Kubernetes sets in every container for a service named sparklog or sparklog-flight.
_SERVICE_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")


# ------------------------------------------------------------------------------ addresses


def is_address(text: str, *, lowest_port: int = 1) -> bool:
    """Returns True if `text` is one `host:port`, with an IPv6 host in brackets."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and lowest_port <= int(found[1]) <= 65_535


def is_loopback(address: str) -> bool:
    """Returns True for loopback and unspecified addresses such as `0.0.0.0`."""
    host = host_of(address)
    try:
        numbers = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return numbers.is_loopback or numbers.is_unspecified


def is_loopback_ip(address: str) -> bool:
    """Returns True for `host:port`, or `tls://host:port`, with a loopback IP address.

    A name may have several addresses, at which different programs may listen.
    """
    try:
        return ipaddress.ip_address(host_of(address)).is_loopback
    except ValueError:
        return False


def is_private(address: str) -> bool:
    """Returns True if a connection to a Flight address cannot be read on the way."""
    return address.startswith(TLS_SCHEME) or is_loopback_ip(address)


def is_bootstrap(text: str) -> bool:
    """Returns True if `text` is one address of a broker, or several separated by commas.

    An address is `host:port`, or `tls://host:port`.
    """
    return all(_is_of_broker(each.strip()) for each in text.split(","))


def _is_of_broker(text: str) -> bool:
    return is_address(text.removeprefix(TLS_SCHEME))


def check_bootstrap(option: str, value: str | Iterable[object]) -> str:
    """Returns the addresses of one or more brokers, separated by commas only.

    Raises `BadOption`, which names `option`, if a part is not an address.
    """
    parts = value.split(",") if isinstance(value, str) else list(value)
    addresses = [each.strip() for each in parts if isinstance(each, str)]
    if not parts or len(addresses) < len(parts) or not all(map(_is_of_broker, addresses)):
        reason = "expected host:port or tls://host:port, or several of these separated by commas"
        shown = value if isinstance(value, str) else repr(parts)
        raise errors.BadOption(option=option, value=shown, reason=reason)
    return ",".join(addresses)


def check_root(option: str, value: str, hint: str = "") -> str:
    """Returns `value`, the root of a log: a folder or a URI.

    Raises `BadOption` for `option` if the value looks like an address or a host name, or begins
    with an unexpanded `~`, which would become a folder of that name. An existing folder is accepted
    under any name.

    Args:
        option: the option as the user named it.
        value: its value.
        hint: a suggestion for the user, such as " did you mean --bootstrap?"
    """
    if _looks_like_an_address(value) and not Path(value).exists():
        reason = (
            "this looks like an address, and there is no folder of that name; a root is a folder or"
            f" s3://, gs://, az://.{hint} For a new folder of that name write ./{value}"
        )
        raise errors.BadOption(option=option, value=value, reason=reason)
    if value.partition("/")[0] == "~" and not Path(value).exists():
        reason = (
            "only a shell expands ~ to the home folder, and only at the start of a word: write the"
            f" path in full. For a new folder of that name write ./{value}"
        )
        raise errors.BadOption(option=option, value=value, reason=reason)
    return value


def _looks_like_an_address(text: str) -> bool:
    first = text.partition("/")[0]
    if "://" in text or first in ("", ".", "..") or text.startswith("file:"):
        return False
    if "," in first or ":" in first:
        return True
    return first == text and _is_host(text)


def _is_host(text: str) -> bool:
    """Returns True if `text` can only be a host: an IP address, or localhost."""
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return text.lower() == "localhost"
    return True


# ------------------------------------------------------------------------------ object stores


def is_folder(root: str) -> bool:
    """Returns whether a root is a folder of this machine."""
    return "://" not in root or root.startswith("file:")


def storage_options(
    root: str, given: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The options of the root's object store, in lower case: `given`, else the environment's.

    A folder has no options: those in the environment are meant for the bucket of another log.

    Args:
        root: a folder or a URI.
        given: explicit options; each takes precedence over the environment.
        environment: None: this process's own.
    """
    options = {name.lower(): value for name, value in (given or {}).items()}
    scheme, is_uri, _ = root.partition("://")
    if not is_uri or scheme in _SCHEMES_WITHOUT_OPTIONS:
        return options
    return _storage_of(os.environ if environment is None else environment) | options


def _storage_of(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        variable.removeprefix(STORAGE_PREFIX).lower(): value
        for variable, value in environment.items()
        if variable.startswith(STORAGE_PREFIX)
        and variable != STORAGE_PREFIX
        and not is_service_link(variable, value)
    }


def is_service_link(variable: str, value: str) -> bool:
    """Returns True if Kubernetes set this variable, for a service with a name like sparklog."""
    linked = _SERVICE_LINK.search(variable) is not None
    return linked or (variable.endswith("_PORT") and "://" in value)


def without_credentials(uri: str) -> str:
    """Returns a URI for an error: roots have no credentials, but a user may have added some."""
    return re.sub(r"(?<=://).*@|(?<=\?).*", "…", uri, flags=re.DOTALL)


# ------------------------------------------------------------------------------ of Spark


class ConnectorOptions:
    """Options of one reader or writer, by their canonical names.

    Args:
        where: the reader or writer, as errors name it.
        given: the options as Spark passes them.
        known: the names of all options, except `root`, `path` and `storage.*`.
        kafka: options of Spark's Kafka connector without an effect here, in addition to `kafka.*`:
            a migrated query may keep them, with a warning.

    Raises:
        errors.UnknownOption: an option is unknown.
    """

    def __init__(
        self,
        where: str,
        given: Mapping[str, str],
        known: Iterable[str],
        *,
        kafka: Iterable[str] = (),
    ) -> None:
        names = {name.lower(): name for name in ("root", "path", *known)}
        self._address_hint = " Did you mean the option bootstrap?" if "bootstrap" in names else ""
        moved = {name.lower() for name in kafka}
        self._values: dict[str, str] = {}
        self._storage: dict[str, str] = {}
        self._printed: list[str] = []
        self._moved: list[str] = []
        for option, value in given.items():
            lowered = option.lower()
            if lowered.startswith(_STORAGE):
                self._add_storage(lowered.removeprefix(_STORAGE), value)
            elif lowered in names:
                self._values[names[lowered]] = value
            elif lowered.startswith(_KAFKA) or lowered in moved:
                self._moved.append(option)
            else:
                raise errors.UnknownOption.among(where, option, [*names.values(), f"{_STORAGE}*"])

    def _add_storage(self, option: str, value: str) -> None:
        name = option.removeprefix(_SECRET)
        if name in self._storage:
            reason = f"set either this option or {_STORAGE}{_SECRET}{name}, not both"
            raise errors.BadOption(option=_STORAGE + name, value="…", reason=reason)
        self._storage[name] = value
        if name == option and _PRINTED.match(name):
            self._printed.append(name)

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns warnings about options that have no effect, or should have a different name."""
        notes = []
        if self._moved:  # from a query of Spark's Kafka source
            hints = (f"{name}{_INSTEAD.get(name.lower(), '')}" for name in sorted(self._moved))
            moved = f"options of Spark's Kafka connector have no effect here: {', '.join(hints)}"
            notes.append(moved)
        if self._printed:
            given = ", ".join(_STORAGE + name for name in sorted(self._printed))
            instead = ", ".join(_STORAGE + _SECRET + name for name in sorted(self._printed))
            notes.append(
                f"Spark prints the values of {given} in plans and event logs, unless"
                f" spark.redaction.regex matches these names: set {instead} instead"
            )
        return tuple(notes)

    @property
    def named_root(self) -> str | None:
        """The root that options name, if any. Raises `BadOption` if they name two."""
        root, path = self._values.get("root"), self._values.get("path")
        if root and path and root != path:
            reason = f"it conflicts with root = {without_credentials(root)!r}"
            raise errors.BadOption(option="path", value=without_credentials(path), reason=reason)
        for option, value in (("root", root), ("path", path)):
            if value:
                check_root(option, value, self._address_hint)
        return root or path

    @property
    def root(self) -> str:
        """The root that options or the environment name. Raises `BadOption` for none, or two."""
        found = self.named_root or os.environ.get(ROOT_VARIABLE)
        if not found:
            reason = f"name a folder or s3://, gs://, az://; or set {ROOT_VARIABLE}"
            raise errors.BadOption(option="root", value=found, reason=reason)
        return found

    @property
    def names_storage(self) -> bool:
        """Returns True if options of an object store are set."""
        return bool(self._storage)

    @property
    def storage(self) -> Mapping[str, str]:
        """Includes options from the driver's environment: executors have their own environment."""
        return storage_options(self.root, self._storage)

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def flag(self, name: str, *, default: bool) -> bool:
        """Raises `BadOption` for anything but true and false."""
        value = self._values.get(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise errors.BadOption(option=name, value=value, reason="expected true or false")
        return value.lower() == "true"

    def count(self, name: str) -> int | None:
        """A whole number of at least 1. Raises `BadOption` for anything else."""
        value = self._values.get(name)
        if value is None:
            return None
        if not value.isascii() or not value.isdecimal() or int(value) < 1:
            raise errors.BadOption(
                option=name, value=value, reason="expected a number of at least 1"
            )
        return int(value)

    def whole(self, name: str) -> int | None:
        """A whole number. Raises `BadOption` for anything else."""
        value = self._values.get(name)
        if value is None:
            return None
        if not _WHOLE.fullmatch(value.strip()):
            raise errors.BadOption(option=name, value=value, reason="expected a whole number")
        return int(value)

    def seconds(self, name: str) -> float | None:
        """A duration as Spark writes it: 500ms, 15m; without a unit, milliseconds.

        Raises `BadOption` for anything else.
        """
        value = self._values.get(name)
        if value is None:
            return None
        found = _DURATION.fullmatch(value.strip().lower())
        if found is None:
            reason = "expected a duration, such as 500ms, 30s or 15m"
            raise errors.BadOption(option=name, value=value, reason=reason)
        return int(found[1]) * _UNIT_SECONDS[found[2] or "ms"]

    def size_bytes(self, name: str) -> int | None:
        """A size as Spark writes it, of at least one byte: 64m, 1g; without a unit, bytes.

        Raises `BadOption` for anything else.
        """
        value = self._values.get(name)
        if value is None:
            return None
        found = _SIZE.fullmatch(value.strip().lower())
        if found is None or not int(found[1]):
            reason = "expected a size, such as 500k, 64m or 1g"
            raise errors.BadOption(option=name, value=value, reason=reason)
        return int(found[1]) * _UNIT_BYTES[found[2] or ""]

    def one_of(self, name: str, choices: Sequence[str]) -> str:
        """One of the choices, case-insensitively; the first if none was given.

        Raises `BadOption` for anything else.
        """
        value = self._values.get(name)
        if value is None:
            return choices[0]
        if value.lower() not in choices:
            reason = f"expected {' or '.join(choices)}"
            raise errors.BadOption(option=name, value=value, reason=reason)
        return value.lower()

    def names(self, name: str) -> tuple[str, ...]:
        """Returns the unique names of a comma-separated list."""
        parts = (part.strip() for part in (self._values.get(name) or "").split(","))
        return tuple(dict.fromkeys(part for part in parts if part))

    def refuse(self, name: str, reason: str) -> None:
        """Raises `BadOption` if the option was given."""
        value = self._values.get(name)
        if value is not None:
            raise errors.BadOption(option=name, value=value, reason=reason)


def may_others_use(path: Path) -> bool:
    """Returns whether users that are neither the owner nor of the group can read or write a file.

    A file that does not exist cannot be used.
    """
    try:
        return bool(path.stat().st_mode & 0o006)
    except OSError:
        return False
