"""Jobs, run in the Spark session of a program, and as programs that are killed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typer.testing import CliRunner, Result

from sparklog.jobs.produce import produce
from sparklog.jobs.replay import replay
from sparklog.jobs.running import app_of

LINES = ("a", "b", "c")
_DURATION = re.compile(r" in [\d.]+ s \(.*\)$")
_RUN_SECONDS = 240


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


def survive(
    command: Sequence[str],
    *,
    kills: int,
    pauses: tuple[float, float],
    seed: int,
    before: Callable[[int], None] = lambda _: None,
) -> str:
    """Starts a job again and again, kills it after a while, and then lets it finish.

    Args:
        command: of the job.
        pauses: the least and the most seconds until a kill.
        seed: of the pauses.
        before: called with the number of each start that is killed.

    Returns:
        The last line of the job.
    """
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
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
