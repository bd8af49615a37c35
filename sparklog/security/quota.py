"""Quotas, and which of them applies to a client, as in Kafka; pure.

A quota is set for an entity: a user, a client id, both together, or an address. Instead of a name,
an entity may have the default, which applies to all that have no quota of their own. The precedence
is that of Kafka's `ClientQuotaManager`, and each quota counts the clients that Kafka counts
together: that of a user alone, all connections of the user; any other, those of one user and one
client id, or of one client id.

Source: KIP-13, KIP-55, KIP-124, KIP-546, KIP-599 and KIP-612.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from sparklog.security.acl import normal_host

Name = str | None | msgspec.UnsetType
"""The name of a part of an entity; None is the default, UNSET a part that the entity lacks."""
USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
TYPES: Final = frozenset({USER, CLIENT_ID, IP})
"""The parts of an entity, by Kafka's names."""


class QuotaKey(enum.StrEnum):
    """The keys of quotas, by Kafka's names."""

    PRODUCER_BYTE_RATE = "producer_byte_rate"
    """Bytes of produce requests in a second."""
    CONSUMER_BYTE_RATE = "consumer_byte_rate"
    """Bytes of fetched records in a second."""
    CONTROLLER_MUTATION_RATE = "controller_mutation_rate"
    """Partitions that are created or deleted in a second."""
    CONNECTION_CREATION_RATE = "connection_creation_rate"
    """New connections of an address in a second."""


class QuotaEntity(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The clients that quotas are set for."""

    user: Name = msgspec.UNSET
    client_id: Name = msgspec.UNSET
    ip: Name = msgspec.UNSET

    @property
    def parts(self) -> dict[str, str | None]:
        """The names of the entity's parts by Kafka's type; None is the default."""
        parts = ((USER, self.user), (CLIENT_ID, self.client_id), (IP, self.ip))
        return {kind: name for kind, name in parts if name is not msgspec.UNSET}

    def __str__(self) -> str:
        return ", ".join(f"{kind} {name or '<default>'}" for kind, name in self.parts.items())


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quotas of one entity."""

    entity: QuotaEntity
    values: dict[QuotaKey, float]


class Limit(NamedTuple):
    """The quota that applies to a client, and the clients that are counted together with it."""

    value: float
    user: str | None
    """None: clients of every user."""
    client_id: str | None
    """None: every client id."""


class QuotaTable:
    """The quotas of one version of the security state."""

    def __init__(self, quotas: Mapping[QuotaEntity, Mapping[QuotaKey, float]]) -> None:
        self._clients: dict[QuotaKey, dict[tuple[Name, Name], float]] = {}
        self._addresses: dict[str | None, float] = {}
        for entity, values in quotas.items():
            for key, value in values.items():
                if isinstance(entity.ip, msgspec.UnsetType):
                    of_key = self._clients.setdefault(key, {})
                    of_key[entity.user, entity.client_id] = value
                else:
                    address = normal_host(entity.ip) if entity.ip is not None else None
                    self._addresses[address] = value

    def of_client(self, key: QuotaKey, user: str, client_id: str) -> Limit | None:
        """Returns the quota of a client with this user and client id; None if it has none."""
        values = self._clients.get(key)
        if values is None:
            return None
        absent = msgspec.UNSET
        for entity, counted in (
            ((user, client_id), (user, client_id)),
            ((user, None), (user, client_id)),
            ((user, absent), (user, None)),
            ((None, client_id), (user, client_id)),
            ((None, None), (user, client_id)),
            ((None, absent), (user, None)),
            ((absent, client_id), (None, client_id)),
            ((absent, None), (None, client_id)),
        ):
            value = values.get(entity)
            if value is not None:
                return Limit(value, *counted)
        return None

    @property
    def limits_connections(self) -> bool:
        """True if there are quotas of addresses."""
        return bool(self._addresses)

    def of_address(self, address: str) -> tuple[float, bool] | None:
        """Returns the quota of an address, and whether it is its own; None if it has none."""
        own = self._addresses.get(normal_host(address))
        if own is not None:
            return own, True
        default = self._addresses.get(None)
        return (default, False) if default is not None else None
