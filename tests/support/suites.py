"""Test suites of Kafka client projects, downloaded and run as those projects run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import pytest

from tests.support.golang import go
from tests.support.ports import quiet_address
from tests.support.waiting import wait_until

SUITES: Final = Path(__file__).parents[1] / "interop" / "suites"
GET_SECONDS: Final = 600.0
RUN_SECONDS: Final = 3_600.0
Results: TypeAlias = dict[str, bool]
"""By test name, true if it has passed. Skipped tests are left out."""


class Suite(Protocol):
    """A suite that is ready to run against any broker."""

    def run(self, address: str, only: Collection[str] = ()) -> Results:
        """Runs all tests, or those with these names, against the broker at this address."""


def got(command: Sequence[str], folder: Path, what: str, **environment: str) -> str:
    """Runs a download command and returns its output; skips the test if that fails."""
    done = ran(command, folder, environment, seconds=GET_SECONDS)
    if done.returncode:
        pytest.skip(f"{what} cannot be got: {(done.stderr or done.stdout).strip()[-300:]}")
    return done.stdout


def ran(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    seconds: float = RUN_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, and captures its output as text, whatever its bytes."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def cloned(folder: Path, repository: str, tag: str) -> Path:
    """Clones a GitHub repository at that tag into a new folder."""
    target = folder / repository.rpartition("/")[2]
    url = f"https://github.com/{repository}"
    got(
        ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, url, str(target)],
        folder,
        f"{repository} {tag}",
        GIT_TERMINAL_PROMPT="0",
    )
    return target


def python_with(folder: Path, *packages: str) -> Path:
    """Returns the interpreter of a new virtual environment with these packages."""
    got([sys.executable, "-m", "venv", str(folder / "venv")], folder, "a virtual environment")
    python = folder / "venv" / "bin" / "python"
    got([str(python), "-m", "pip", "install", "--quiet", *packages], folder, " ".join(packages))
    return python


def _with_address(variables: Mapping[str, str], address: str) -> dict[str, str]:
    """Fills in `{address}`, and `{PROTOCOL}` if the address is `PROTOCOL://host:port,…`."""
    found = {"address": address, **dict(_LISTENER.findall(address))}

    def filled(value: str) -> str:
        return _PLACE.sub(lambda place: found.get(place[1], place[0]), value)

    return {name: filled(value) for name, value in variables.items()}


_LISTENER: Final = re.compile(r"(\w+)://([^,]+)")
_PLACE: Final = re.compile(r"\{(\w+)\}")


class PythonSuite:
    """Tests for pytest, with an interpreter that can import all they need."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        arguments: Sequence[str],
        *,
        leave_out: str,
        variables: Mapping[str, str],
    ) -> None:
        """`leave_out`: a pytest `-k` expression of tests that are not run.

        `variables`: for the environment; `{address}` is replaced by the broker's, or `{SSL}`
        by that of its listener for this protocol, if `run` gets all listeners.
        """
        self._leave_out = leave_out
        self._python = python
        self._folder = folder
        self._arguments = arguments
        self._variables = variables

    def run(self, address: str, only: Collection[str] = ()) -> Results:
        path = self._folder / "results.xml"
        path.unlink(missing_ok=True)
        command = [str(self._python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--timeout=120", f"--junitxml={path}", *self._arguments]
        names = sorted({each.partition("[")[0] for each in only})
        chosen = f"({' or '.join(names)}) and " if names else ""
        command += ["-k", f"{chosen}not ({self._leave_out})"]
        done = ran(command, self._folder, _with_address(self._variables, address))
        assert path.exists(), (done.stdout + done.stderr)[-2_000:]
        return dict(_of_junit(path))


def _of_junit(path: Path) -> Iterable[tuple[str, bool]]:
    for case in ET.parse(path).iter("testcase"):
        kinds = {each.tag for each in case}
        if "skipped" not in kinds:
            yield case.attrib["name"], not kinds & {"failure", "error"}


class GoSuite:
    """Tests of a Go package, which bring their own modules."""

    def __init__(
        self,
        folder: Path,
        module: str,
        *,
        package: str = ".",
        tags: str = "",
        variables: Mapping[str, str],
        only: str = ".",
        leave_out: str,
    ) -> None:
        """Downloads the module, `path@version`.

        Args:
            tags: build tags that its tests need.
            variables: for the environment, as those of `PythonSuite`.
            only: a regular expression of the names of tests to run.
            leave_out: a regular expression of those to leave out.
        """
        self._go = go()
        got([self._go, "mod", "init", "suite"], folder, "a module")
        got([self._go, "get", module], folder, module)
        path = got(
            [self._go, "list", "-m", "-f", "{{.Dir}}", module.partition("@")[0]], folder, module
        )
        self._sources = folder / "sources"
        shutil.copytree(path.strip(), self._sources, copy_function=shutil.copyfile)
        for each in (self._sources, *self._sources.rglob("*/")):
            each.chmod(0o755)
        self._folder = self._sources / package
        self._build = [self._go, "test", "-c", *([f"-tags={tags}"] if tags else [])]
        self._variables = variables
        self._only = only
        self._leave_out = leave_out
        got([self._go, "mod", "tidy"], self._sources, f"what the tests of {module} need")

    def run(self, address: str, only: Collection[str] = ()) -> Results:
        program = self._folder / "suite.test"
        got([*self._build, "-o", str(program), "."], self._folder, "the suite")
        names = "|".join(sorted({each.partition("/")[0] for each in only}))
        chosen = f"^({names})$" if names else self._only
        command = [str(program), "-test.v", f"-test.timeout={RUN_SECONDS}s"]
        command += [f"-test.skip={self._leave_out}", f"-test.run={chosen}"]
        done = ran(
            command,
            self._folder,
            _with_address(self._variables, address),
            seconds=RUN_SECONDS + 60,
        )
        found = _GO_RESULT.findall(done.stdout)
        assert found, (done.stdout + done.stderr)[-2_000:]
        return {
            name: verdict == "PASS"
            for verdict, name in found
            if re.search(self._leave_out, name) is None  # -skip ignores names of subtests
        }


_GO_RESULT: Final = re.compile(r"^ *--- (PASS|FAIL): (\S+)", re.MULTILINE)


@contextmanager
def proxied(folder: Path, brokers: Mapping[int, str]) -> Iterator[str]:
    """Runs Toxiproxy before these brokers, at the ports that sarama's tests use; yields its URL.

    Args:
        folder: for the program.
        brokers: addresses by number; each is reached at its `proxy_address`.
    """
    got([go(), "install", TOXIPROXY], folder, TOXIPROXY, GOBIN=str(folder))
    host, _, port = quiet_address().rpartition(":")
    process = subprocess.Popen(
        [str(folder / "server"), f"-host={host}", f"-port={port}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://{host}:{port}"
    try:
        wait_until(lambda: _answers(f"{url}/version"), "Toxiproxy listens")
        for number, address in brokers.items():
            proxy = {
                "name": f"kafka{number}",
                "listen": proxy_address(number),
                "upstream": address,
                "enabled": True,
            }
            request = urllib.request.Request(f"{url}/proxies", json.dumps(proxy).encode())
            with urllib.request.urlopen(request) as reply:
                assert reply.status == 201
        yield url
    finally:
        process.kill()
        process.wait()


def proxy_address(number: int) -> str:
    """Returns the address at which sarama's tests expect the broker of that number."""
    return f"127.0.0.1:{29_090 + number}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


TOXIPROXY: Final = "github.com/Shopify/toxiproxy/v2/cmd/server@v2.12.0"
