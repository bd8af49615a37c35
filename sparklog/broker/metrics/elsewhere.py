"""Lag in the partitions that other brokers lead, of the groups that this broker coordinates."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from sparklog import errors, limits
from sparklog.formats.flight_messages import (
    GroupPosition,
    GroupPositions,
    PositionLag,
    PositionLags,
)


class AskBroker(Protocol):
    """Sends a request to another broker."""

    def __call__(
        self, address: str, action: str, request: msgspec.Struct, *, timeout_seconds: float
    ) -> Any:
        """Returns the reply of the broker at `host:port`. Raises `SparklogError`."""


def lags(
    ask: AskBroker, positions: Mapping[str, Collection[GroupPosition]]
) -> dict[GroupPosition, PositionLag]:
    """Asks leaders at the same time, for `LAG_ASK_SECONDS` at most.

    Args:
        ask: sends the requests.
        positions: by the Flight address of the leader.

    Returns:
        The answers that came in time; none from a leader that is gone or silent.
    """
    deadline = time.monotonic() + limits.LAG_ASK_SECONDS

    def ask_leader(address: str) -> dict[GroupPosition, PositionLag]:
        found: dict[GroupPosition, PositionLag] = {}
        asked = list(positions[address])
        for first in range(0, len(asked), limits.LAG_POSITIONS):
            some = asked[first : first + limits.LAG_POSITIONS]
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                break
            try:
                reply: PositionLags = ask(
                    address,
                    "offsets.lag",
                    GroupPositions(positions=some),
                    timeout_seconds=left_seconds,
                )
            except errors.SparklogError:
                break
            if len(reply.lags) == len(some):
                found.update(zip(some, reply.lags, strict=True))
        return {position: lag for position, lag in found.items() if lag.end >= 0}

    if not positions:
        return {}
    with ThreadPoolExecutor(
        min(len(positions), limits.LAG_LEADERS), thread_name_prefix="sparklog-lag"
    ) as pool:
        found = list(pool.map(ask_leader, positions))
    return {position: lag for of_leader in found for position, lag in of_leader.items()}
