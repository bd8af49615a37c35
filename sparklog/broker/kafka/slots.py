"""The slots of connections that are being admitted, and the turns of those that wait for one.

An address has a bounded number of slots, and addresses take turns. A part of the slots is for
addresses that have been admitted lately, so that strangers do not delay the clients that a broker
knows. If too many connections wait, the address with the most of them loses its newest one.

Invariants: a connection waits, holds a slot, or neither; `taken` is the number that hold one, and
`waiting` the number that wait; no queue has an address without waiting connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Final

SLOTS = 256
KNOWN_ADDRESSES = 1_024
_KNOWN_SHARE: Final = 4
"""One of so many slots is for known addresses."""
_ADDRESS_SHARE: Final = 8
"""An address has one of so many slots."""
_CONNECTIONS_SHARE: Final = 4
"""One of so many connections has a slot at most."""


class TurnEnded(Exception):
    """A connection no longer waits for a slot: its client has left, or it made room for others."""


class Turn:
    """One connection's place in `Slots`, from `take` until `end`."""

    def __init__(self, slots: Slots, address: str) -> None:
        self.address = address
        self.holds_slot = False
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the connection holds a slot; fails with `TurnEnded`."""
        self._slots = slots

    def refuse(self, reason: str) -> None:
        """Ends the wait for a slot; does nothing to a connection that holds one."""
        self._slots.remove(self)
        if not self.granted.done():
            self.granted.set_exception(TurnEnded(reason))
            self.granted.exception()  # its connection may not be waiting for it any more

    def end(self, *, is_admitted: bool = False) -> None:
        """Gives the slot or the place in the queue back. May be called again."""
        self._slots.remove(self)
        if self.holds_slot:
            self.holds_slot = False
            self._slots.release(self.address, is_admitted=is_admitted)


_Queue = OrderedDict[str, dict[Turn, None]]
"""Waiting connections by address. The address whose turn it is comes first."""


class Slots:
    """The slots of one listener. Used in one event loop."""

    def __init__(self, *, connections: int) -> None:
        """`connections`: the maximum number of the listener."""
        self.count = max(min(SLOTS, connections // _CONNECTIONS_SHARE), 1)
        self.of_address = max(self.count // _ADDRESS_SHARE, 1)
        self.for_unknown = self.count - self.count // _KNOWN_SHARE
        self.taken = 0
        self.waiting = 0
        self._held: Counter[str] = Counter()
        """The number of slots that each address holds."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Addresses that have been admitted, the latest last."""
        self._waiting_known: _Queue = OrderedDict()
        self._waiting_unknown: _Queue = OrderedDict()

    def take(self, address: str) -> Turn:
        """Returns the turn of a new connection, which may hold a slot already."""
        turn = Turn(self, address)
        is_known = address in self._known
        queue = self._waiting_known if is_known else self._waiting_unknown
        if self._may_enter(address, self.count if is_known else self.for_unknown):
            self._grant(turn)
        else:
            queue.setdefault(address, {})[turn] = None
            self.waiting += 1
        return turn

    def of_most(self) -> dict[Turn, None]:
        """Returns the waiting connections of the address with the most, oldest first."""
        queues = (self._waiting_known, self._waiting_unknown)
        return max((each for queue in queues for each in queue.values()), key=len, default={})

    def remove(self, turn: Turn) -> None:
        """Takes a connection out of its queue, if it waits."""
        for queue in (self._waiting_known, self._waiting_unknown):
            waiting = queue.get(turn.address)
            if waiting is not None and turn in waiting:
                del waiting[turn]
                self.waiting -= 1
                if not waiting:
                    del queue[turn.address]

    def release(self, address: str, *, is_admitted: bool) -> None:
        """Returns a slot, and grants it to the next connection in turn."""
        self.taken -= 1
        self._held[address] -= 1
        if not self._held[address]:
            del self._held[address]
        if is_admitted:
            self._note_known(address)
        self._grant_next(self._waiting_known, self.count)
        self._grant_next(self._waiting_unknown, self.for_unknown)

    def _note_known(self, address: str) -> None:
        self._known[address] = None
        self._known.move_to_end(address)
        if len(self._known) > KNOWN_ADDRESSES:
            self._known.popitem(last=False)
        if (waiting := self._waiting_unknown.pop(address, None)) is not None:
            self._waiting_known.setdefault(address, {}).update(waiting)

    def _may_enter(self, address: str, most: int) -> bool:
        return self.taken < most and self._held[address] < self.of_address

    def _grant_next(self, queue: _Queue, most: int) -> None:
        """Grants slots to the first addresses that may have one, which then queue behind all."""
        for address in tuple(queue):
            if self.taken >= most:
                return
            if not self._may_enter(address, most):
                continue
            turn = next(iter(queue[address]))
            queue.move_to_end(address)
            self.remove(turn)
            if not turn.granted.done():  # unless its task is being cancelled
                self._grant(turn)

    def _grant(self, turn: Turn) -> None:
        self._held[turn.address] += 1
        self.taken += 1
        turn.holds_slot = True
        turn.granted.set_result(None)


def make_room(listeners: Iterable[Slots]) -> None:
    """Ends the wait of the newest connection of the address with the most, at all listeners."""
    most = max((each.of_most() for each in listeners), key=len, default={})
    if most:
        next(reversed(most)).refuse("too many connections wait to be admitted, most of its address")
