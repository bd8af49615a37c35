"""Addresses of clients."""

from __future__ import annotations

import ipaddress
from typing import Any, Final

_IPV6_PREFIX: Final = 64


def network_of(peer: str) -> str:
    """Returns the address that counts for bounds: of IPv6, the network that one host may have."""
    if ":" not in peer:
        return peer
    try:
        address: Any = ipaddress.IPv6Address(peer.partition("%")[0])
    except ValueError:
        return peer
    mapped = address.ipv4_mapped
    network = ipaddress.IPv6Network((address, _IPV6_PREFIX), strict=False)
    return str(mapped) if mapped is not None else str(network)
