"""The prose of the project follows its language rules: comments, docstrings, messages and pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import language


def test_the_whole_tree_follows_the_rules() -> None:
    """No docstring, comment, message or page breaks a rule of `tests.support.language`."""
    paths = language.tracked()
    assert len(paths) > 400
    assert [str(each) for path in paths for each in language.check(path)] == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""Of all readers together."""', "docstring"),
        ('def work():\n    """Whether it ends."""', "docstring"),
        ('class A:\n    x = 1\n    """How many there are."""', "docstring"),
        ('"""Returns records, and what is left."""', "what is"),
        ("x = 1  # whoever asks first", "who"),
        ("x = 1  # the broker tells the client", "tells"),
        ('raise ValueError(f"the topic {name} stands in the table already")', "stands"),
        ("x = 1  # the query goes on", "goes on"),
        ("x = 1  # a broker and his clients", "he"),
        ("x = 1  # encoded anew", "anew"),
        ("x = 1  # nobody waits for it", "somebody"),
        ("x = 1  # half as fast again", "half again"),
        ("x = 1  # guarded by the ledger", "own words"),
        ("x = 1  # it waits for ever", "for ever"),
        ("x = 1  # a folder that is no root", "is no"),
        ("x = 1  # the metadata have another leader", "metadata"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, text: str, rule: str) -> None:
    """Each rule finds a sentence that breaks it, in any kind of text."""
    path = tmp_path / "module.py"
    path.write_text(text, encoding="utf-8")
    assert {each.rule.name for each in language.check(path)} == {rule}


@pytest.mark.parametrize(
    "text",
    [
        '"""Returns the records of a partition."""',
        "x = 1  # `ledger` and `told` are names of another library",
        'stands = "door"',
        "x = 1  # who are you?",
        "x = 1  # a user who reads this",
        "x = 1  # there is no broker, and it is no longer awaited",
    ],
)
def test_plain_sentences_and_code_pass(tmp_path: Path, text: str) -> None:
    """Names, code spans, short strings and questions are not judged."""
    path = tmp_path / "module.py"
    path.write_text(text, encoding="utf-8")
    assert language.check(path) == []


def test_code_of_a_page_is_not_judged(tmp_path: Path) -> None:
    """Fences and code spans of Markdown are left alone, its sentences are not."""
    path = tmp_path / "page.md"
    path.write_text("Run `nobody`.\n\n```sh\necho nobody\n```\n\nNobody waits.\n", encoding="utf-8")
    assert [each.line for each in language.check(path)] == [7]
