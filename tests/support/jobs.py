"""Jobs that run in a program's Spark session, or as programs that are killed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typer.testing import CliRunner, Result

import sparklog
from sparklog.jobs.compact import compact
from sparklog.jobs.produce import produce
from sparklog.jobs.replay import replay
from sparklog.jobs.running import app_of

LINES = ("a", "b", "c")
KILLS = 20
"""Kills of a job, in long tests."""
_DURATION = re.compile(r" in [\d.]+ s( \([^)]*\))?")
_RUN_SECONDS = 240


def run_jobs(root: str, folder: Path) -> list[str]:
    """Produces a file into the topic `produced`, and replays that into `replayed`.

    Produces the file again, as the same run and as a new one, and compacts the two files of that
    topic's table. Returns the last line of each job, without its duration.
    """
    file = folder / "lines.txt"
    file.write_text("\n".join(LINES))
    produced = ["--topic", "produced", "--format", "text", "--partition", "0", str(file)]
    replayed = ["--from", "produced", "--to", "replayed"]
    again = [*produced, "--again"]
    runs = ((produce, produced), (produce, produced), (replay, replayed), (produce, again))
    lines = [_last_line(job, ["--root", root, *arguments]) for job, arguments in runs]
    with sparklog.connect(root, detached=True) as log:
        log.flush_to_table("produced")
    return [*lines, _last_line(compact, ["--root", root, "produced"])]


def _last_line(job: Callable[..., None], arguments: list[str]) -> str:
    return _DURATION.sub("", succeeded(CliRunner().invoke(app_of(job), arguments)))


def succeeded(result: Result) -> str:
    """Returns a job's last line."""
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()[-1]


def failed(result: Result, code: int = 1) -> str:
    """Returns a job's error on one line."""
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.replace("│", " ").split())


def survive(
    command: Sequence[str],
    *,
    kills: int,
    pauses: tuple[float, float],
    seed: int,
    before: Callable[[int], None] = lambda _: None,
) -> str:
    """Starts a job repeatedly, kills it each time after a pause, and finally lets it finish.

    Args:
        command: of the job.
        pauses: minimum and maximum seconds until a kill.
        seed: of the pauses.
        before: called with the number of each start that will be killed.

    Returns:
        The last line of the job.
    """
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    chance = random.Random(seed)
    for number in range(kills):
        before(number)
        job = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(chance.uniform(*pauses))
        finally:
            os.killpg(job.pid, 9)
            job.wait()
    done = subprocess.run(
        command,
        env=environment,
        timeout=_RUN_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
