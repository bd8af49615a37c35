"""Runs the code blocks of a Markdown page, in order, as its reader would.

Rules for a block, by the words after its language:

- `python`, `bash` and `sql` run. Python blocks of a page share their names; `sql` runs in the
  page's Spark session.
- Jobs, `python -m sparklog.jobs.…`, run in the page's Spark session instead of a new one each.
- `background`: the broker runs until the end of the page; the next block waits for the line that it
  prints once it serves.
- `no-run="reason"`: the block is only parsed.
- `toml`, `json`, `yaml` and `dockerfile` are parsed. `text` and `diff` are not code.
- `output`, on a `text` block: the preceding bash block prints this. A line `…` matches any lines,
  and `…` between words any words; the amount of white space does not matter.

The ports of `PORTS` in addresses are replaced by free ones, so that pages
can run concurrently.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import yaml
from typer.testing import CliRunner

from sparklog.jobs.running import app_of
from tests.support import preloaded
from tests.support.ports import quiet_port

ROOT: Final = Path(__file__).resolve().parents[2]
RUNS: Final = ("python", "bash", "sql")
PARSED: Final = ("toml", "json", "yaml", "dockerfile")
NO_CODE: Final = ("text", "diff")
INSTRUCTIONS: Final = (
    "FROM",
    "RUN",
    "COPY",
    "ENV",
    "EXPOSE",
    "ENTRYPOINT",
    "CMD",
    "USER",
    "VOLUME",
)
SECONDS: Final = 120
PORTS: Final = (
    *("8815", "8816", "8817", "8818", "8819", "8915", "8992", "8993"),
    *("9092", "9093", "9094", "9095", "9192", "9292", "9293", "9404"),
)

_FENCE: Final = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_NO_RUN: Final = re.compile(r'no-run="([^"]{8,})"')
_ADDRESS: Final = re.compile(rf"\b(127\.0\.0\.1|localhost):({'|'.join(PORTS)})\b")
_PORT_OPTION: Final = re.compile(rf"(-port) ({'|'.join(PORTS)})\b")
_JOB: Final = re.compile(
    r"^python -m sparklog\.jobs\.(?P<name>\w+) +(?P<words>.*)$", re.MULTILINE | re.DOTALL
)
_ANYTHING: Final = r"\S(?:.*\S)?"
_LINES: Final = r"(?:.*\n)*?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    words: str
    """Info string after the language: empty, `background`, `output`, or a reason not to run it."""
    code: str

    @property
    def runs(self) -> bool:
        return self.language in RUNS and not self.words.startswith("no-run")

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.words == "output"

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and all pages of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fences(page: Path) -> list[Fence]:
    """The code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, words = match["info"].partition(" ")
        line = text.count("\n", 0, match.start()) + 1
        found.append(
            Fence(page=page, line=line, language=language, words=words, code=match["code"])
        )
    return found


def needs_spark(page: Path) -> bool:
    """Returns true if a block that runs uses the name `spark`, is SQL, or runs a job."""
    return any(
        each.language == "sql"
        or (each.language == "python" and re.search(r"\bspark\b", each.code))
        or "sparklog.jobs." in each.code
        for each in fences(page)
        if each.runs
    )


def parse(fence: Fence) -> None:
    """Raises an error if the block does not parse in its language, or its words are unknown."""
    if fence.words and fence.words != "background" and not fence.is_output:
        assert _NO_RUN.fullmatch(fence.words), f"{fence.where}: what is {fence.words!r}?"
    match fence.language:
        case "python":
            ast.parse(fence.code)
        case "bash":
            subprocess.run(
                ["bash", "-n"], input=fence.code, text=True, check=True, capture_output=True
            )
        case "toml":
            tomllib.loads(fence.code)
        case "json":
            json.loads(fence.code)
        case "yaml":
            yaml.safe_load(fence.code)
        case "dockerfile":
            joined = fence.code.replace("\\\n", " ").splitlines()
            for line in filter(str.strip, joined):
                assert line.startswith((*INSTRUCTIONS, "#")), f"{fence.where}: {line}"
        case "sql":
            assert fence.code.strip()
        case other:
            assert other in NO_CODE, f"{fence.where}: a block of language {other!r}"


