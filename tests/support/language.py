"""The language rules of this project, as a program: `python -m tests.support.language [PATH…]`.

It checks docstrings, comments and messages of Python files, and the prose of Markdown and TOML
files; code, code spans and fences are left alone. A finding is one line: path, line, rule, text.
The rules catch only what a program can. Judging whether a page can be followed takes a reader.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SUFFIXES: Final = (".py", ".md", ".toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A pattern that prose must not match, and the advice for a match."""

    name: str
    pattern: re.Pattern[str]
    advice: str


def _rule(name: str, pattern: str, advice: str, flags: int = re.IGNORECASE) -> Rule:
    return Rule(name=name, pattern=re.compile(pattern, flags), advice=advice)


DOCSTRING: Final = _rule(
    "docstring",
    r"^(What|Who|Whoever|Whatever|Whose|Of|The same|So|How|Where|Whether)\b(?!.*\?$)",
    "begin a docstring with a verb or a noun phrase",
    0,
)
"""For the first line of a docstring only."""

PROSE: Final = (
    _rule("who", r"\b(whoever|whomever|whosoever)\b", "name the subject"),
    _rule(
        "who",
        r"(?:^|[.;:!—(] +|\b(?:and|or|but|of|for|by|to|from|if|is|as) )[Ww]ho (?!are you\b)[^?]*$",
        "name the subject: 'a client that …'",
        0,
    ),
    _rule(
        "what is",
        r"\b(?<!is )(?<!know )what (is|was|are|were|has|had|comes|came|goes|went)\b(?![^.;]*\?)",
        "name the thing: 'the records that …'",
    ),
    _rule("what", r"(?:^|[.;:] )What (?![^.]*\?)", "name the thing: 'the records that …'", 0),
    _rule("he", r"\b(he|him|his|himself|she|hers|herself)\b", "a program is 'it', a person 'they'"),
    _rule("tells", r"\b(tells|told|telling)\b", "reports, returns, logs, names"),
    _rule("stands", r"\b(stands|stood)\b(?! (for|out|in for)\b)", "exists, is, remains"),
    _rule("anew", r"\banew\b", "again"),
    _rule("half again", r"\bhalf as \w+ again\b", "give the ratio: 1.5 ×"),
    _rule(
        "time and again", r"\b(time and again|ever more|ever again)\b", "repeatedly, more and more"
    ),
    _rule(
        "of old",
        r"\b(thereof|therein|whereof|hereby|hence|thus|lest|nought|amidst|whilst)\b",
        "say it plainly",
    ),
    _rule(
        "somebody",
        r"\bsomebody(?:'s| else)?\b|\bnobody(?:'s)?\b",
        "name the party: 'no client', 'another broker'",
    ),
    _rule("goes on", r"\b(goes|go|went|going) on\b", "continues"),
    _rule("for ever", r"\bfor ever\b", "forever"),
    _rule(
        "is no",
        r"(?<!\bthere )(?<!^)\b(is|are|was|were|becomes) no (?!longer|more|less|fewer|other|such"
        r"|way|need|reason|doubt|matter|one\b|different|worse|better|larger|later|harm)\w",
        "'is not a …'",
    ),
    _rule("metadata", r"\bmetadata (have|name|are|do|decide)\b", "metadata is singular: 'has'"),
    _rule(
        "own words",
        r"\b(ledger|bury|buried|wishes|doors?|adopts?|adopted)\b",
        "the field's word: docs/glossary.md",
    ),
)
"""For every sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A text that breaks a rule."""

    path: Path
    line: int
    rule: Rule
    text: str

    def __str__(self) -> str:
        where = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{where}:{self.line}: {self.rule.name} ({self.rule.advice}): {self.text.strip()}"


def check(path: Path) -> list[Finding]:
    """Returns the findings of one file, by line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        parts = [*_of_code(text)]
    elif path.suffix == ".md":
        parts = [*_of_markdown(text)]
    else:
        parts = [*_of_toml(text)]
    found = [each for part in parts for each in _judge(path, *part)]
    return sorted(found, key=lambda each: each.line)


def tracked(*under: str) -> list[Path]:
    """The project's files with prose, below these paths or everywhere."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *under],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    paths = [ROOT / each for each in listed.split("\0") if each.endswith(SUFFIXES)]
    ours = (Path(__file__).resolve(), ROOT / "tests/unit/test_language.py")
    return [each for each in paths if each.exists() and each not in ours]


def _judge(path: Path, line: int, text: str, is_docstring: bool) -> Iterator[Finding]:
    lines = _without_code(text).split("\n")
    if is_docstring and DOCSTRING.pattern.search(lines[0].strip()):
        yield Finding(path=path, line=line, rule=DOCSTRING, text=lines[0])
    for at, each in enumerate(lines):
        for rule in PROSE:
            if rule.pattern.search(each.strip()):
                yield Finding(path=path, line=line + at, rule=rule, text=each)


def _without_code(text: str) -> str:
    """Replaces code spans, URLs and quotations, whose wording is not ours, by `…`."""
    text = re.sub(r"`[^`\n]*`", "`…`", text)
    return re.sub(r"https?://\S+|\"[^\"\n]*\"", "…", text)


def _of_code(text: str) -> Iterator[tuple[int, str, bool]]:
    tree = ast.parse(text)
    docstrings = {id(each) for each in _docstrings(tree)}
    inside = {
        id(part)
        for each in ast.walk(tree)
        if isinstance(each, ast.JoinedStr)
        for part in each.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            message = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
            if _is_prose(message):
                yield node.lineno, message, False
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            if id(node) in docstrings:
                yield node.lineno, node.value, True
            elif _is_prose(node.value):
                yield node.lineno, node.value, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: "), False


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yields strings that are statements: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        for statement in _statements(node):
            value = getattr(statement, "value", None)
            if (
                isinstance(statement, ast.Expr)
                and isinstance(value, ast.Constant)
                and isinstance(value.value, str)
            ):
                yield value


def _statements(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def _is_prose(text: str) -> bool:
    """Returns true for text of several words without program syntax."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and not re.search(
        r"\bSELECT\b|\bimport \w|[{};]\n|^\s*(def|class|from) ", text
    )


def _of_markdown(text: str) -> Iterator[tuple[int, str, bool]]:
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            yield number, line, False


def _of_toml(text: str) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(text.split("\n"), 1):
        if (found := re.match(r"\s*#\s?(.*)", line)) or (found := re.search(r"\s#\s(.*)", line)):
            yield number, found[1], False


def main(arguments: list[str]) -> int:
    """Prints the findings below these paths, or in the whole tree. Returns 1 if there are any."""
    found = [each for path in tracked(*arguments) for each in check(path)]
    for each in found:
        print(each)  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
