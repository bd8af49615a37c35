"""The order in which topics are published while there are not enough puts for all. Pure.

Every second put goes to the topic that has waited longest. The others go by worth: bytes times
waiting time, per put. That keeps the mean wait of a byte low: topics with more bytes per put are
published more often, by the square root of it. (With the rate r, the cost c and the interval t of a
topic, the sum of r · t is lowest, for the same puts per second, if r · t² / c is equal for all.)

So no topic starves: until it is published, others get at most twice the puts of the topics that
have waited longer, and twice those of the largest topic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A topic that is due."""

    puts: int
    """The puts of its next commit: of each data file, and of the commit itself."""
    bytes: int
    seconds: float
    """The time for which it has waited."""

    @property
    def worth(self) -> float:
        """The worth of its puts, which rises as the topic waits."""
        return self.bytes * self.seconds / self.puts


class PublishOrder:
    """Chooses the topics to publish; remembers only by which of the two it is to choose next."""

    def __init__(self) -> None:
        self._ahead = 0
        """Puts by worth minus puts by age; never more than those of one topic, up or down."""

    def choose(self, due: Sequence[Candidate], puts: float) -> list[int]:
        """Returns the indexes of the topics to publish, in order, until the puts are used up.

        The last topic may exceed them. `due`: those that have waited longest first.
        """
        by_worth = [(-each.worth, index) for index, each in enumerate(due)]
        heapq.heapify(by_worth)
        chosen: dict[int, None] = {}
        oldest = 0
        while puts > 0 and len(chosen) < len(due):
            if self._ahead >= 0:
                while oldest in chosen:
                    oldest += 1
                index = oldest
                self._ahead -= due[index].puts
            else:
                _, index = heapq.heappop(by_worth)
                if index in chosen:
                    continue
                self._ahead += due[index].puts
            chosen[index] = None
            puts -= due[index].puts
        return list(chosen)