class Page:
    """A run of a page in a folder: its Python names, its ports and its background commands."""

    def __init__(self, folder: Path, **names: Any) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__", **names}
        self._given = {*self._names}
        self._ports = {each: quiet_port() for each in PORTS}
        self._printed = ""
        self._running: list[subprocess.Popen[bytes]] = []
        programs = folder.with_name(f"{folder.name}-bin")
        programs.mkdir()
        path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = os.environ | {
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(ROOT),
            "SPARKLOG_FLIGHT_LISTEN": f"127.0.0.1:{self._ports['8815']}",
            "SPARKLOG_KAFKA_LISTEN": f"127.0.0.1:{self._ports['9092']}",
        }
        preloaded.launcher(programs / "sparklog", "-m sparklog")

    def run(self, fence: Fence) -> None:
        """Runs a block. Raises its error, with the block's location."""
        code = self._with_ports(fence.code)
        if fence.language != "bash":  # Spark's workers have another working directory
            code = code.replace('"./', f'"{self._folder}/').replace("'./", f"'{self._folder}/")
        try:
            if fence.is_output:
                assert_printed(code, self._printed)
            elif fence.language == "bash" and _JOB.search(code) and "spark" in self._given:
                self._jobs(code)
            elif fence.language == "bash":
                self._bash(code, background=fence.words == "background")
            elif fence.language == "sql":
                for statement in filter(str.strip, code.split(";")):
                    self._names["spark"].sql(statement).collect()
            else:
                self._python(code, fence)
        except BaseException as error:
            error.add_note(f"in the block at {fence.where}")
            raise

    def _with_ports(self, code: str) -> str:
        code = _PORT_OPTION.sub(lambda found: f"{found[1]} {self._ports[found[2]]}", code)
        return _ADDRESS.sub(lambda found: f"127.0.0.1:{self._ports[found[2]]}", code)

    def _python(self, code: str, fence: Fence) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, which a reader sees only once
            exec(compile(code, fence.where, "exec"), self._names)

    def _jobs(self, code: str) -> None:
        """Runs a block line by line: jobs here, as `python -m` does, other commands with bash."""
        printed = ""
        for line in code.replace("\\\n", " ").splitlines():
            if found := _JOB.match(line):
                name, words = found["name"], shlex.split(found["words"])
                job = getattr(importlib.import_module(f"sparklog.jobs.{name}"), name)
                result = CliRunner().invoke(app_of(job), [self._absolute(each) for each in words])
                assert result.exit_code == 0, f"{line}\n{result.output}"
                printed += result.stdout
            else:
                self._bash(line, background=False)
                printed += self._printed
        self._printed = printed

    def _absolute(self, word: str) -> str:
        """Returns the word, made absolute if it is a path in the page's folder."""
        is_path = word.startswith("./") or (self._folder / word).exists()
        return str(self._folder / word) if is_path else word

    def _bash(self, code: str, *, background: bool) -> None:
        self._environment |= preloaded.variables("brokers")
        command = ["bash", "-euo", "pipefail", "-c", code]
        environment = self._environment
        if "--config" in code and "--root" not in code:  # the file has the addresses too
            environment = {
                name: value for name, value in environment.items() if not name.endswith("_LISTEN")
            }
        if background:
            with tempfile.TemporaryFile() as printed:
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {code}"],
                    cwd=self._folder, env=environment,
                    stdout=printed, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                self._running.append(process)
                _await_line(process, printed)
            return
        done = subprocess.run(
            command, cwd=self._folder, env=environment, check=False, timeout=SECONDS,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}\n{done.returncode}"
        self._printed = done.stdout

    def close(self) -> None:
        """Closes what the page left open, and ends its background commands."""
        made = [value for name, value in self._names.items() if name not in self._given]
        for value in reversed(made):
            end = getattr(value, "stop", None) if hasattr(value, "lastProgress") else None
            end = end or (getattr(value, "close", None) if not isinstance(value, type) else None)
            if callable(end) and type(value).__module__.startswith(
                ("sparklog", "kafka", "pyspark")
            ):
                with contextlib.suppress(Exception):
                    end()
        for process in self._running:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # if a block has suspended it
            process.wait(SECONDS)


def _await_line(process: subprocess.Popen[bytes], printed: IO[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the command in the background has ended"
        if b" serves " in os.pread(printed.fileno(), 4096, 0):
            return
        time.sleep(0.1)
    raise AssertionError("the command in the background does not serve")


def run_page(page: Path, folder: Path, **names: Any) -> int:
    """Runs the blocks of a page; `./` is the folder. Returns their number."""
    wanted = [each for each in fences(page) if each.runs or each.is_output]
    run = Page(folder, **names)
    try:
        for each in wanted:
            run.run(each)
    finally:
        run.close()
    return len(wanted)


def assert_printed(expected: str, printed: str) -> None:
    """Raises `AssertionError` if the lines do not match those of an output block."""
    pattern = ""
    for line in expected.splitlines():
        words = [_ANYTHING if each == "…" else re.escape(each) for each in line.split()]
        pattern += _LINES if line.strip() == "…" else r"[^\S\n]+".join(words) + r"[^\S\n]*\n"
    assert re.fullmatch(pattern, printed), f"expected:\n{expected}\nprinted:\n{printed}"


def pages_that_run(*, spark: bool) -> Iterator[Path]:
    """The pages with blocks that run: those that need a Spark session, or the others."""
    for page in pages():
        if any(each.runs for each in fences(page)) and needs_spark(page) is spark:
            yield page
