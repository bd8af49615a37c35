"""Jobs, run in the Spark session of a program."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner, Result

from sparklog.jobs.produce import produce
from sparklog.jobs.replay import replay
from sparklog.jobs.running import app_of

LINES = ("a", "b", "c")
_DURATION = re.compile(r" in [\d.]+ s \(.*\)$")


def run_jobs(root: str, folder: Path) -> list[str]:
    """Produces a file into the topic `produced`, twice, and replays that into `replayed`.

    Returns the last line of each job, without its duration.
    """
    file = folder / "lines.txt"
    file.write_text("\n".join(LINES))
    produced = ["--topic", "produced", "--format", "text", str(file)]
    replayed = ["--from", "produced", "--to", "replayed"]
    runs = ((produce, produced), (produce, produced), (replay, replayed))
    return [_last_line(job, ["--root", root, *arguments]) for job, arguments in runs]


def _last_line(job: Callable[..., None], arguments: list[str]) -> str:
    return _DURATION.sub("", succeeded(CliRunner().invoke(app_of(job), arguments)))


def succeeded(result: Result) -> str:
    """Returns a job's last line."""
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[-1]


def failed(result: Result, code: int = 1) -> str:
    """Returns a job's error, in one line of words."""
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.replace("│", " ").split())
