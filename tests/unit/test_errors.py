"""The errors of sparklog: their codes, messages and round trip over the wire."""

from __future__ import annotations

import inspect
import pickle
import string
from collections.abc import Iterator

import pytest

from sparklog import errors


def _classes(root: type[errors.SparklogError]) -> Iterator[type[errors.SparklogError]]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


CLASSES = [*_classes(errors.SparklogError)][1:]
KINDS = {errors.Retriable, errors.Invalid, errors.Fenced, errors.Corrupt, errors.OutcomeUnknown}


def _names(kind: type[errors.SparklogError]) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(kind.template) if name}


def _example(kind: type[errors.SparklogError]) -> errors.SparklogError:
    return kind(**{name: "" if name == "hint" else "x" for name in _names(kind)})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda each: each.code)
def test_facts_are_declared(kind: type[errors.SparklogError]) -> None:
    """A type checker knows every fact of a message."""
    declared = {name for each in kind.__mro__ for name in inspect.get_annotations(each)}
    assert kind in KINDS or _names(kind) <= declared


def test_every_code_is_unique() -> None:
    """A listener translates codes, so two classes never share one."""
    assert len({each.code for each in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda each: each.code)
def test_every_error_is_documented_and_of_one_kind(kind: type[errors.SparklogError]) -> None:
    """Each class has a docstring of its own and belongs to exactly one kind."""
    assert kind.__doc__
    if kind is not errors.UnexpectedError:
        assert len(KINDS & set(kind.__mro__)) == 1


@pytest.mark.parametrize("kind", CLASSES, ids=lambda each: each.code)
def test_a_message_is_a_sentence(kind: type[errors.SparklogError]) -> None:
    """A message ends with a full stop, unless its whole text is given by the raiser."""
    message = str(_example(kind))
    assert message == "x" or message.endswith(".")
    assert not message.endswith("..")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda each: each.code)
def test_an_error_survives_pickling_and_the_wire(kind: type[errors.SparklogError]) -> None:
    """Message and facts are the same in another process and at a client."""
    error = _example(kind)
    for copy in (pickle.loads(pickle.dumps(error)), errors.revive(error.code, error.facts)):
        assert type(copy) is kind
        assert (str(copy), copy.facts) == (str(error), error.facts)


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("the disk is full", "the disk is full. Send it again."),
        ("The disk is full.", "The disk is full. Send it again."),
        ("is it full?", "is it full? Send it again."),
        ("it begins with 'abc…", "it begins with 'abc… Send it again."),
        ("../..", "../... Send it again."),
    ],
)
def test_a_reason_that_is_a_sentence_gets_no_second_full_stop(reason: str, end: str) -> None:
    """The punctuation of a reason replaces the full stop of the message."""
    assert str(errors.DamagedBatch(reason=reason)).endswith(end)


def test_an_unknown_code_keeps_its_facts() -> None:
    """A client shows the error of a newer broker by its code and its facts."""
    error = errors.revive("of_tomorrow", {"topic": "t"})
    assert str(error) == "of_tomorrow: {'topic': 't'}"


def test_the_most_similar_name_is_found() -> None:
    """Case does not matter, and a name unlike all others has no similar one."""
    assert errors.nearest_name("ORDRES", ["Orders", "flights"]) == "Orders"
    assert errors.nearest_name("zzz", ["Orders", "flights"]) is None
