"""Changes of the quotas of a root, and the filters that describe them; pure."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from sparklog import errors
from sparklog.security.quota import CLIENT_ID, IP, TYPES, USER, QuotaEntity, QuotaKey
from sparklog.security.state import SecurityState
from sparklog.security.users import NAME_BYTES_MAX, Change

ENTITIES_MAX: Final = 20_000
_OF_CLIENTS: Final = (
    QuotaKey.PRODUCER_BYTE_RATE,
    QuotaKey.CONSUMER_BYTE_RATE,
    QuotaKey.CONTROLLER_MUTATION_RATE,
)
_OF_ADDRESSES: Final = (QuotaKey.CONNECTION_CREATION_RATE,)
_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1
_WHOLE: Final[Mapping[QuotaKey, int]] = {
    QuotaKey.PRODUCER_BYTE_RATE: _LONG_MAX,
    QuotaKey.CONSUMER_BYTE_RATE: _LONG_MAX,
    QuotaKey.CONNECTION_CREATION_RATE: _INT_MAX,
}
"""The keys whose values are whole numbers, and their maximum, as in Kafka."""
_FRACTION: Final = 1e-6
"""The deviation from a whole number that is ignored, as in Kafka."""
_NOT_SUPPORTED: Final = "request_percentage"
ANY: Final = object()
"""In a filter: every name of this type, and the default."""


def changed(entity: QuotaEntity, values: Mapping[str, float | None]) -> Change:
    """Sets quotas of an entity, and removes those whose value is None; others stay.

    As in Kafka, a quota to remove need not exist.

    Raises `BadRequest` for an entity or a quota that is not valid.
    """
    keys = _keys_of(entity)
    checked = {_key(keys, key, value): value for key, value in values.items()}

    def change(state: SecurityState) -> SecurityState | None:
        known = state.quotas.get(entity, {})
        after = {key: value for key, value in known.items() if checked.get(key, value) is not None}
        after |= {key: float(value) for key, value in checked.items() if value is not None}
        if after == known:
            return None
        if after and not known and len(state.quotas) >= ENTITIES_MAX:
            reason = f"a root has quotas for at most {ENTITIES_MAX:,} entities"
            raise errors.BadRequest(reason=f"{reason}: remove some first")
        quotas = state.quotas.copy()  # compares no entities: one request makes many changes
        if after:
            quotas[entity] = after
        else:
            del quotas[entity]
        return msgspec.structs.replace(state, quotas=quotas)

    return change


def entity_of(parts: Mapping[str, str | None]) -> QuotaEntity:
    """Returns the entity with these names by Kafka's type; None is the default.

    Raises `BadRequest`.
    """
    if unknown := sorted(parts.keys() - TYPES):
        raise errors.BadRequest(reason=f"Unhandled client quota entity type: {unknown[0]}")
    entity = QuotaEntity(
        user=parts.get(USER, msgspec.UNSET),
        client_id=parts.get(CLIENT_ID, msgspec.UNSET),
        ip=parts.get(IP, msgspec.UNSET),
    )
    _keys_of(entity)
    return entity


def matches(entity: QuotaEntity, wanted: Mapping[str, object], *, is_strict: bool) -> bool:
    """Returns whether a filter selects an entity (KIP-546).

    Args:
        entity: the entity.
        wanted: by type, a name, None for the default, or `ANY`.
        is_strict: excludes an entity with further types.
    """
    parts = entity.parts
    if is_strict and len(parts) != len(wanted):
        return False
    return all(
        kind in parts and (name is ANY or parts[kind] == name) for kind, name in wanted.items()
    )


# ------------------------------------------------------------------------------ checks


def _keys_of(entity: QuotaEntity) -> tuple[QuotaKey, ...]:
    """Returns the keys that an entity may have. Raises `BadRequest`, with Kafka's texts."""
    parts = entity.parts
    if not parts:
        raise errors.BadRequest(reason="Invalid empty client quota entity")
    for kind, name in parts.items():
        if name is None:
            continue
        if not name:
            raise errors.BadRequest(reason=f"Empty {kind} not supported")
        if len(name.encode()) > NAME_BYTES_MAX or not name.isprintable():
            reason = f"a {kind} has at most {NAME_BYTES_MAX} bytes, all of printable characters"
            raise errors.BadRequest(reason=reason)
    if IP not in parts:
        return _OF_CLIENTS
    if len(parts) > 1:
        reason = "Invalid quota entity combination, IP entity should not be combined with User or"
        raise errors.BadRequest(reason=f"{reason} ClientId")
    if (address := parts[IP]) is not None:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise errors.BadRequest(reason=f"{address} is not an IP address") from None
    return _OF_ADDRESSES


def _key(keys: tuple[QuotaKey, ...], name: str, value: float | None) -> QuotaKey:
    """Returns the key of a quota. Raises `BadRequest` unless it may have this value."""
    if name == _NOT_SUPPORTED:
        reason = f"{name} is not supported: brokers do not measure the time of requests by client"
        raise errors.BadRequest(reason=reason)
    key = next((each for each in keys if each == name), None)
    if key is None:
        raise errors.BadRequest(reason=f"Invalid configuration key {name}")
    if value is None:
        return key
    if not value > 0.0 or math.isinf(value):
        raise errors.BadRequest(reason=f"Quota {name} must be greater than 0")
    if (most := _WHOLE.get(key)) is not None:
        if value > most:
            kind = "an INT" if most == _INT_MAX else "a LONG"
            raise errors.BadRequest(reason=f"Proposed value for {name} is too large for {kind}.")
        if value % 1.0 > _FRACTION:
            raise errors.BadRequest(reason=f"{name} cannot be a fractional value.")
    return key
