"""The state of a partition, as the logs of earlier epochs have it."""

from __future__ import annotations

from sparklog.broker.log import recovery
from sparklog.storage import wal
from sparklog.storage.metadata.model import Epoch
from sparklog.storage.snapshot import Bounds


def checkpoint(sequence: int, bounds: Bounds) -> wal.Checkpoint:
    """A checkpoint of a broker that leads the only partition of a topic."""
    return wal.Checkpoint(sequence=sequence, needed=(), state=b"", bounds={"id": (bounds,)})


def test_what_was_published_stays_published() -> None:
    """A leader that could not read the table does not know it, and saves an earlier offset.

    Entries from there on are no longer in the logs, and would be taken for lost.
    """
    logs = recovery._Logs()
    logs.add(Epoch(2, 1), [], checkpoint(17, Bounds(start=2, published=3, end=8, leader_epoch=0)))
    unread = Bounds(start=0, published=2, end=11, leader_epoch=1, epochs=((0, 0), (1, 10)))
    logs.add(Epoch(1, 1), [], checkpoint(3, unread))
    past = logs.past_of("id", 0)
    assert past.state == 1
    assert past.bounds == Bounds(
        start=2, published=3, end=11, leader_epoch=1, epochs=((0, 0), (1, 10))
    )
