from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparklog import errors
from sparklog.broker.log.producer_state import (
    PRODUCER_REFUSAL_SECONDS,
    PRODUCER_REFUSALS,
    Producers,
    ProducerSequence,
    ProducerState,
    Refusals,
    SequencedBatch,
    advance,
    find_duplicate,
)

LAST = 2**31 - 1


def judge(
    state: ProducerState | None, producer_sequence: ProducerSequence, count: int = 1
) -> SequencedBatch | None:
    """Judges a batch that a producer sends to t-0."""
    return find_duplicate(state, producer_sequence, count, topic="t", partition=0)


def wrote(*batches: tuple[int, int], epoch: int = 0) -> ProducerState:
    """A producer that has written batches of (base sequence, count), ten offsets apart."""
    state: ProducerState | None = None
    for number, (sequence, count) in enumerate(batches):
        state = advance(state, epoch, SequencedBatch(sequence, count, 10 * number, number))
    assert state is not None
    return state


def test_an_unknown_producer_may_begin_anywhere() -> None:
    """Any first sequence is accepted, as in Kafka: the state may have expired."""
    for sequence in (0, 5, LAST):
        assert judge(None, ProducerSequence(7, 3, sequence)) is None


def test_the_next_sequence_is_new() -> None:
    """Sequences count records, so the next batch begins where the last one ended."""
    assert judge(wrote((0, 3), (3, 2)), ProducerSequence(7, 0, 5)) is None


def test_a_repetition_is_recognised() -> None:
    """Each of the last five batches is recognised, with its first offset."""
    state = wrote(*[(number, 1) for number in range(7)])
    for number in range(2, 7):
        found = judge(state, ProducerSequence(7, 0, number))
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
    """A batch that is neither the next one nor a repetition is out of order."""
    with pytest.raises(errors.OutOfOrderSequence) as refused:
        judge(wrote(*[(number, 1) for number in range(7)]), ProducerSequence(7, 0, sequence), count)
    assert refused.value.expected == 7


def test_a_new_epoch_begins_at_zero() -> None:
    """A newer epoch begins at sequence 0, and the batches of the older epoch are dropped."""
    state = wrote((0, 3))
    assert judge(state, ProducerSequence(7, 1, 0)) is None
    with pytest.raises(errors.OutOfOrderSequence):
        judge(state, ProducerSequence(7, 1, 3))
    renewed = advance(state, 1, SequencedBatch(0, 1, 30, 5))
    assert judge(renewed, ProducerSequence(7, 1, 1)) is None
    assert [each.base_offset for each in renewed.recent] == [30]


def test_an_older_epoch_is_fenced() -> None:
    """A producer with an older epoch may not write, not even repeat a batch."""
    with pytest.raises(errors.ProducerFenced) as fenced:
        judge(wrote((0, 3), epoch=2), ProducerSequence(7, 1, 0), 3)
    assert (fenced.value.epoch, fenced.value.current) == (1, 2)


@pytest.mark.parametrize(
    ("base", "count", "following"),
    [(LAST, 1, 0), (LAST - 1, 1, LAST), (LAST, 5, 4), (LAST - 4, 5, 0)],
)
def test_sequences_wrap(base: int, count: int, following: int) -> None:
    """Sequence 0 follows 2**31 - 1, also in the middle of a batch."""
    state = ProducerState(0, (SequencedBatch(base, count, 0, 0),))
    assert judge(state, ProducerSequence(7, 0, following)) is None
    assert judge(state, ProducerSequence(7, 0, base), count) is not None
    with pytest.raises(errors.OutOfOrderSequence):
        judge(state, ProducerSequence(7, 0, following + 1))


