"""A random sample of the project's sentences: `python -m tests.support.language_sample SEED`.

A reader judges them one by one, and `language_sample.md` records the verdicts. The same seed and
the same tree produce the same sentences.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.language import ROOT, tracked

COUNT: Final = 60
_PAGES: Final = ("sparklog", "docs", "README.md", "CONTRIBUTING.md", "examples", "notebooks")
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")


def draw(seed: int, count: int = COUNT) -> list[tuple[str, str]]:
    """Returns (path, sentence) of `count` different sentences of at least six words."""
    found = {
        (str(path.relative_to(ROOT)), sentence)
        for path in tracked(*_PAGES)
        for paragraph in _paragraphs(path)
        for each in _SENTENCE.split(paragraph)
        if len(re.findall(r"[A-Za-z]{2,}", sentence := " ".join(each.split()))) >= 6
        and sentence.endswith((".", "!", "?"))
    }
    return random.Random(seed).sample(sorted(found), count)


def _paragraphs(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
        lines = [
            line.lstrip("-*> ") if not line.startswith(("|", "#", "<")) else ""
            for line in text.split("\n")
        ]
        yield from "\n".join(lines).split("\n\n")
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from node.value.split("\n\n")


if __name__ == "__main__":
    for where, what in draw(int(sys.argv[1])):
        print(f"{where}\t{what}")  # noqa: T201
