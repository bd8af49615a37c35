"""The reference pages of the documentation, and the faults that fail its build."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import sparklog
from sparklog import errors, limits, sinks, sources
from sparklog.broker.kafka import apis  # noqa: F401  registers them
from sparklog.broker.kafka.registry import APIS
from sparklog.formats.topic_config import KEYS
from sparklog.settings import BrokerSettings
from tests.support import fences, links
from tools import build_docs


@functools.cache
def _rendered(name: str) -> str:
    return build_docs.GENERATED[name]()


@pytest.mark.parametrize("name", build_docs.GENERATED)
def test_generated_pages_have_a_page_in_the_repository(name: str) -> None:
    """It has the title of the rendered page, and names `make docs`, which renders the rest."""
    found = (build_docs.SOURCE / name).read_text("utf-8")
    assert found.partition("\n")[0] == _rendered(name).partition("\n")[0]
    assert "`make docs`" in found


def test_reference_of_topic_configs_has_every_key() -> None:
    """Each configuration key has a row with its type, its default and its effect."""
    page = _rendered("reference/topic-configs.md")
    for name, key in KEYS.items():
        default = key.default or "(empty)"
        assert f"| `{name}` | `{default}` ({key.rule.kind.value}) | {key.about} |" in page


def test_reference_of_kafka_apis_has_every_request() -> None:
    """Each request that is served has a row with its versions."""
    page = _rendered("reference/kafka-apis.md")
    for api in APIS.values():
        assert f"| {api.key} | {api.name} | {api.min_version} to {api.max_version} |" in page


def test_reference_of_errors_has_every_error() -> None:
    """Each error with a message of its own has a row, below the kind that it is of."""
    page = _rendered("reference/errors.md")
    for code, error in errors.all_codes(errors.SparklogError).items():
        if "template" in vars(error) and error is not errors.SparklogError:
            assert page.count(f"| {error.__name__} | `{code}` |") == 1


def test_reference_of_settings_has_every_key() -> None:
    """Each setting has a heading, and text below it."""
    page = _rendered("reference/settings.md")
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
    page = _rendered("reference/python-api.md")
    for name in {*sparklog.__all__} - {"__version__", "errors", "SparklogError"}:
        assert f"## sparklog.{name}\n" in page
    for package in (sources, sinks):
        for name in package.__all__:
            assert f"## {package.__name__}.{name}\n" in page
    assert "\n#### Log.create_topic\n" in page
    assert "def create_topic(\n    topic: str,\n" in page
    names = re.findall(r"^- `([^`]*)`: ", page, re.MULTILINE)
    assert "storage_options" in names
    assert not [
        name for name in names if " " in name
    ]  # a second line is not an argument of its own


def test_reference_of_the_command_line_has_every_command() -> None:
    """Commands and the commands of groups have a heading each."""
    page = _rendered("reference/cli.md")
    for command in ("broker", "produce", "consume", "topics create", "groups reset", "check"):
        assert f"\n## `sparklog {command}`\n" in page or f"\n### `sparklog {command}`\n" in page
    assert "* `groups`: List, describe, reset and delete consumer groups.\n" in page
    assert "* `broker`: Run a broker until SIGTERM or Ctrl-C, which shut it down cleanly.\n" in page
    assert not re.search(r"^\* .*\.\.\.$", page, re.MULTILINE)  # no description is cut


def _number(text: str) -> float:
    """Returns the number of `5`, `10,000`, `60 s` or `64 MiB`."""
    amount, _, unit = text.partition(" ")
    return float(amount.replace(",", "")) * (limits.MIB if unit == "MiB" else 1)


def _numbers(call: Callable[..., object]) -> dict[str, float]:
    """The parameters of a call that are numbers, and their defaults."""
    defaults = {each.name: each.default for each in inspect.signature(call).parameters.values()}
    return {name: each for name, each in defaults.items() if type(each) in (int, float)}


def _rows(page: str, heading: str) -> dict[str, float]:
    """The options of the table below a heading, and the numbers that it has as their defaults."""
    text = (fences.ROOT / "docs" / page).read_text("utf-8")
    _, found, below = text.partition(f"\n{heading}\n")
    assert found
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d,]+(?: MiB)?) \|", re.split(r"\n#", below)[0], re.MULTILINE
    )
    return {name: _number(default) for name, default in rows}


@pytest.mark.parametrize(
    ("heading", "call"),
    [("### Producers", sparklog.Log.producer), ("### Consumers", sparklog.Log.consumer)],
)
def test_guide_of_the_client_has_the_defaults_of_the_code(
    heading: str, call: Callable[..., object]
) -> None:
    """Its tables have each number that can be tuned, with its default, and docstrings agree."""
    assert _rows("guides/python-client.md", heading) == _numbers(call)
    text = " ".join((inspect.getdoc(call) or "").split())
    for name, default in _numbers(call).items():
        found = re.search(rf" {name}: [^:]*?([\d,]+(?: MiB| s)?) by default", text)
        assert found is not None, name
        assert _number(found[1]) == default, name


def test_guide_of_groups_has_the_defaults_of_the_code() -> None:
    """Its table of liveness has the defaults of `Log.consumer`."""
    found = _rows("groups.md", "## Which member counts as alive")
    assert len(found) == 4
    assert found.items() <= _numbers(sparklog.Log.consumer).items()


def test_links_to_pages_of_the_root_are_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the site, CHANGELOG.md is a page next to those of docs/, for pages of folders too."""
    source = tmp_path / "docs"
    (source / "guides").mkdir(parents=True)
    (source / "page.md").write_text("[x](../CHANGELOG.md)\n")
    (source / "guides" / "page.md").write_text("[x](../../CHANGELOG.md#fixed) [y](../page.md)\n")
    monkeypatch.setattr(build_docs, "SOURCE", source)
    monkeypatch.setattr(build_docs, "PAGES", tmp_path / "site")
    monkeypatch.setattr(build_docs, "GENERATED", {})
    build_docs.write_pages()
    assert (tmp_path / "site" / "page.md").read_text() == "[x](CHANGELOG.md)\n"
    guide = (tmp_path / "site" / "guides" / "page.md").read_text()
    assert guide == "[x](../CHANGELOG.md#fixed) [y](../page.md)\n"


