"""Runs seeds: `python -m tests.simulation --seed 1234 --trace` replays one, `--seeds 0-999` many.

`--new --minutes 10` runs seeds that were never run before: they begin with the date and the time,
and are printed. `--planted` plants mistakes that seeds must notice (`tests/simulation/planted.py`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.simulation import planted
from tests.simulation.cluster import run_cluster
from tests.simulation.world import Outcome, run

_SHARE = 20
"""Seeds that a process runs before it reports."""


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _new_seeds() -> range:
    """A million seeds, of which the first is the time in UTC and six zeros."""
    first = int(f"{time.strftime('%Y%m%d%H%M', time.gmtime())}000000")
    return range(first, first + 1_000_000)


def _run(seed: int, is_cluster: bool) -> Outcome:
    return run_cluster(seed) if is_cluster else run(seed)


def _show(outcome: Outcome) -> None:
    for at, task, *what in outcome.trace:
        print(f"{at:10.4f}  {task:28}", *what)  # noqa: T201


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Runs the seeds that a process has."""

    is_cluster: bool
    keep_going: bool

    def run(self, seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
        """Returns counts of what happened, and the violations, each with its seed."""
        total, violations = Counter[str](), []
        for seed in seeds:
            outcome = _run(seed, self.is_cluster)
            total.update(outcome.injected)
            total.update(seeds=1, steps=outcome.steps, acks=outcome.acks, seen=outcome.seen)
            total.update(deletions=outcome.deletions, retained=outcome.retained)
            total.update(torn=outcome.torn, torn_seeds=bool(outcome.torn))
            if outcome.violation:
                violations.append(f"seed {seed}: {outcome.violation[-1200:]}")
                if not self.keep_going:
                    break
        return total, violations

    def run_shares(
        self, shares: Iterator[Sequence[int]], *, jobs: int
    ) -> Iterator[tuple[Counter[str], list[str]]]:
        """Runs shares in order, as many at a time as there are jobs."""
        if jobs == 1:
            yield from map(self.run, shares)
            return
        with ProcessPoolExecutor(jobs) as pool:
            running = [pool.submit(self.run, share) for share in itertools.islice(shares, jobs)]
            while running:
                yield running.pop(0).result()
                running += [pool.submit(self.run, each) for each in itertools.islice(shares, 1)]


def _until(seeds: range, minutes: float | None) -> Iterator[Sequence[int]]:
    """Shares of the seeds, until the time is over."""
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    for at in range(0, len(seeds), _SHARE):
        if time.monotonic() > deadline:
            return
        yield seeds[at : at + _SHARE]


def main() -> int:
    """Exit code 1 where a seed fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", "--seeds", type=_seeds, help="one, or FIRST-LAST")
    what.add_argument("--new", action="store_true", help="seeds that begin with the date")
    what.add_argument("--planted", action="store_true", help="plant mistakes instead")
    parser.add_argument("--minutes", type=float, help="end after that time")
    parser.add_argument("--jobs", type=int, default=1, help="processes, 1 unless given")
    parser.add_argument("--cluster", action="store_true", help="with members of a cluster")
    parser.add_argument("--trace", action="store_true", help="every step of the run")
    parser.add_argument("--digest", action="store_true", help="only each seed's digest")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    arguments = parser.parse_args()
    if arguments.planted:
        return 0 if planted.prove(arguments.jobs) else 1
    if arguments.new and arguments.minutes is None:
        parser.error("--new needs --minutes")
    seeds = arguments.seed or _new_seeds()
    if arguments.digest or arguments.trace:
        return _replay(seeds, arguments)
    began, total, failures = time.monotonic(), Counter[str](), 0
    work = _Work(is_cluster=arguments.cluster, keep_going=arguments.keep_going)
    for counts, violations in work.run_shares(
        _until(seeds, arguments.minutes), jobs=arguments.jobs
    ):
        total += counts
        failures += len(violations)
        for violation in violations:
            print(violation, flush=True)  # noqa: T201
        if violations and not arguments.keep_going:
            break
    seconds, count = time.monotonic() - began, total["seeds"]
    print(f"{dict(sorted(total.items()))}, {count / seconds:.1f} seeds/s")  # noqa: T201
    print(f"{count} seeds from {seeds[0]}: {failures} violations")  # noqa: T201
    return 1 if failures else 0


def _replay(seeds: range, arguments: argparse.Namespace) -> int:
    """Runs the seeds one by one and prints each one's steps, its digest or its violation."""
    is_sound = True
    for seed in seeds:
        outcome = _run(seed, arguments.cluster)
        is_sound = is_sound and not outcome.violation
        if arguments.trace:
            _show(outcome)
        print(seed, outcome.digest if arguments.digest else outcome.violation)  # noqa: T201
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
