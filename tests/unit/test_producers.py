from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors, limits
from sparklog.broker.producers import (
    Producers,
    ProducerState,
    Refusals,
    Stamp,
    Written,
    advance,
    find_duplicate,
)

LAST = 2**31 - 1


def judge(state: ProducerState | None, stamp: Stamp, count: int = 1) -> Written | None:
    """What becomes of a batch that somebody sends to t-0."""
    return find_duplicate(state, stamp, count, topic="t", partition=0)


def wrote(*batches: tuple[int, int], epoch: int = 0) -> ProducerState:
    """A producer that has written batches of (base sequence, count), ten offsets apart."""
    state: ProducerState | None = None
    for number, (sequence, count) in enumerate(batches):
        state = advance(state, epoch, Written(sequence, count, 10 * number, number))
    assert state is not None
    return state


def test_an_unknown_producer_may_begin_anywhere() -> None:
    """As in Kafka, where it may have been forgotten or its topic created again."""
    for sequence in (0, 5, LAST):
        assert judge(None, Stamp(7, 3, sequence)) is None


def test_the_next_sequence_is_new() -> None:
    """Sequences count records, so the next batch begins where the last one ended."""
    assert judge(wrote((0, 3), (3, 2)), Stamp(7, 0, 5)) is None


def test_a_repetition_is_recognised() -> None:
    """Each of the last five batches is known again, with the offset where it stands."""
    state = wrote(*[(number, 1) for number in range(7)])
    for number in range(2, 7):
        found = judge(state, Stamp(7, 0, number))
        assert found is not None
        assert found.base_offset == 10 * number


@pytest.mark.parametrize(
    ("sequence", "count"),
    [
        (1, 1),  # forgotten: the sixth last
        (6, 2),  # the newest, and longer
        (2, 5),  # all of them in one
        (8, 1),  # a gap
        (LAST, 1),
    ],
)
def test_a_gap_or_another_batch_is_refused(sequence: int, count: int) -> None:
    """What is neither the next batch nor a repetition is out of order."""
    with pytest.raises(errors.OutOfOrderSequence) as refused:
        judge(wrote(*[(number, 1) for number in range(7)]), Stamp(7, 0, sequence), count)
    assert refused.value.expected == 7


def test_a_new_epoch_begins_at_zero() -> None:
    """A producer that got a newer epoch starts over, and its old batches are forgotten."""
    state = wrote((0, 3))
    assert judge(state, Stamp(7, 1, 0)) is None
    with pytest.raises(errors.OutOfOrderSequence):
        judge(state, Stamp(7, 1, 3))
    renewed = advance(state, 1, Written(0, 1, 30, 5))
    assert judge(renewed, Stamp(7, 1, 1)) is None
    assert [each.base_offset for each in renewed.recent] == [30]


def test_an_older_epoch_is_fenced() -> None:
    """Who was replaced may not write, not even what stands already."""
    with pytest.raises(errors.ProducerFenced) as fenced:
        judge(wrote((0, 3), epoch=2), Stamp(7, 1, 0), 3)
    assert (fenced.value.epoch, fenced.value.current) == (1, 2)


@pytest.mark.parametrize(
    ("base", "count", "following"),
    [(LAST, 1, 0), (LAST - 1, 1, LAST), (LAST, 5, 4), (LAST - 4, 5, 0)],
)
def test_sequences_wrap(base: int, count: int, following: int) -> None:
    """After 2**31 - 1 comes 0, in the middle of a batch as well."""
    state = ProducerState(0, (Written(base, count, 0, 0),))
    assert judge(state, Stamp(7, 0, following)) is None
    assert judge(state, Stamp(7, 0, base), count) is not None
    with pytest.raises(errors.OutOfOrderSequence):
        judge(state, Stamp(7, 0, following + 1))


