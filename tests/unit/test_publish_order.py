"""The order in which topics are published while there are not enough puts for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog.broker.log.publish_order import Candidate, PublishOrder

Order = Callable[[Sequence[Candidate], float], Sequence[int]]


@given(
    before=st.lists(st.tuples(st.integers(2, 600), st.integers(1, 10**9)), max_size=30),
    target=st.integers(0, 29),
    looks=st.lists(st.floats(0.01, 40.0), min_size=1, max_size=20),
)
def test_no_topic_starves(before: list[tuple[int, int]], target: int, looks: list[float]) -> None:
    """Promise: others get at most twice the puts of the older topics, and twice those of one more.

    Topics that were published are due again at once, with any number of bytes.
    """
    queue = [(name, puts, size) for name, (puts, size) in enumerate(before)]
    queue.insert(min(target, len(queue)), (-1, 2, 1))
    queue += [(100 + number, 513, 10**12) for number in range(3)]  # younger, and worth far more
    most = max(puts for _, puts, _ in queue)
    older = sum(puts for _, puts, _ in queue[: queue.index((-1, 2, 1))])
    order = PublishOrder()
    others = step = 0
    while True:
        due = [Candidate(puts, size, 1.0 / (1 + at)) for at, (_, puts, size) in enumerate(queue)]
        chosen = order.choose(due, looks[step % len(looks)])
        step += 1
        assert len(set(chosen)) == len(chosen) > 0
        names = [queue[index][0] for index in chosen]
        others += sum(
            queue[index][1] for index in (chosen[: names.index(-1)] if -1 in names else chosen)
        )
        assert others <= 2 * older + 2 * most
        if -1 in names:
            return
        published = [queue[index] for index in chosen]
        queue = [each for each in queue if each not in published] + published


def test_puts_are_used_up_and_exceeded_by_one_topic_at_most() -> None:
    """All that are due, if they fit; otherwise no topic after the one with which they end."""
    due = [Candidate(5, 100, 10.0)] * 4
    assert sorted(PublishOrder().choose(due, 20.0)) == [0, 1, 2, 3]
    assert sorted(PublishOrder().choose(due, 1e9)) == [0, 1, 2, 3]
    assert len(PublishOrder().choose(due, 5.1)) == 2
    assert len(PublishOrder().choose(due, 5.0)) == 1
    assert PublishOrder().choose(due, 0.0) == []
    assert PublishOrder().choose([], 9.0) == []


def test_every_second_put_goes_by_worth() -> None:
    """Bytes, the time for which they wait, and the puts that they cost all count."""
    order = PublishOrder()
    due = [
        Candidate(2, 10, 40.0),
        Candidate(2, 10, 30.0),
        Candidate(2, 1_000, 20.0),
        Candidate(200, 1_010, 20.0),
        Candidate(2, 1_001, 20.0),
    ]
    assert order.choose(due, 8.0) == [0, 4, 1, 2]


class Published:
    """Topics with constant rates, published with 18 puts a second after ten seconds at least."""

    def __init__(self, rates: Sequence[float], puts: int, order: Order) -> None:
        since = [0.0] * len(rates)
        self.longest = [0.0] * len(rates)
        waits = written = left = now = 0.0
        while now < 600.0:
            now += 0.1
            left = min(left + 1.8, 18.0)
            waiting = sorted(
                (at, name) for name, at in enumerate(since) if now - at >= 10.0 and left > 0
            )
            due = [Candidate(puts, int(rates[name] * (now - at)), now - at) for at, name in waiting]
            for index in order(due, left):
                at, name = waiting[index]
                left -= puts
                waits += rates[name] * (now - at) ** 2 / 2
                written += rates[name] * (now - at)
                if now > 60.0:  # they all begin together
                    self.longest[name] = max(self.longest[name], now - at)
                since[name] = now
        self.mean_wait = waits / written
        """The mean time until a byte is published, in seconds."""


def by_age(due: Sequence[Candidate], puts: float) -> Sequence[int]:
    """The order before: those that have waited longest first."""
    return range(min(len(due), max(0, -int(-puts // due[0].puts)) if due else 0))


@pytest.mark.parametrize(
    ("rates", "better"),
    [([10_000.0] * 60, 1.0), ([600_000.0 / (1 + number) for number in range(60)], 0.8)],
    ids=["equal", "Zipf"],
)
def test_bytes_wait_less_where_topics_differ(rates: list[float], better: float) -> None:
    """Promise: no more than by age; where some topics have most bytes, a fifth less or better.

    No topic waits twice as long as all topics take, one after the other.
    """
    cycle_seconds = len(rates) * 5 / 18
    assert cycle_seconds > 15
    old, new = Published(rates, 5, by_age), Published(rates, 5, PublishOrder().choose)
    assert new.mean_wait <= old.mean_wait * better * 1.01
    assert max(old.longest) <= cycle_seconds + 1
    assert max(new.longest) <= 2 * cycle_seconds + 1
