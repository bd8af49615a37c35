"""Builds the documentation site from docs/: `python -m tools.build_docs`.

The pages of docs/, CONTRIBUTING.md and CHANGELOG.md are copied to build/docs. The pages of
`GENERATED` replace some of them, rendered from the code so that they cannot differ from it.
Zensical builds build/site from all of them. In docs/, a generated page only states where its
contents come from, so that links to it also work on a repository host. The build fails on broken
links and anchors, missing pages and images, and pages that are not in the menu.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "docs"
PAGES: Final = ROOT / "build" / "docs"
COPIED: Final = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages in the project root. On the site they are in docs/, so links to and from them differ."""

_WIDE: Final = 72
_NOTE: Final = "*This page is generated from {source}.*"
_FENCE: Final = re.compile(r"^(\s*```\w+) .*$", re.MULTILINE)
_LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


# ------------------------------------------------------------------------------ reference pages


def python_api() -> str:
    """The public names of the packages, with signatures and docstrings."""
    import sparklog
    from sparklog import sinks, sources
    from sparklog.formats import consumer_offsets, flight_messages, group_messages

    parts = [
        "# Python API",
        _NOTE.format(source="the docstrings"),
        "The errors are listed in [Errors](errors.md).",
        "## sparklog",
        *_function("sparklog.connect", sparklog.connect),
    ]
    modules = []
    for name in sorted({*sparklog.__all__} - {"__version__", "connect", "errors", "SparklogError"}):
        found = getattr(sparklog, name)
        if inspect.ismodule(found):
            modules.append(found)
        else:
            parts += _export(f"sparklog.{name}", found)
    for module in modules:
        parts += [f"## {module.__name__}", *_docstring(module)]
        for name in module.__all__:
            parts += _export(f"{module.__name__}.{name}", getattr(module, name))
    for package in (sources, sinks):
        parts += [f"## {package.__name__}"]
        for name in package.__all__:
            parts += _export(f"{package.__name__}.{name}", getattr(package, name))
    parts += [
        "## sparklog.formats.consumer_offsets",
        *_function("sparklog.formats.consumer_offsets.committed", consumer_offsets.committed),
        "## Values that calls return",
    ]
    for found in (
        flight_messages.TopicInfo,
        flight_messages.ClusterInfo,
        group_messages.GroupInfo,
        flight_messages.BrokerStatus,
    ):
        parts += _class(f"{found.__module__}.{found.__name__}", found)
    return "\n\n".join(parts) + "\n"