def test_each_alert_leads_to_its_runbook() -> None:
    """A rule names the section of its own, which says what it means and what to do."""
    rules = yaml.safe_load((build_docs.SOURCE / "operations" / "alerts.yaml").read_text("utf-8"))
    named = [rule for group in rules["groups"] for rule in group["rules"]]
    sections = {}
    for rule in named:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == rule["alert"].lower()  # as headings are made into anchors
        text = (build_docs.ROOT / page).read_text("utf-8")
        found = re.findall(
            rf"^## {rule['alert']}\n\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
        )
        (sections[rule["alert"]],) = found
    assert len(sections) == len(named) > 10
    for alert, text in sections.items():
        for part in ("- **Meaning:** ", "- **Look at:** ", "- **Do:** "):
            assert text.count(part) == 1, alert
    page_text = (build_docs.SOURCE / "operations" / "alerts.md").read_text("utf-8")
    assert {*re.findall(r"^## (\w+)$", page_text, re.MULTILINE)} == sections.keys()


def test_the_sizing_guide_has_the_budgets_and_settings_that_exist() -> None:
    """Its sum is that of the table of budgets, and each setting that it names is one."""
    text = (build_docs.SOURCE / "operations" / "sizing.md").read_text("utf-8")
    table = (build_docs.SOURCE / "brokers.md").read_text("utf-8").partition("### Budgets")[2]
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([\d,]+) MiB", table, re.MULTILINE)
    on_disk = {"unpublished", "staged"}
    total = sum(int(size.replace(",", "")) for name, size in rows if name not in on_disk)
    assert f"| all budgets of memory together | {total:,} MiB at most |" in text
    settings = BrokerSettings()
    named = re.findall(r"`([a-z_]+)\.([a-z_]+)(?: = \d+)?`", text)
    sections = {section for section, _ in named} - {"retention", "cleanup", "fetch", "linger"}
    assert {"kafka", "hot_tail", "publisher", "writer", "flight"} <= sections
    for section, key in named:
        assert section not in sections or hasattr(getattr(settings, section), key), key


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


@pytest.mark.parametrize(
    "page",
    [*fences.pages(), fences.ROOT / "CHANGELOG.md", fences.ROOT / "docs" / "llms.txt"],
    ids=lambda page: page.stem,
)
def test_links_lead_somewhere_without_the_site(page: Path) -> None:
    """Each link leads to a file or heading of the repository, where its host shows the page."""
    assert links.dead_links(page, fences.ROOT) == []


def test_named_modules_exist() -> None:
    """A page that names a file of the code names one that exists; a decision is of its day."""
    root = Path(__file__).parents[2]
    pages = [root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    places = [root / each for each in ("", "sparklog", "sparklog/broker")]
    missing = [
        f"{page.name}: {name}"
        for page in pages
        if page.parent.name != "adr"
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|toml))`", page.read_text("utf-8"))
        if not any((place / name).is_file() for place in places)
    ]
    assert not missing


def test_dead_links_are_found(tmp_path: Path) -> None:
    """Links to missing files and headings, to headings of folders, and out of the root are dead."""
    (tmp_path / "other.md").write_text("# Other\n\n## A & B\n\n## A & B\n\n```\n# No\n```\n")
    (tmp_path / "folder").mkdir()
    page = tmp_path / "page.md"
    page.write_text(
        "# The `page`\n\n[a](other.md) [b](other.md#a--b) ![c](folder/) [d](#the-page)\n"
        "[`[e]`](other.md#a--b-1) [f](https://x.test/y.md) `[g](none.md)` [h\ni](other.md)\n"
        "```\n[j](none.md)\n```\n[`k`](none.md) [l](other.md#a-b) [m](other.md#no) [n](#page)\n"
        "[o](folder#page) [p](..)\n"
    )
    dead = ["none.md", "other.md#a-b", "other.md#no", "#page", "folder#page", ".."]
    assert links.dead_links(page, tmp_path) == [f"page.md: {link}" for link in dead]


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("Set up", "set-up"),
        ("Rows & columns, in 2.0", "rows--columns-in-20"),
        ("`sparklog topics ddl` and *its* [links](x.md)", "sparklog-topics-ddl-and-its-links"),
        ("Two-phase: `txn_app_id`_", "two-phase-txn_app_id_"),
        ("Über `*`", "über-"),
    ],
)
def test_slugs_are_those_of_github(heading: str, slug: str) -> None:
    """Punctuation is dropped, each space becomes a hyphen, and the markup does not count."""
    assert links.slug(heading) == slug


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
