"""The Dockerfile of the container guide, taken apart."""

from __future__ import annotations

import re
import shlex
from typing import Final

from tests.support import fences

PAGE: Final = fences.ROOT / "docs" / "guides" / "containers.md"


def instructions(name: str) -> list[str]:
    """The arguments of all instructions of that name, in order."""
    (block,) = (each for each in fences.fences(PAGE) if each.language == "dockerfile")
    lines = block.code.replace("\\\n", " ").splitlines()
    return [line.split(None, 1)[1] for line in lines if line.split(None, 1)[0] == name]


def environment() -> dict[str, str]:
    """The variables that the image sets."""
    (given,) = instructions("ENV")
    return dict(each.split("=", 1) for each in shlex.split(given))


def pip_line() -> list[str]:
    """The words of the command that installs the package."""
    (line,) = (each for each in instructions("RUN") if each.startswith("pip "))
    command, _, _ = line.partition("&&")
    return shlex.split(command)


def extra() -> str:
    """The extra that the image installs."""
    found = re.search(r"\[(\w+)\]", pip_line()[-1])
    assert found is not None
    return found[1]