def cli() -> str:
    """The commands of `sparklog`, as Typer describes them."""
    import typer

    from sparklog.cli import app

    done = subprocess.run(
        [sys.executable, "-m", "typer", "sparklog.cli", "utils", "docs", "--name", "sparklog"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    _, _, text = done.stdout.partition("\n")
    for name, command in _commands(typer.main.get_command(app)):
        # Typer truncates the descriptions in its command lists to 45 characters.
        about, _, _ = inspect.cleandoc(command.help or "").partition("\n\n")
        cut = f"* `{name}`: {command.get_short_help_str()}\n"
        text = text.replace(cut, f"* `{name}`: {' '.join(about.split())}\n")
    return "# Command line\n\n" + _NOTE.format(source="`sparklog/cli`") + "\n" + text


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield name, command
        if hasattr(command, "commands"):
            yield from _commands(command)


def settings() -> str:
    """All keys of `conf/broker.toml`, with their defaults and comments."""
    head, sections = _settings()
    parts = [
        "# Settings of a broker",
        _NOTE.format(source="`conf/broker.toml`"),
        head,
        (
            "Each setting has an environment variable: `SPARKLOG_`, the section and the key in"
            " capital letters. `writer.linger_ms` is `SPARKLOG_WRITER_LINGER_MS`."
        ),
    ]
    for section, about, keys in sections:
        if section:
            parts.append(f"## [{section}]")
        if about:
            parts.append(about)
        for key, default, text in keys:
            parts += [f"### {section + '.' if section else ''}{key}", f"Default: `{default}`", text]
    return "\n\n".join(parts) + "\n"


def topic_configs() -> str:
    """All configuration keys of a topic."""
    from sparklog.formats.topic_config import KEYS

    rows = [
        f"| `{name}` | `{key.default or '(empty)'}` ({key.rule.kind.value}) | {key.about} |"
        for name, key in KEYS.items()
    ]
    return "\n".join(
        [
            "# Configuration of topics",
            "",
            _NOTE.format(source="`sparklog/formats/topic_config.py`"),
            (
                "Keys, types and bounds are those of Kafka 4.1."
                " [Kafka compatibility](../kafka.md#configuration-of-topics) describes how values"
                " are set, and why some defaults differ from Kafka's."
            ),
            "",
            "| key | default | effect |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def errors() -> str:
    """All errors with their codes and messages, by kind, and the remedy for each kind."""
    from sparklog import errors as module

    kinds = {
        module.Retriable: "Retry; the request had no effect. Clients of sparklog and of Kafka do so"
        " on their own until their timeout.",
        module.Invalid: "Correct the request; it had no effect, and repeating it does not help.",
        module.Fenced: "Stop. A newer broker, producer or member has taken over.",
        module.Corrupt: "Inspect the named object. Its bytes are not those that were written, or"
        " another program has changed or removed them.",
        module.OutcomeUnknown: "Check before you repeat the request: it may have taken effect."
        " Idempotent producers repeat it safely on their own.",
    }
    parts = [
        "# Errors",
        _NOTE.format(source="`sparklog/errors`"),
        (
            "All errors are in `sparklog.errors` and derive from `SparklogError`. The kind"
            " determines the remedy; `error.code` is stable, and `error.facts` contains the"
            " values in the message."
        ),
    ]
    for kind, remedy in kinds.items():
        found = [each for each in _subclasses(kind) if "template" in vars(each)]
        rows = [_error_row(each) for each in found]
        parts += [
            f"## {kind.__name__}",
            remedy,
            "\n".join(["| error | code | message |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def decisions() -> str:
    """The titles of the architecture decision records, with links."""
    rows = []
    for path in sorted((SOURCE / "adr").glob("[0-9]*.md")):
        title, _, _ = path.read_text(encoding="utf-8").partition("\n")
        rows.append(f"- [{title.removeprefix('# ')}]({path.name})".replace(". ", "\\. ", 1))
    return "\n".join(
        [
            "# Decisions",
            "",
            "Each record (ADR) states a decision, its reasons, the alternatives, and its cost.",
            "",
            *rows,
            "",
        ]
    )


def kafka_apis() -> str:
    """All requests of Kafka's protocol that a broker supports, with their versions."""
    import sparklog.broker.kafka.apis  # noqa: F401  registers them
    from sparklog.broker.kafka.registry import APIS

    rows = [
        f"| {api.key} | {api.name} | {api.min_version} to {api.max_version} |"
        for api in sorted(APIS.values(), key=lambda api: api.key)
    ]
    return "\n".join(
        [
            "# Kafka APIs",
            "",
            _NOTE.format(source="`sparklog/broker/kafka/registry.py`"),
            (
                "`find_coordinator` supports only consumer groups: for transactions and share"
                " groups it returns INVALID_REQUEST. A request that is not in this table closes"
                " its connection, as on a Kafka broker that does not support it. The"
                " differences from Kafka are listed in [Kafka compatibility](../kafka.md)."
            ),
            "",
            "| key | request | versions |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


GENERATED: Final[dict[str, Callable[[], str]]] = {
    "adr/index.md": decisions,
    "reference/python-api.md": python_api,
    "reference/cli.md": cli,
    "reference/settings.md": settings,
    "reference/topic-configs.md": topic_configs,
    "reference/errors.md": errors,
    "reference/kafka-apis.md": kafka_apis,
}
"""Paths under build/docs, and the functions that render them."""


def _export(name: str, found: Any) -> list[str]:
    return _class(name, found) if inspect.isclass(found) else _function(name, found)


def _function(name: str, found: Any, level: int = 3) -> list[str]:
    signature = inspect.signature(found)
    shown = []
    starred = False
    for each in signature.parameters.values():
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        starred |= each.kind is inspect.Parameter.VAR_POSITIONAL
        if each.name != "self":
            shown.append(_parameter(each))
    returned = signature.return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {returned}"
    inner = ", ".join(shown)
    if len(inner) > _WIDE:
        inner = "".join(f"\n    {each}," for each in shown) + "\n"
    code = f"def {name.rpartition('.')[2]}({inner}){arrow}"
    return [f"{'#' * level} {name}", f"```python\n{code}\n```", *_docstring(found)]


def _parameter(parameter: inspect.Parameter) -> str:
    """`name: type = default`; the type is a string, because annotations are not evaluated."""
    name = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    name += parameter.name
    if parameter.annotation is not parameter.empty:
        name += f": {parameter.annotation}"
    return name if parameter.default is parameter.empty else f"{name} = {parameter.default!r}"


def _class(name: str, found: type) -> list[str]:
    parts = [f"### {name}", *_docstring(found)]
    ours = [base for base in found.__mro__ if base.__module__.startswith("sparklog.")]
    members = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    for member, value in members.items():
        if member.startswith("_"):
            continue
        if inspect.isfunction(value):
            parts += _function(f"{found.__name__}.{member}", value, level=4)
        elif isinstance(value, (property, classmethod)) and inspect.getdoc(value):
            parts += [f"#### {found.__name__}.{member}", *_docstring(value)]
    notes = inspect.get_annotations(found)
    if fields := [name for name in notes if not name.startswith("_")]:
        parts.append("\n".join(f"- `{name}`: `{notes[name]}`" for name in fields))
    return parts


def _docstring(found: Any) -> list[str]:
    """The docstring as Markdown: the entries of its sections become lists."""
    text = inspect.getdoc(found) or ""
    if inspect.isclass(found) and text.startswith(f"{found.__name__}("):
        return []  # generated by dataclasses or NamedTuple
    lines: list[str] = []
    in_section = False
    for line in text.split("\n"):
        if re.fullmatch(r"(Args|Raises|Returns|Yields):", line):
            in_section = True
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif in_section and (entry := re.match(r"    (\*{0,2}\w[\w., ]*): ?(.*)", line)):
            names = ", ".join(f"`{name.strip()}`" for name in entry[1].split(",") if name)
            lines.append(f"- {names}: {entry[2]}")
        elif in_section and (wrapped := re.fullmatch(r"    (\w[\w., ]*),", line)):
            lines.append("- " + ", ".join(f"`{error.strip()}`" for error in wrapped[1].split(",")))
        else:
            in_section &= line.startswith(" ") or not line
            lines.append(line.strip() if in_section else line)
    return ["\n".join(lines)] if text else []


def _subclasses(kind: type[object]) -> Iterator[type[object]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)


def _error_row(error: Any) -> str:
    message = re.sub(r"\{(\w+)(?:!r|:[^}]*)?\}", r"<\1>", error.template).replace("|", "\\|")
    about = inspect.cleandoc(vars(error).get("__doc__") or "").replace("\n", " ")
    extra = f"<br>{about}" if about and error.code != error.__name__.lower() else ""
    return f"| {error.__name__} | `{error.code}` | `{message}`{extra} |"


_Section = tuple[str, str, list[tuple[str, str, str]]]


def _settings() -> tuple[str, list[_Section]]:
    """The head comment of conf/broker.toml, and its sections: name, comment and keys."""
    head = ""
    sections: list[_Section] = [("", "", [])]
    comment: list[str] = []
    for line in (ROOT / "conf" / "broker.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
        elif found := re.fullmatch(r"\[(\w+)\]", line):
            sections.append((found[1], "\n".join(comment), []))
            comment = []
        elif found := re.match(r"(\w+) = (.+)", line):
            sections[-1][2].append((found[1], found[2], "\n".join(comment)))
            comment = []
        elif not head and comment:
            head, comment = "\n".join(comment), []
    return head, sections


# ------------------------------------------------------------------------------ the site


def write_pages() -> list[str]:
    """Writes all pages to build/docs, and returns their paths relative to it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(SOURCE, PAGES)
    for name in COPIED:
        text = (ROOT / name).read_text(encoding="utf-8")
        (PAGES / name).write_text(text.replace("](docs/", "]("), encoding="utf-8")
    for name, render in GENERATED.items():
        path = PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(), encoding="utf-8")
    pages = sorted(PAGES.rglob("*.md"))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        up = "../" * len(page.parent.relative_to(PAGES).parts)
        for name in COPIED:
            text = text.replace(f"]({up}../{name}", f"]({up}{name}")
        page.write_text(_FENCE.sub(r"\1", text), encoding="utf-8")  # drops words for tests
    return [str(each.relative_to(PAGES)) for each in pages]


def problems(pages: list[str]) -> list[str]:
    """Returns faults that Zensical does not report: of the menu, images and docs/llms.txt."""
    with (ROOT / "zensical.toml").open("rb") as file:
        menu = set(_leaves(tomllib.load(file)["project"]["nav"]))
    found = [f"zensical.toml: the menu names {each}, which is missing" for each in menu - {*pages}]
    listed = {each for each in pages if each.startswith("adr/0")}
    unnamed = {*pages} - menu - listed
    found += [f"{each}: the menu in zensical.toml does not name it" for each in unnamed]
    for name in [*pages, "llms.txt"]:
        text = re.sub(r"```.*?```", "", (PAGES / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in _LINK.findall(text):
            target, _, _ = link.partition("#")
            if "://" in link or not target:
                continue
            if not ((PAGES / name).parent / target).resolve().is_relative_to(PAGES):
                found.append(f"{name}: {link} is outside the site")
            elif not ((PAGES / name).parent / target).is_file():
                found.append(f"{name}: {link} does not exist")
    return sorted(found)


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(each)


def main() -> int:
    """Builds the site. If it has faults, prints them and returns 1."""
    if found := problems(write_pages()):
        print("\n".join(found))
        return 1
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        report, _, _ = (done.stdout + done.stderr).partition("Traceback (most recent call last)")
        print(re.sub(r"\x1b\[[0-9;]*m", "", report))
        return 1
    print(f"{ROOT / 'build' / 'site' / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
