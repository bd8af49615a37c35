"""`sparklog cluster balance`, while brokers start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sparklog import cluster, errors
from sparklog.clock import ManualClock
from sparklog.formats.flight_messages import (
    BalanceCluster,
    BalanceReply,
    BrokerDescription,
    ClusterDescription,
)


class FakeView:
    """Brokers 1, which is up, and 2, whose states follow each other; the last one stays."""

    def __init__(self, states: Sequence[str]) -> None:
        self.states = list(states)

    @property
    def second(self) -> str:
        return self.states[0]

    credentials = None

    def describe(self, *, topics: bool = False) -> ClusterDescription:
        state = self.states[0]
        if len(self.states) > 1:
            del self.states[0]
        brokers = [
            BrokerDescription(broker=broker, epoch=broker, state=state, address=f"host:{broker}")
            for broker, state in ((1, "up"), (2, state))
        ]
        return ClusterDescription(
            cluster_id="c",
            root="r",
            controller=1,
            brokers=brokers,
            epochs=[],
            topics=1,
            partitions=4,
            lost_partitions=0,
            lost=[],
            leaders={"t": [1, 1, 1, 1]} if topics else None,
        )


def test_a_balance_waits_for_a_broker_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker gets partitions once it serves: a round before that says nothing about the end."""
    view, moves = FakeView(["starting", "starting", "starting", "up"]), [2]

    def ask(_address: str, _action: str, request: BalanceCluster, **_: object) -> BalanceReply:
        is_due = view.second == "up" and not request.dry_run and bool(moves)
        return BalanceReply(moved=moves.pop() if is_due else 0)

    monkeypatch.setattr(cluster, "ask", ask)
    rounds: list[int] = []
    cluster.balance(view, ManualClock(), progress=rounds.append)
    assert rounds == [2]


def test_a_balance_names_a_broker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time ends, and the error says for which broker it has waited."""
    monkeypatch.setattr(cluster, "ask", lambda *_, **__: BalanceReply())
    with pytest.raises(errors.TimedOut, match="while these are starting: 2"):
        cluster.balance(FakeView(["starting"]), ManualClock(), timeout_seconds=3.0)
