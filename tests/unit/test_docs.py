"""The reference pages of the documentation, and the faults that fail its build."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import sparklog
from sparklog import errors, sinks, sources
from sparklog.broker.config.topic_config import KEYS
from sparklog.broker.kafka import apis  # noqa: F401  registers them
from sparklog.broker.kafka.registry import APIS
from tests.support import fences
from tools import build_docs


def test_reference_of_topic_configs_has_every_key() -> None:
    """Each configuration key has a row with its type, its default and its effect."""
    page = build_docs.topic_configs()
    for name, key in KEYS.items():
        default = key.default or "(empty)"
        assert f"| `{name}` | `{default}` ({key.rule.kind.value}) | {key.about} |" in page


def test_reference_of_kafka_apis_has_every_request() -> None:
    """Each request that is served has a row with its versions."""
    page = build_docs.kafka_apis()
    for api in APIS.values():
        assert f"| {api.key} | {api.name} | {api.min_version} to {api.max_version} |" in page


def test_reference_of_errors_has_every_error() -> None:
    """Each error with a message of its own has a row, below the kind that it is of."""
    page = build_docs.errors()
    for code, error in errors._all_codes(errors.SparklogError).items():
        if "template" in vars(error) and error is not errors.SparklogError:
            assert page.count(f"| {error.__name__} | `{code}` |") == 1


def test_reference_of_settings_has_every_key() -> None:
    """Each setting has a heading, and text below it."""
    page = build_docs.settings()
    with (build_docs.ROOT / "conf" / "broker.toml").open("rb") as file:
        shipped = tomllib.load(file)
    keys = [f"{at}.{each}" for at, found in shipped.items() for each in _keys_of(found)]
    keys += [at for at, found in shipped.items() if not isinstance(found, dict)]
    assert len(keys) > 30
    for key in keys:
        _, heading, rest = page.partition(f"### {key}\n")
        assert heading, key
        assert len(rest.partition("\n#")[0].split("`\n", 1)[1].strip()) > 20, key


def _keys_of(found: object) -> list[str]:
    return list(found) if isinstance(found, dict) else []


def test_reference_of_the_python_api_has_every_export() -> None:
    """Each export of `sparklog` has a heading, and each method a signature."""
    page = build_docs.python_api()
    for name in {*sparklog.__all__} - {"__version__", "errors", "SparklogError"}:
        assert f"## sparklog.{name}\n" in page
    for package in (sources, sinks):
        for name in package.__all__:
            assert f"## {package.__name__}.{name}\n" in page
    assert "\n#### Log.create_topic\n" in page
    assert "def create_topic(\n    topic: str,\n" in page
    names = re.findall(r"^- `([^`]*)`: ", page, re.MULTILINE)
    assert "storage_options" in names
    assert not [name for name in names if " " in name]  # a second line is no argument of its own


def test_reference_of_the_command_line_has_every_command() -> None:
    """Commands and the commands of groups have a heading each."""
    page = build_docs.cli()
    for command in ("broker", "produce", "consume", "topics create", "groups reset", "check"):
        assert f"\n## `sparklog {command}`\n" in page or f"\n### `sparklog {command}`\n" in page
    assert "* `groups`: List, describe, reset and delete consumer groups.\n" in page
    assert "* `broker`: Run a broker until SIGTERM or Ctrl-C, which shut it down cleanly.\n" in page
    assert not re.search(r"^\* .*\.\.\.$", page, re.MULTILINE)  # no description is cut


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](missing.md)", "page.md: missing.md does not exist"),
        ("![x](missing.svg)", "page.md: missing.svg does not exist"),
        ("[x](../../README.md)", "page.md: ../../README.md is outside the site"),
    ],
)
def test_faulty_links_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    """Links to missing pages and pictures, links out of the site, and unlisted pages are found."""
    monkeypatch.setattr(build_docs, "PAGES", tmp_path)
    (tmp_path / "llms.txt").write_text("# x\n")
    (tmp_path / "page.md").write_text(f"# Page\n\n{text}\n")
    found = build_docs.problems(["page.md"])
    assert problem in found
    assert "page.md: the menu in zensical.toml does not name it" in found
    assert "zensical.toml: the menu names kafka.md, which is missing" in found


@pytest.mark.parametrize("page", fences.pages(), ids=lambda page: page.stem)
def test_blocks_of_code_are_code(page: Path) -> None:
    """Each block parses as its language, and runs in a test or says why not."""
    for fence in fences.fences(page):
        fences.parse(fence)
    opened = len(re.findall(r"^\s*```", page.read_text("utf-8"), re.MULTILINE))
    assert opened == 2 * len(fences.fences(page))


def test_block_that_fails_is_named(tmp_path: Path) -> None:
    """An error in a block has a note with the page and the line."""
    page = fences.ROOT / "docs" / "none.md"
    fence = fences.Fence(page=page, line=7, language="python", words="", code="1 / 0\n")
    with pytest.raises(ZeroDivisionError) as raised:
        fences.Page(tmp_path).run(fence)
    assert raised.value.__notes__ == ["in the block at docs/none.md:7"]


@pytest.mark.parametrize(
    ("expected", "printed", "is_it"),
    [
        ("2000\n", "2000\n", True),
        ("2000\n", "20000\n", False),
        ("2000\n", "", False),
        ("", "2000\n", False),
        ("a  b\n", "a b  \n", True),
        ("a b\n", "a\nb\n", False),
        ("1 up … 4 …\n", "1  up  3  4  standing  vm\n", True),
        ("1 up … 4 …\n", "1  up  3  14  standing  vm\n", False),
        ("1 up … 4\n", "1  up  4\n", False),
        ("…\n2\n", "0\n1\n2\n", True),
        ("…\n2\n", "2\n", True),
        ("…\n2\n", "0\n2\n3\n", False),
        ("a.b\n", "axb\n", False),
    ],
)
def test_output_is_compared(expected: str, printed: str, is_it: bool) -> None:
    """A block of output matches whole lines; `…` stands for words, or for lines."""
    with contextlib.nullcontext() if is_it else pytest.raises(AssertionError, match="printed"):
        fences.assert_printed(expected, printed)


def test_output_that_differs_is_named(tmp_path: Path) -> None:
    """Output is that of the block before, with its ports, and an error names the place."""
    page = fences.Page(tmp_path)
    block = functools.partial(fences.Fence, page=fences.ROOT / "docs" / "none.md", line=7)
    page.run(block(language="bash", words="", code="echo 127.0.0.1:9093\n"))
    page.run(block(language="text", words="output", code="127.0.0.1:9093\n"))
    with pytest.raises(AssertionError) as raised:
        page.run(block(language="text", words="output", code="127.0.0.1:9094\n"))
    assert raised.value.__notes__ == ["in the block at docs/none.md:7"]


@pytest.mark.parametrize(
    ("language", "words", "code"),
    [
        ("python", "", "def"),
        ("bash", "", "if"),
        ("json", "", "{"),
        ("dockerfile", "", "RUM x"),
        ("", "", "text"),
        ("python", "skip", "1"),
        ("bash", "output", "true"),
        ("python", 'no-run=""', "1"),
    ],
)
def test_faulty_blocks_are_refused(language: str, words: str, code: str) -> None:
    """A block that does not parse, has no known language, or names no reason is refused."""
    fence = fences.Fence(
        page=fences.ROOT / "docs" / "none.md", line=1, language=language, words=words, code=code
    )
    with pytest.raises((SyntaxError, ValueError, AssertionError, subprocess.CalledProcessError)):
        fences.parse(fence)
