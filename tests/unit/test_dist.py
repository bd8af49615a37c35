"""Files that `make dist` writes and reads; `make dist` itself shows that the whole is right."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import yaml

from sparklog.version import VERSION
from tests.support import containers, fences
from tools import dist

WORKFLOWS = sorted((fences.ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "DIST", tmp_path)


def test_the_image_is_built_from_the_wheel(tmp_path: Path) -> None:
    """With the commands and variables of the image that is built from the sources."""
    path = dist.write_image_file(tmp_path / "some.whl")
    text = path.read_text("utf-8")
    assert "COPY some.whl /src/" in text
    assert f"docker build --file {path.name} --tag sparklog:{VERSION} ." in text
    pip, variables, entry = dist.image_commands(text)
    assert pip == ["pip", "install", "--no-cache-dir", f"/src/some.whl[{containers.extra()}]"]
    assert variables == containers.environment()
    assert entry == ["sparklog", "broker"]
    sources = containers.DOCKERFILE.read_text("utf-8")
    assert text[text.index("RUN useradd") :] == sources[sources.index("RUN useradd") :]


def test_checksums_are_of_all_files(tmp_path: Path) -> None:
    """As `sha256sum --check` reads them, also where they are written again."""
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    for _ in range(2):
        lines = dist.write_checksums().read_text().splitlines()
        assert lines == [f"{hashlib.sha256(each.encode()).hexdigest()}  {each}" for each in "ab"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    """They do what people do, by the same commands."""
    makefile = (fences.ROOT / "Makefile").read_text("utf-8")
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = " ".join(re.findall(r"^make (.*)$", "\n".join(commands), re.MULTILINE)).split()
    assert targets
    for each in targets:
        assert f"\n{each}: setup ##" in makefile