@dataclass(frozen=True)
class Sent:
    """A batch that the producer sends, for the first time or again."""

    sequence: int
    count: int


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 8), max_size=3))))
def test_repeated_batches_are_written_once(steps: list[tuple[int, list[int]]]) -> None:
    """Each batch is written exactly once and in order, however often and late it is repeated."""
    state: ProducerState | None = None
    log: list[Sent] = []
    sequence = LAST - 6
    if steps:
        # A producer near the last sequence, so that the sequences wrap.
        state = ProducerState(0, (SequencedBatch(sequence - 1, 1, -1, 0),))
    for count, repetitions in steps:
        sent = Sent(sequence, count)
        sequence = (sequence + count) % (LAST + 1)
        assert judge(state, ProducerSequence(1, 0, sent.sequence), count) is None
        state = advance(state, 0, SequencedBatch(sent.sequence, count, len(log), 0))
        log.append(sent)
        for age in repetitions:
            if age >= len(log):
                continue
            again = log[-1 - age]
            producer_sequence = ProducerSequence(1, 0, again.sequence)
            if age < 5:
                found = judge(state, producer_sequence, again.count)
                assert found is not None
                assert log[found.base_offset] == again
            else:
                with pytest.raises(errors.OutOfOrderSequence):
                    judge(state, producer_sequence, again.count)


# ------------------------------------------------------------------------------ refused in flight


def follows(
    refusals: Refusals, producer_sequence: ProducerSequence, now_seconds: float = 0.0
) -> bool:
    """Returns whether an unknown producer's batch for t-0 is accepted."""
    try:
        refusals.check("id", 0, producer_sequence, now_seconds, topic="t")
    except errors.OutOfOrderSequence:
        return False
    return True


def test_batches_after_a_refused_one_wait_for_it() -> None:
    """A later batch waits until the refused one came again; other batches are accepted at once."""
    refusals = Refusals()
    for sequence in (5, 0, 3):
        refusals.record("id", 0, ProducerSequence(7, 0, sequence), 0.0)
    assert not follows(refusals, ProducerSequence(7, 0, 3))
    assert follows(refusals, ProducerSequence(8, 0, 3))
    assert follows(refusals, ProducerSequence(7, 0, 0))
    assert follows(refusals, ProducerSequence(7, 0, 3))


@pytest.mark.parametrize(
    ("refused", "later", "taken"),
    [(LAST, 2, False), (0, LAST, True), (LAST - 9, LAST, False), (4, 4, True)],
)
def test_refused_sequences_wrap(refused: int, later: int, taken: bool) -> None:
    """Sequence 0 follows 2**31 - 1."""
    refusals = Refusals()
    refusals.record("id", 0, ProducerSequence(7, 0, refused), 0.0)
    assert follows(refusals, ProducerSequence(7, 0, later)) is taken


def test_a_refusal_is_forgotten() -> None:
    """A refusal ends after a time, with a new epoch, or when there are too many refusals."""
    refusals = Refusals()
    refusals.record("id", 0, ProducerSequence(7, 0, 0), 0.0)
    assert not follows(refusals, ProducerSequence(7, 0, 1), PRODUCER_REFUSAL_SECONDS - 1)
    assert follows(refusals, ProducerSequence(7, 0, 1), PRODUCER_REFUSAL_SECONDS)
    refusals.record("id", 0, ProducerSequence(7, 0, 0), 0.0)
    assert follows(refusals, ProducerSequence(7, 1, 1))
    for number in range(PRODUCER_REFUSALS + 1):
        refusals.record("id", 0, ProducerSequence(number, 0, 0), 0.0)
    assert follows(refusals, ProducerSequence(0, 0, 1))
    assert not follows(refusals, ProducerSequence(1, 0, 1))


# ------------------------------------------------------------------------------ many producers


@given(
    st.lists(
        st.tuples(st.integers(0, 600), st.sampled_from(["put", "drop", "changed", "blocks"])),
        max_size=60,
    )
)
def test_snapshots_do_not_change(steps: list[tuple[int, str]]) -> None:
    """A snapshot keeps its states, and the snapshots of changes together hold all states."""
    producers, model = Producers(), dict[int, ProducerState]()
    taken: list[tuple[object, object]] = []
    gathered: dict[int, dict[int, ProducerState]] = {}
    for time_ms, (producer_id, step) in enumerate(steps):
        if step == "put":
            state = ProducerState(0, (SequencedBatch(0, 1, 0, 0),), time_ms)
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
