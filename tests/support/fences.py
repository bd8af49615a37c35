"""Runs the code blocks of a Markdown page, in order, as its reader would.

Rules of a block, by the words after its language:

- `python`, `bash` and `sql` run. Python blocks of a page share their names; `sql` runs in the Spark
  session of the page.
- `background`: the command runs until the end of the page; the next block waits until it serves.
- `no-run="reason"`: the block is only parsed.
- `toml`, `json`, `yaml` and `dockerfile` are parsed. `text` and `diff` are no code.

Addresses at the ports 8815, 9092 and 9404 are replaced by free ports, so that pages can run side by
side.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

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

_FENCE: Final = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_NO_RUN: Final = re.compile(r'no-run="([^"]{8,})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    words: str
    """Info string after the language: empty, `background`, or a reason not to run the block."""
    code: str

    @property
    def runs(self) -> bool:
        return self.language in RUNS and not self.words.startswith("no-run")

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
    """Raises an error where the block is not of its language, or its words mean nothing."""
    if fence.words and fence.words != "background":
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
        self._ports = {"8815": free_port(), "9092": free_port(), "9404": free_port()}
        self._running: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "SPARKLOG_FLIGHT_LISTEN": f"127.0.0.1:{self._ports['8815']}",
            "SPARKLOG_KAFKA_LISTEN": f"127.0.0.1:{self._ports['9092']}",
        }

    def run(self, fence: Fence) -> None:
        """Runs a block. Raises its error, with the place of the block."""
        code = self._with_ports(fence.code)
        if fence.language != "bash":  # Spark's workers have another current folder
            code = code.replace('"./', f'"{self._folder}/').replace("'./", f"'{self._folder}/")
        try:
            if fence.language == "bash":
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
        return re.sub(
            r"\b(127\.0\.0\.1|localhost):(8815|9092|9404)\b",
            lambda found: f"127.0.0.1:{self._ports[found[2]]}",
            code,
        )

    def _python(self, code: str, fence: Fence) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, which a reader sees once
            exec(compile(code, fence.where, "exec"), self._names)

    def _bash(self, code: str, *, background: bool) -> None:
        command = ["bash", "-euo", "pipefail", "-c", code]
        if background:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {code}"],
                cwd=self._folder, env=self._environment,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._running.append(process)
            self._await_port(process)
            return
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, check=False, timeout=SECONDS,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"

    def _await_port(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            assert process.poll() is None, "the command in the background has ended"
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self._ports["9092"]), 1),
            ):
                return
            time.sleep(0.1)
        raise AssertionError("the command in the background does not serve")

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
            process.wait(SECONDS)


def run_page(page: Path, folder: Path, **names: Any) -> int:
    """Runs the blocks of a page; `./` is the folder. Returns how many there were."""
    wanted = [each for each in fences(page) if each.runs]
    run = Page(folder, **names)
    try:
        for each in wanted:
            run.run(each)
    finally:
        run.close()
    return len(wanted)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def pages_that_run(*, spark: bool) -> Iterator[Path]:
    """The pages with blocks that run: those that need a Spark session, or the others."""
    for page in pages():
        if any(each.runs for each in fences(page)) and needs_spark(page) is spark:
            yield page
