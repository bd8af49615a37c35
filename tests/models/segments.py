"""Every interleaving of the protocol of segments: one writer, fencers, a reader, one power cut.

A segment is a tuple of cells, one per block after block 0, and offsets are indexes of cells. `Run`
visits all states that can be reached from an empty log, and raises `Violation` where a promise is
broken: an acked frame is lost, a refused one is read, two fencers see different epochs, or a frame
that a reader returned is gone after the power cut.

A mutation omits one rule of the protocol; `Run` must find a violation then.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias


class Violation(Exception):
    """A promise is broken."""


class Attempt(NamedTuple):
    """A frame as the writer tried to append it."""

    sequence: int
    offset: int
    previous: int
    parts: int
    is_last: int
    nonce: int


class Data(NamedTuple):
    """One part of a frame; a frame has one or two."""

    attempt: Attempt
    part: int
    durable: int


class FenceCell(NamedTuple):
    """A fence."""

    fencer: int
    durable: int


class Junk(NamedTuple):
    """A block that a killed process or a power cut has left."""

    durable: int


Cell: TypeAlias = Data | FenceCell | Junk
Segment: TypeAlias = tuple[int, int, tuple[Cell, ...]]
"""A flag that it exists, a flag that its name is durable, and its cells."""
Segments: TypeAlias = tuple[Segment, ...]


class Writer(NamedTuple):
    """The writer; `step` says what it does next."""

    step: str
    flush: int
    segment: int
    end: int
    previous: int
    sequence: int
    part: int
    attempt: Attempt | None
    nonce: int


class Fencer(NamedTuple):
    """A fencer, and the epoch that it has seen."""

    step: str
    segment: int
    view: tuple[Attempt, ...] | None


class Reader(NamedTuple):
    """A reader, and the frames that it is about to return."""

    step: str
    view: tuple[Attempt, ...]
    segment: int


class Facts(NamedTuple):
    """The history of a run, in sets."""

    acked: tuple[Attempt, ...] = ()
    refused: tuple[Attempt, ...] = ()
    given: tuple[Attempt, ...] = ()
    views: tuple[tuple[Attempt, ...], ...] = ()


class State(NamedTuple):
    """One state of the whole."""

    segments: Segments
    writer: Writer
    fencers: tuple[Fencer, ...]
    reader: Reader
    facts: Facts
    cut: int


class Parsed(NamedTuple):
    """The frames that count, and the segment where reading ends."""

    taken: tuple[Attempt, ...]
    fenced: bool
    segment: int


PLANS: Final = {
    "plain": ((1, 0), (1, 0)),
    "short": ((1, 0), (2, 0), (1, 0)),
    "roll": ((1, 1), (1, 0)),
    "two": ((2, 0),),
    "shortroll": ((2, 1), (1, 0)),
}
"""The writer's flushes: parts, and whether the frame ends its segment."""
MUTATIONS: Final = (
    "no position check",
    "offset not bound",
    "previous not bound",
    "ack before the sync",
    "reader without sync",
    "fencer without sync",
    "next segment too late",
    "truncate after a short write",
)
_MOST_ATTEMPTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All interleavings of one plan."""

    plan: str
    fencers: int = 1
    has_cut: bool = True
    mutation: str = ""
    most_states: int = 400_000
    seen: set[State] = field(default_factory=set)

    def states(self) -> Iterator[State]:
        """Yields every state once. Raises `Violation`."""
        first = State(
            ((1, 1, ()), (0, 0, ())),
            Writer("start", 0, 0, 0, -1, 0, 0, None, 0),
            (Fencer("read", 0, None),) * self.fencers,
            Reader("read", (), 0),
            Facts(),
            0,
        )
        self.seen.add(first)
        waiting = deque([first])
        while waiting and len(self.seen) < self.most_states:
            state = waiting.popleft()
            yield state
            for following in self._successors(state):
                if following not in self.seen:
                    self.seen.add(following)
                    waiting.append(following)

    def _successors(self, state: State) -> Iterator[State]:
        yield from self._writer_steps(state)
        for number in range(len(state.fencers)):
            yield from self._fencer_steps(state, number)
        yield from self._reader_steps(state)
        if self.has_cut and not state.cut:
            yield from _power_cuts(state)

    # ---------------------------------------------------------------------- the rule

    def parse(self, segments: Segments) -> Parsed:
        """Applies the one rule of writer, fencer, reader and recovery to the whole log."""
        taken: list[Attempt] = []
        segment = place = 0
        previous = -1
        while True:
            exists, _, cells = segments[segment]
            if not exists:
                raise Violation("the next segment is missing")
            found = self._find(cells, place, len(taken), previous)
            if found is None or isinstance(found, FenceCell):
                return Parsed(tuple(taken), found is not None, segment)
            at, attempt = found
            taken.append(attempt)
            previous, place = at, at + attempt.parts
            if attempt.is_last:
                segment, place, previous = segment + 1, 0, -1

    def _find(
        self, cells: tuple[Cell, ...], place: int, sequence: int, previous: int
    ) -> FenceCell | tuple[int, Attempt] | None:
        for at in range(place, len(cells)):
            cell = cells[at]
            if isinstance(cell, FenceCell):
                return cell
            if not isinstance(cell, Data) or cell.part:
                continue
            attempt = cell.attempt
            if attempt.sequence != sequence or not self._lies(attempt, at, previous):
                continue
            after = at + attempt.parts
            follower = cells[after] if after < len(cells) else None
            is_vouched = (
                isinstance(follower, Data)
                and not follower.part
                and (follower.attempt.sequence, follower.attempt.offset) == (sequence + 1, after)
                and self._lies(follower.attempt, after, at)
            )
            is_whole = len(cells) >= after and all(
                isinstance(each, Data) and each.attempt == attempt and each.part == part
                for part, each in enumerate(cells[at:after])
            )
            if is_vouched or is_whole:
                return at, attempt
        return None

    def _lies(self, attempt: Attempt, at: int, previous: int) -> bool:
        is_there = attempt.offset == at or self.mutation == "offset not bound"
        return is_there and (attempt.previous == previous or self.mutation == "previous not bound")

    # ---------------------------------------------------------------------- the writer

    def _writer_steps(self, state: State) -> Iterator[State]:
        writer, plan = state.writer, PLANS[self.plan]
        is_over = writer.flush >= len(plan) and writer.step not in ("look", "synced")
        if writer.step == "end" or is_over:
            return
        parts, is_last = plan[writer.flush] if writer.flush < len(plan) else (0, 0)
        match writer.step:
            case "start":
                following = writer.segment + 1
                is_late = self.mutation == "next segment too late"
                if is_last and not state.segments[following][0] and not is_late:
                    yield state._replace(segments=_create(state.segments, following))
                else:
                    attempt = Attempt(
                        writer.sequence, writer.end, writer.previous, parts, is_last, writer.nonce
                    )
                    yield _write(state, attempt)
            case "write":
                yield from self._write_steps(state)
            case "cut off":
                exists, named, cells = state.segments[writer.segment]
                cut = (exists, named, cells[: writer.end])
                yield state._replace(
                    segments=_replaced(state.segments, writer.segment, cut),
                    writer=writer._replace(step="start", part=0, attempt=None),
                )
            case "retry":
                parsed = self.parse(state.segments)
                if parsed.fenced:
                    yield state._replace(writer=writer._replace(step="end", part=0, attempt=None))
                else:  # a smaller flush takes the sequence behind the junk
                    end = len(state.segments[writer.segment][2])
                    attempt = Attempt(
                        writer.sequence, end, writer.previous, 1, is_last, writer.nonce
                    )
                    yield _write(state, attempt)
            case "look":
                assert writer.attempt is not None
                facts = _refuse(state.facts, writer.attempt)
                is_over = self.parse(state.segments).fenced or writer.nonce > _MOST_ATTEMPTS
                step = "end" if is_over else "retry"
                yield state._replace(
                    writer=writer._replace(step=step, part=0, attempt=None), facts=facts
                )
            case "sync":
                yield state._replace(
                    segments=_sync(state.segments, writer.segment),
                    writer=writer._replace(step="synced"),
                )
            case "synced":
                yield self._acked(state)

    def _write_steps(self, state: State) -> Iterator[State]:
        writer = state.writer
        attempt = writer.attempt
        assert attempt is not None
        cells = state.segments[writer.segment][2]
        has_moved = len(cells) != writer.end + writer.part
        landed = _add(state.segments, writer.segment, Data(attempt, writer.part, 0))
        is_seen = has_moved and self.mutation != "no position check"
        if writer.part + 1 < attempt.parts:
            part = writer.part if is_seen else writer.part + 1
            step = "look" if is_seen else "write"
            yield state._replace(segments=landed, writer=writer._replace(step=step, part=part))
            if "short" in self.plan and writer.nonce < _MOST_ATTEMPTS and not has_moved:
                facts = _refuse(state.facts, attempt)
                truncates = self.mutation == "truncate after a short write"
                short = writer._replace(
                    step="cut off" if truncates else "retry", part=0, attempt=None
                )
                yield state._replace(segments=landed, writer=short, facts=facts)
            return
        step = "look" if is_seen else "sync"
        if self.mutation == "ack before the sync":
            step = "look" if has_moved else "synced"
        yield state._replace(segments=landed, writer=writer._replace(step=step, part=0))

    def _acked(self, state: State) -> State:
        writer, attempt = state.writer, state.writer.attempt
        assert attempt is not None
        facts = _checked(state.facts._replace(acked=_with(state.facts.acked, attempt)))
        segments = state.segments
        if attempt.is_last:
            if not segments[writer.segment + 1][0]:
                segments = _create(segments, writer.segment + 1)
            following = Writer(
                "start", writer.flush + 1, writer.segment + 1, 0, -1, writer.sequence + 1, 0, None,
                writer.nonce,
            )  # fmt: skip
        else:
            following = Writer(
                "start", writer.flush + 1, writer.segment, attempt.offset + attempt.parts,
                attempt.offset, writer.sequence + 1, 0, None, writer.nonce,
            )  # fmt: skip
        return state._replace(segments=segments, writer=following, facts=facts)

    # ---------------------------------------------------------------------- the others

    def _fencer_steps(self, state: State, number: int) -> Iterator[State]:
        fencer, segments = state.fencers[number], state.segments

        def after(following: Fencer, **changes: object) -> State:
            fencers = (*state.fencers[:number], following, *state.fencers[number + 1 :])
            return state._replace(fencers=fencers, **changes)  # type: ignore[arg-type]

        is_careless = self.mutation == "fencer without sync"
        match fencer.step:
            case "read":
                parsed = self.parse(segments)
                if parsed.fenced:
                    step = "done" if is_careless else "sync"
                    yield after(Fencer(step, parsed.segment, parsed.taken))
                else:
                    yield after(Fencer("put", parsed.segment, None))
            case "put":
                fenced = _add(segments, fencer.segment, FenceCell(number, 0))
                yield after(Fencer("read", 0, None), segments=fenced)
                killed = _add(segments, fencer.segment, Junk(0))
                yield after(Fencer("dead", 0, None), segments=killed)
            case "sync":
                for segment in range(fencer.segment + 1):
                    segments = _sync(segments, segment)
                yield after(fencer._replace(step="again"), segments=segments)
            case "again":
                parsed = self.parse(segments)
                if parsed.taken != fencer.view or not parsed.fenced:
                    raise Violation(f"a view has changed: {fencer.view} {parsed.taken}")
                yield after(fencer._replace(step="over"), facts=_seen(state.facts, parsed.taken))
            case "done":
                assert fencer.view is not None
                yield after(fencer._replace(step="over"), facts=_seen(state.facts, fencer.view))

    def _reader_steps(self, state: State) -> Iterator[State]:
        reader, segments = state.reader, state.segments
        match reader.step:
            case "read":
                parsed = self.parse(segments)
                if parsed.taken:
                    yield state._replace(reader=Reader("sync", parsed.taken, parsed.segment))
            case "sync":
                if self.mutation != "reader without sync":
                    for segment in range(reader.segment + 1):
                        segments = _sync(segments, segment)
                yield state._replace(segments=segments, reader=reader._replace(step="give"))
            case "give":
                given = state.facts.given
                for attempt in reader.view:
                    given = _with(given, attempt)
                facts = _checked(state.facts._replace(given=given))
                step = "read" if len(given) < 2 else "over"
                yield state._replace(reader=Reader(step, (), 0), facts=facts)


def _power_cuts(state: State) -> Iterator[State]:
    """Every unsynced cell is kept or garbled, or the file ends there; new names may be lost."""
    choices = []
    for exists, named, cells in state.segments:
        free = [at for at, cell in enumerate(cells) if not cell.durable]
        found = set()
        for fates in itertools.product(("kept", "garbled", "end"), repeat=len(free)):
            fate = dict(zip(free, fates, strict=True))
            left: list[Cell] = []
            for at, cell in enumerate(cells):
                of_cell = fate.get(at, "kept")
                if of_cell == "end" and not any(each.durable for each in cells[at:]):
                    break
                left.append(cell._replace(durable=1) if of_cell == "kept" else Junk(1))
            found.add((exists if named else 0, named, tuple(left)))
        choices.append(found)
    for combination in itertools.product(*choices):
        yield State(
            combination,
            state.writer._replace(step="end"),
            (Fencer("read", 0, None),),
            Reader("read", (), 0),
            state.facts,
            1,
        )


# ------------------------------------------------------------------------------ changes of a state


def _write(state: State, attempt: Attempt) -> State:
    writer = state.writer._replace(
        step="write", end=attempt.offset, part=0, attempt=attempt, nonce=state.writer.nonce + 1
    )
    return state._replace(writer=writer)


def _replaced(segments: Segments, number: int, segment: Segment) -> Segments:
    return (*segments[:number], segment, *segments[number + 1 :])


def _create(segments: Segments, number: int) -> Segments:
    return _replaced(segments, number, (1, 1, ()))


def _add(segments: Segments, number: int, cell: Cell) -> Segments:
    exists, named, cells = segments[number]
    return _replaced(segments, number, (exists, named, (*cells, cell)))


def _sync(segments: Segments, number: int) -> Segments:
    exists, named, cells = segments[number]
    synced = tuple(cell._replace(durable=1) for cell in cells)
    return _replaced(segments, number, (exists, named, synced))


def _with(attempts: tuple[Attempt, ...], attempt: Attempt) -> tuple[Attempt, ...]:
    return tuple(sorted({*attempts, attempt}))


def _refuse(facts: Facts, attempt: Attempt) -> Facts:
    return _checked(facts._replace(refused=_with(facts.refused, attempt)))


def _seen(facts: Facts, view: tuple[Attempt, ...]) -> Facts:
    return _checked(facts._replace(views=tuple({*facts.views, view})))


def _checked(facts: Facts) -> Facts:
    """Returns the facts. Raises `Violation` if they break a promise."""
    if len(facts.views) > 1:
        raise Violation(f"two views: {facts.views}")
    for view in facts.views:
        if not set(facts.acked) <= set(view):
            raise Violation(f"an acked frame is lost: {facts.acked} {view}")
        if not set(facts.given) <= set(view):
            raise Violation(f"a returned frame is lost: {facts.given} {view}")
        if set(facts.refused) & set(view):
            raise Violation(f"a refused frame counts: {facts.refused} {view}")
    if set(facts.refused) & (set(facts.given) | set(facts.acked)):
        raise Violation(f"a frame is refused, and was returned: {facts}")
    return facts
