"""Merges settings from the command line, the environment, a file and the defaults."""

from __future__ import annotations

import difflib
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from sparklog import errors, limits
from sparklog.options import is_service_link
from sparklog.settings.checks import check_together
from sparklog.settings.values import BrokerSettings

_PREFIX = "SPARKLOG_"
_AUTO_ID = "auto"
_ORDINAL = re.compile(r"-([0-9]+)$")
"""The end of a host name of a StatefulSet's pod, as Kubernetes numbers them."""


def _known_keys() -> dict[str, Any]:
    """Returns the type of every key by its dotted name; `storage` is free-form and has none."""
    keys: dict[str, Any] = {}
    for field in msgspec.structs.fields(BrokerSettings):
        if isinstance(field.default, msgspec.Struct):
            for inner in msgspec.structs.fields(type(field.default)):
                keys[f"{field.name}.{inner.name}"] = inner.type
        elif field.name != "storage":
            keys[field.name] = field.type
    return keys


# Before several threads convert settings: see `flight_messages`.
msgspec.json.Decoder(BrokerSettings)
_KEYS = _known_keys()
_TABLES = {name.partition(".")[0] for name in _KEYS if "." in name} | {"storage"}
_TOP = {name for name in _KEYS if "." not in name} | _TABLES
_VARIABLES = {_PREFIX + name.replace(".", "_").upper(): name for name in _KEYS}


# ------------------------------------------------------------------------------ the layers


def load_settings(
    file: Path | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    brokers: int = 1,
) -> BrokerSettings:
    """Returns the settings of a broker, merged from all sources.

    Args:
        file: a TOML file in the form of `conf/broker.toml`, or None.
        environment: variables; settings are read from those that begin with `SPARKLOG_`.
        overrides: the command line's values by dotted name (`"writer.linger_ms"`), as strings or
            typed; None means that the option was not given.
        defaults: values by dotted name that replace the built-in defaults.
        brokers: the number of brokers on each host. An id of "auto" becomes the id of the
            host's first broker.

    Raises:
        errors.UnknownOption: a name is not that of a setting; the error suggests a similar one.
        errors.BadOption: a file cannot be read, a value has the wrong type or is out of bounds,
            the root is missing, two values contradict each other, or the id is "auto" and this
            machine's host name has no ordinal.
    """
    values: dict[str, Any] = dict(defaults or {})
    if file is not None:
        values |= _from_file(file)
    values |= _from_environment(environment)
    values |= _from_overrides(overrides)
    if values.get("id") == _AUTO_ID:
        values["id"] = brokers * _id_of(socket.gethostname())

    tree: dict[str, Any] = {}
    for name, value in values.items():
        table, _, key = name.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[key] = value
    settings = msgspec.convert(tree, BrokerSettings)
    check_together(settings)
    return settings


def _from_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.BadOption(
            option="settings file", value=str(file), reason=str(error)
        ) from error

    values = {}
    for top, entry in document.items():
        if top not in _TOP:
            raise errors.UnknownOption.among(str(file), top, _TOP | _KEYS.keys())
        if top not in _TABLES:
            values[top] = _checked(top, top, entry, strict=True)
        elif not isinstance(entry, dict):
            raise errors.BadOption(option=top, value=entry, reason=f"write it as a table, [{top}]")
        else:
            for key, value in entry.items():
                name = f"{top}.{key}"
                if not _is_known(name):
                    raise errors.UnknownOption.among(str(file), name, _KEYS)
                values[name] = _checked(name, name, value, strict=True)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, value in environment.items():
        if not variable.startswith(_PREFIX) or is_service_link(variable, value):
            continue
        table, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
        name = f"storage.{key}" if table == "storage" and key else _VARIABLES.get(variable)
        if name is not None:
            values[name] = _checked(variable, name, value, strict=False)
        elif _resembles_setting(variable):
            raise errors.UnknownOption.among("the environment", variable, _VARIABLES)
    return values


def _from_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, value in overrides.items():
        if not _is_known(name):
            raise errors.UnknownOption.among("the command line", name, _KEYS)
        if value is not None:
            values[name] = _checked(name, name, value, strict=False)
    return values


def _is_known(name: str) -> bool:
    return name in _KEYS or (name.startswith("storage.") and name != "storage.")


def _resembles_setting(variable: str) -> bool:
    # Other programs of the project also use the prefix: only names like a setting's are rejected.
    of_table = any(variable.startswith(f"{_PREFIX}{table.upper()}_") for table in _TABLES)
    bare = [known.removeprefix(_PREFIX) for known in _VARIABLES]
    slip = difflib.get_close_matches(variable.removeprefix(_PREFIX), bare, n=1, cutoff=0.8)
    return of_table or bool(slip)


# ------------------------------------------------------------------------------ the checks


def _checked(shown: str, name: str, value: Any, *, strict: bool) -> Any:
    """Converts `value` to the type of the key `name`; errors call it `shown`, as the user did."""
    kind = _KEYS.get(name, str)
    if name == "id" and value == _AUTO_ID:
        return value  # `load_settings` replaces it, unless another source has a number
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        # A storage option may be a secret, and errors are logged.
        seen = "…" if name.startswith("storage.") else value
        reason = f"expected {_expectation(kind)}" + (f", or {_AUTO_ID!r}" if name == "id" else "")
        raise errors.BadOption(option=shown, value=seen, reason=reason) from error


def _id_of(host: str) -> int:
    """Returns the ordinal at the end of a host name, or of its first label: 2 for `sparklog-2`."""
    found = _ORDINAL.search(host.partition(".")[0])
    if found is None or int(found[1]) > limits.BROKER_ID_MAX:
        raise errors.BadOption(
            option="id",
            value=_AUTO_ID,
            reason=f"the host name {host!r} does not end in an ordinal up to"
            f" {limits.BROKER_ID_MAX}, such as the 2 of sparklog-2; set id to a number, or name the"
            " host as a StatefulSet of Kubernetes does",
        )
    return int(found[1])


def _expectation(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is Annotated:
        base, bounds = get_args(kind)
        noun = "an integer" if base is int else "a number"
        low = f"above {bounds.gt} and up" if bounds.gt is not None else f"from {bounds.ge}"
        return f"{noun} {low} to {bounds.le}"
    return "true or false" if kind is bool else "text"
