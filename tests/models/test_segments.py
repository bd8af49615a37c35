from __future__ import annotations

from functools import cache

import crc32c
import pytest

from sparklog.storage.objects.files import BLOCK_BYTES
from sparklog.storage.snapshot import Entry, EntryKind
from sparklog.storage.wal import frames
from tests.models.segments import (
    MUTATIONS,
    PLANS,
    Attempt,
    Data,
    FenceCell,
    Run,
    Segment,
    Segments,
    Violation,
)

SALTS = (b"a" * frames.SALT_BYTES, b"b" * frames.SALT_BYTES)
CAUGHT_BY = {
    "no position check": "plain",
    "offset not bound": "plain",
    "previous not bound": "short",
    "ack before the sync": "plain",
    "reader without sync": "plain",
    "fencer without sync": "plain",
    "next segment too late": "roll",
    "truncate after a short write": "short",
}
STATES = {"plain": 3_329, "short": 20_519, "roll": 8_201, "two": 1_403, "shortroll": 18_479}


@pytest.mark.parametrize("plan", PLANS)
def test_every_interleaving_keeps_the_promises(plan: str) -> None:
    """No order of appends, fences, reads and one power cut loses or doubles a frame."""
    run = Run(plan=plan)
    assert sum(1 for _ in run.states()) == STATES[plan]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_rule_is_needed(mutation: str) -> None:
    """The model finds a violation once any rule is left out."""
    run = Run(plan=CAUGHT_BY[mutation], mutation=mutation)
    with pytest.raises(Violation):
        for _ in run.states():
            pass


@pytest.mark.soak(mode="models")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("has_cut", [False, True])
def test_two_fencers_keep_the_promises(plan: str, has_cut: bool) -> None:
    """Two fencers at a time, killed or not, see the same epoch."""
    for _ in Run(plan=plan, fencers=2, has_cut=has_cut, most_states=10_000_000).states():
        pass


# ------------------------------------------------------------------------------ the code


@cache
def frame_of(attempt: Attempt, segment: int) -> bytes:
    """The bytes of a frame as the appender writes it, of as many blocks as it has parts."""
    length = attempt.parts * BLOCK_BYTES
    entry = Entry(kind=EntryKind.RECORDS, base_offset=attempt.nonce)
    for _ in range(2):  # the length of the index depends on the numbers in it
        index = frames.encode_index(0, [entry])
        room = length - frames.HEADER_BYTES - len(index) - 16
        payload = bytes((attempt.nonce + number) % 251 + 1 for number in range(room))
        entry = Entry(
            kind=EntryKind.RECORDS,
            base_offset=attempt.nonce,
            length=room,
            crc32c=crc32c.crc32c(payload),
        )
    index = frames.encode_index(0, [entry])
    room = length - frames.HEADER_BYTES - len(index) - entry.length
    place = _offset(attempt.previous) if attempt.previous >= 0 else frames.NONE
    head = frames.encode_head(
        index,
        salt=SALTS[segment],
        offset=_offset(attempt.offset),
        sequence=attempt.sequence,
        previous=place,
        length=length,
        nonce=attempt.nonce,
        is_last=bool(attempt.is_last),
    )
    tail = frames.encode_tail(unused_bytes=room, sequence=attempt.sequence, nonce=attempt.nonce)
    found = head + payload[: entry.length] + tail
    assert len(found) == length
    return found


def _offset(cell: int) -> int:
    return frames.FIRST + cell * BLOCK_BYTES


@cache
def bytes_of(segment: Segment, number: int) -> bytes:
    """The bytes of a segment's cells, behind a block 0 that nothing here reads."""
    found = [bytes(BLOCK_BYTES)]
    for cell in segment[2]:
        if isinstance(cell, Data):
            start = cell.part * BLOCK_BYTES
            found.append(frame_of(cell.attempt, number)[start : start + BLOCK_BYTES])
        elif isinstance(cell, FenceCell):
            found.append(frames.encode_fence(salt=SALTS[number], nonce=cell.fencer))
        else:  # an old block of the other segment
            found.append(frames.encode_fence(salt=SALTS[1 - number], nonce=0))
    return b"".join(found)


def _reader(data: bytes) -> frames.Read:
    return lambda start, length: data[start : start + length]


@cache
def parse(segments: Segments) -> tuple[list[tuple[int, int]], bool, int]:
    """Reads a log as the follower does; returns (sequence, nonce) of frames, fenced, segment."""
    taken: list[tuple[int, int]] = []
    segment, place, previous = 0, frames.FIRST, frames.NONE
    while True:
        data = bytes_of(segments[segment], segment)
        event = frames.next_event(
            "x",
            frames.Window(_reader(data), len(data)),
            salt=SALTS[segment],
            offset=place,
            sequence=len(taken),
            previous=previous,
        )
        if not isinstance(event, frames.Frame):
            return taken, isinstance(event, frames.Fence), segment
        header = event.header
        taken.append((header.sequence, header.nonce))
        place, previous = header.end, header.offset
        if header.is_last:
            segment, place, previous = segment + 1, frames.FIRST, frames.NONE


@pytest.mark.parametrize("plan", PLANS)
def test_the_code_reads_every_state_as_the_model_does(plan: str) -> None:
    """The rule of the code takes the same frames as that of the model, and finds no damage."""
    run = Run(plan=plan)
    compared = set()
    for state in run.states():
        segments = state.segments
        if segments in compared:
            continue
        compared.add(segments)
        expected = run.parse(segments)
        taken = [(each.sequence, each.nonce) for each in expected.taken]
        assert parse(segments) == (taken, expected.fenced, expected.segment)
    assert len(compared) > 10
