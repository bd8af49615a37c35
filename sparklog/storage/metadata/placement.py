"""Placement of partitions on brokers: decisions from the metadata alone.

They use no clock, random numbers or `hash`, so every broker makes the same decision on the same
version. None of them changes anything: the caller makes the change, whose precondition is checked
again (`storage/metadata/leadership.py`).

Load is the number of partitions that a broker leads, not their bytes. Balance within a topic takes
precedence over balance across topics, because a topic's partitions are read and written together.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sparklog.storage.metadata.leadership import is_up
from sparklog.storage.metadata.model import ClusterMetadata, TopicMetadata

SUCCESSORS = 10  # brokers that share the partitions of a dead one
MOVES_AT_ONCE = 16  # partitions that a broker gives up, or receives, in one balancing pass
BALANCE_PLANNED = 5_000_000  # partitions that a plan examines, over all of its passes
UNEVEN_LEADERS = 2  # a difference in partitions that is not worth a move


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A broker that is up."""

    broker: int
    rack: str = ""
    """Its failure domain; empty if none is set."""
    takes: bool = True
    """False for a broker that is about to stop, or only fills in while no other one is up."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """A partition that its leader should give to `target`."""

    topic: str
    partition: int
    target: int


def candidates(metadata: ClusterMetadata) -> list[Candidate]:
    """Returns the members of a cluster that are up."""
    return [
        Candidate(broker=broker, rack=known.rack)
        for broker, known in metadata.brokers.items()
        if known.is_member and is_up(metadata, broker)
    ]


class Loads(Counter[int]):
    """The number of partitions that each broker leads, by broker id."""

    @classmethod
    def of(cls, topics: Iterable[TopicMetadata]) -> Loads:
        """Counts the leaders of all topics."""
        return cls(itertools.chain.from_iterable(topic.leaders for topic in topics))


def place(
    topic_id: str, count: int, candidates: Collection[Candidate], loads: Mapping[int, int]
) -> tuple[int, ...]:
    """Returns leaders for a topic with `count` partitions; none if no broker takes any.

    The brokers take turns, so their numbers of partitions differ by at most one. The least loaded
    one is first, and the topic id breaks ties, so that the first partitions of all topics are
    spread too. Neighbouring partitions are in different racks, as far as the racks have equal
    numbers of brokers.
    """
    taking = [each for each in candidates if each.takes]
    taking.sort(key=lambda each: (loads.get(each.broker, 0), order(topic_id, each.broker)))
    turns = itertools.cycle(_racks_in_turn(taking)) if taking else iter(())
    return tuple(each.broker for each in itertools.islice(turns, count))


def place_more(
    topic_id: str,
    leaders: Sequence[int],
    count: int,
    candidates: Collection[Candidate],
    loads: Mapping[int, int],
) -> tuple[int, ...]:
    """Returns `leaders`, followed by those of the partitions added to a topic.

    Brokers that lead the fewest of its partitions come first. Returns only `leaders` if no broker
    takes any.
    """
    of_topic = Counter(leaders)
    found = list(leaders)
    turns = place(topic_id, sum(each.takes for each in candidates), candidates, loads)
    queue = [(of_topic[broker], turn, broker) for turn, broker in enumerate(turns)]
    heapq.heapify(queue)
    while queue and len(found) < count:
        leading, turn, broker = queue[0]
        found.append(broker)
        heapq.heapreplace(queue, (leading + 1, turn, broker))
    return tuple(found)


def successors(
    topics: Mapping[str, TopicMetadata],
    leaving: int,
    candidates: Collection[Candidate],
    loads: Mapping[int, int],
    *,
    most: int = SUCCESSORS,
) -> dict[tuple[str, int], int]:
    """Returns a new leader for each (topic, partition) of `leaving`; none if no broker takes any.

    `most`: the maximum number of successors, chosen as those that lead the fewest partitions. Each
    successor of a dead broker reads that broker's whole log.
    """
    taking = [each for each in candidates if each.takes and each.broker != leaving]
    taking.sort(key=lambda each: (loads.get(each.broker, 0), order(str(leaving), each.broker)))
    pool = [each.broker for each in taking[:most]]
    if not pool:
        return {}
    led = {broker: loads.get(broker, 0) for broker in pool}
    found: dict[tuple[str, int], int] = {}
    for name, topic in sorted(topics.items()):
        if leaving not in topic.leaders:
            continue
        of_topic = Counter(topic.leaders)
        for partition, leader in enumerate(topic.leaders):
            if leader == leaving:
                target = min(pool, key=lambda broker: (of_topic[broker], led[broker]))
                found[name, partition] = target
                of_topic[target] += 1
                led[target] += 1
    return found


def successors_without(
    metadata: ClusterMetadata, leaving: int, unfit: Collection[int]
) -> dict[tuple[str, int], int]:
    """Returns `successors` among the members that are up, except those that are unfit."""
    taking = [each for each in candidates(metadata) if each.broker not in unfit]
    loads = Loads.of(metadata.topics.values())
    return successors(metadata.topics, leaving, taking, loads)


# ------------------------------------------------------------------------------ balance


def balance(
    topics: Mapping[str, TopicMetadata], candidates: Collection[Candidate], loads: Mapping[int, int]
) -> list[Move]:
    """Returns moves that balance the brokers; none if they are balanced enough.

    A broker that takes nothing gives up everything, and no broker gives up or receives more than
    `MOVES_AT_ONCE` in one call. The others give up partitions while the difference between two of
    them exceeds both `UNEVEN_LEADERS` and a tenth of what a broker leads on average. If the moves
    are made between calls, repeated calls eventually return none.
    """
    led = {each.broker: loads.get(each.broker, 0) for each in candidates}
    taking = [each.broker for each in candidates if each.takes]
    if not taking:
        return []
    giving = [each.broker for each in candidates if not each.takes and led[each.broker]]
    mean = sum(led.values()) / len(taking)
    uneven = max(UNEVEN_LEADERS, mean / 10)
    if max(led[each] for each in taking) - min(led[each] for each in taking) > uneven:
        giving += sorted((each for each in taking if led[each] > mean), key=lambda n: -led[n])
    return list(_moves(giving, led, set(taking), _by_leader(topics, set(led)))) if giving else []


def plan(topics: Mapping[str, TopicMetadata], candidates: Collection[Candidate]) -> list[Move]:
    """Returns the moves of repeated calls to `balance`, each partition once, by topic.

    If a cluster has so many partitions that planning would take too long, returns the moves of the
    first passes only.
    """
    partitions = sum(topic.partition_count for topic in topics.values())
    most_passes = max(BALANCE_PLANNED // max(partitions, 1), 1)
    now = {name: list(topic.leaders) for name, topic in topics.items()}
    for _ in range(most_passes):
        led = {
            name: msgspec.structs.replace(topics[name], leaders=tuple(leaders))
            for name, leaders in now.items()
        }
        moves = balance(led, candidates, Loads.of(led.values()))
        if not moves:
            break
        for each in moves:
            now[each.topic][each.partition] = each.target
    return [
        Move(name, partition, target)
        for name, leaders in sorted(now.items())
        for partition, target in enumerate(leaders)
        if target != topics[name].leaders[partition]
    ]


def _moves(
    giving: Sequence[int],
    led: dict[int, int],
    taking: Collection[int],
    partitions: Mapping[int, dict[str, list[int]]],
) -> Iterator[Move]:
    """Yields moves from brokers in their order, each to the one that then leads the fewest.

    No broker both gives and receives: it starts above the mean or below it.
    """
    mean = sum(led.values()) / len(taking)
    got: Counter[int] = Counter()
    targets = [(led[broker], broker) for broker in taking]
    heapq.heapify(targets)
    for giver in giving:
        mine = partitions[giver]
        for _ in range(MOVES_AT_ONCE):
            if not targets or not led[giver]:
                break
            least, target = targets[0]
            if giver in taking and not (least < mean < led[giver] and led[giver] - least > 1):
                break  # moves between brokers that lead about the same would never end
            name = _topic_to_move(mine, partitions[target])
            partition = mine[name].pop()
            partitions[target].setdefault(name, []).append(partition)
            yield Move(name, partition, target)
            led[giver] -= 1
            got[target] += 1
            if got[target] < MOVES_AT_ONCE:
                heapq.heapreplace(targets, (least + 1, target))
            else:
                heapq.heappop(targets)
        targets = [each for each in targets if each[1] != giver]
        heapq.heapify(targets)


def _topic_to_move(mine: Mapping[str, list[int]], others: Mapping[str, list[int]]) -> str:
    """Returns the topic in which the giver's surplus of partitions over the target is largest."""
    having = (name for name, led in mine.items() if led)
    return min(having, key=lambda name: (len(others.get(name, ())) - len(mine[name]), name))


def _by_leader(
    topics: Mapping[str, TopicMetadata], brokers: Collection[int]
) -> dict[int, dict[str, list[int]]]:
    """Returns the partitions of these brokers, by broker and topic, the last one first."""
    found: dict[int, dict[str, list[int]]] = {broker: {} for broker in brokers}
    for name, topic in topics.items():
        for partition in reversed(range(topic.partition_count)):
            of_broker = found.get(topic.leaders[partition])
            if of_broker is not None:
                of_broker.setdefault(name, []).append(partition)
    return found


# ------------------------------------------------------------------------------ order


def order(seed: str, broker: int) -> bytes:
    """Returns a key that orders brokers differently for each seed, but identically everywhere."""
    return hashlib.blake2b(f"{seed}/{broker}".encode(), digest_size=8).digest()


def _racks_in_turn(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the brokers so that racks alternate; within a rack, their order is unchanged."""
    racks: dict[str, list[Candidate]] = {}
    for each in candidates:
        racks.setdefault(each.rack, []).append(each)
    rounds = itertools.zip_longest(*racks.values())
    return [each for turn in rounds for each in turn if each is not None]