@dataclass(frozen=True)
class Sent:
    """A batch that the producer has sent, now or before."""

    sequence: int
    count: int


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 8), max_size=3))))
def test_whatever_is_sent_again_stands_once(steps: list[tuple[int, list[int]]]) -> None:
    """With repetitions of any age in any order, each batch is written exactly once, in order."""
    state: ProducerState | None = None
    log: list[Sent] = []
    sequence = LAST - 6
    if steps:
        # A producer that has come far, so that the sequences wrap.
        state = ProducerState(0, (Written(sequence - 1, 1, -1, 0),))
    for count, repetitions in steps:
        sent = Sent(sequence, count)
        sequence = (sequence + count) % (LAST + 1)
        assert judge(state, Stamp(1, 0, sent.sequence), count) is None
        state = advance(state, 0, Written(sent.sequence, count, len(log), 0))
        log.append(sent)
        for age in repetitions:
            if age >= len(log):
                continue
            again = log[-1 - age]
            stamp = Stamp(1, 0, again.sequence)
            if age < 5:
                found = judge(state, stamp, again.count)
                assert found is not None
                assert log[found.base_offset] == again
            else:
                with pytest.raises(errors.OutOfOrderSequence):
                    judge(state, stamp, again.count)


# ------------------------------------------------------------------------------ refused in flight


def follows(refusals: Refusals, stamp: Stamp, now_seconds: float = 0.0) -> bool:
    """Whether an unknown producer's batch for t-0 is taken."""
    try:
        refusals.check("id", 0, stamp, now_seconds, topic="t")
    except errors.OutOfOrderSequence:
        return False
    return True


def test_what_follows_a_refused_batch_waits_for_it() -> None:
    """Until the refused one came again; others, and those before it, are taken at once."""
    refusals = Refusals()
    for sequence in (5, 0, 3):
        refusals.note("id", 0, Stamp(7, 0, sequence), 0.0)
    assert not follows(refusals, Stamp(7, 0, 3))
    assert follows(refusals, Stamp(8, 0, 3))
    assert follows(refusals, Stamp(7, 0, 0))
    assert follows(refusals, Stamp(7, 0, 3))


@pytest.mark.parametrize(
    ("refused", "later", "taken"),
    [(LAST, 2, False), (0, LAST, True), (LAST - 9, LAST, False), (4, 4, True)],
)
def test_refused_sequences_wrap(refused: int, later: int, taken: bool) -> None:
    """After 2**31 - 1 comes 0."""
    refusals = Refusals()
    refusals.note("id", 0, Stamp(7, 0, refused), 0.0)
    assert follows(refusals, Stamp(7, 0, later)) is taken


def test_a_refusal_is_forgotten() -> None:
    """Once its client has given up: after some time, with a new epoch, or where there are many."""
    refusals = Refusals()
    refusals.note("id", 0, Stamp(7, 0, 0), 0.0)
    assert not follows(refusals, Stamp(7, 0, 1), limits.PRODUCER_REFUSAL_SECONDS - 1)
    assert follows(refusals, Stamp(7, 0, 1), limits.PRODUCER_REFUSAL_SECONDS)
    refusals.note("id", 0, Stamp(7, 0, 0), 0.0)
    assert follows(refusals, Stamp(7, 1, 1))
    for number in range(limits.PRODUCER_REFUSALS + 1):
        refusals.note("id", 0, Stamp(number, 0, 0), 0.0)
    assert follows(refusals, Stamp(0, 0, 1))
    assert not follows(refusals, Stamp(1, 0, 1))


# ------------------------------------------------------------------------------ many producers


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.sampled_from(["put", "drop", "changed", "blocks"])),
        max_size=60,
    )
)
def test_snapshots_do_not_change(steps: list[tuple[int, str]]) -> None:
    """Each holds what stood when it was taken, and those of changes together hold everything."""
    producers, model = Producers(), dict[int, ProducerState]()
    taken: list[tuple[object, object]] = []
    gathered: dict[int, dict[int, ProducerState]] = {}
    for time_ms, (producer_id, step) in enumerate(steps):
        if step == "put":
            state = ProducerState(0, (Written(0, 1, 0, 0),), time_ms)
            producers.put(producer_id, state)
            model.pop(producer_id, None)
            model[producer_id] = state
        elif step == "drop":
            producers.drop(producer_id)
            model.pop(producer_id, None)
        elif step == "changed":
            changed = producers.changed()
            taken.append((changed, {number: dict(block) for number, block in changed.items()}))
            gathered.update({number: dict(block) for number, block in changed.items()})
            assert {k: v for block in gathered.values() for k, v in block.items()} == model
        else:
            blocks = producers.blocks()
            taken.append((blocks, [dict(block) for block in blocks]))
            assert {k: v for block in blocks for k, v in block.items()} == model
        assert list(producers) == list(model)
        assert producers.oldest() == next(iter(model), None)
        assert producers.get(producer_id) == model.get(producer_id)
    assert all(held == copy for held, copy in taken)
