"""Lag of the groups that this broker coordinates in partitions that other brokers lead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sparklog import errors, limits
from sparklog.formats.flight_messages import (
    GroupPosition,
    GroupPositions,
    PositionLag,
    PositionLags,
)
from sparklog.storage.metadata.identity import Ask

_LAG_LEADERS = 16  # asked concurrently at most
LAG_ASK_SECONDS = 0.5  # per collection, to ask leaders


def lags(
    ask: Ask, positions: Mapping[str, Collection[GroupPosition]]
) -> dict[GroupPosition, PositionLag]:
    """Asks leaders concurrently, for at most `LAG_ASK_SECONDS`.

    Args:
        ask: sends the requests.
        positions: by the Flight address of the leader.

    Returns:
        The answers that arrived in time; none from a leader that is gone or silent.
    """
    deadline = time.monotonic() + LAG_ASK_SECONDS

    def ask_leader(address: str) -> dict[GroupPosition, PositionLag]:
        found: dict[GroupPosition, PositionLag] = {}

        def ask_about(asked: Sequence[GroupPosition], *, ages: bool) -> None:
            for first in range(0, len(asked), limits.LAG_POSITIONS):
                some = list(asked[first : first + limits.LAG_POSITIONS])
                if (left_seconds := deadline - time.monotonic()) <= 0:
                    return
                request = GroupPositions(positions=some, ages=ages)
                reply: PositionLags = ask(
                    address, "offsets.lag", request, timeout_seconds=left_seconds
                )
                if len(reply.lags) == len(some):
                    found.update(zip(some, reply.lags, strict=True))

        # The ends first: there may not be enough time to read records for their age.
        with contextlib.suppress(errors.SparklogError):
            ask_about([*positions[address]], ages=False)
            behind = [each for each, lag in found.items() if each.offset < lag.end]
            ask_about(behind, ages=True)
        return {position: lag for position, lag in found.items() if lag.end >= 0}

    if not positions:
        return {}
    with ThreadPoolExecutor(
        min(len(positions), _LAG_LEADERS), thread_name_prefix="sparklog-lag"
    ) as pool:
        found = list(pool.map(ask_leader, positions))
    return {position: lag for of_leader in found for position, lag in of_leader.items()}
