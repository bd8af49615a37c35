"""Replays seeds: `python -m tests.simulation --seed 1234 --trace`, or many: `--seeds 0-999`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.cluster import run_cluster
from tests.simulation.world import Outcome, run


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _show_trace(outcome: Outcome) -> None:
    for at, task, *what in outcome.trace:
        print(f"{at:10.4f}  {task:28}", *what)  # noqa: T201


def main() -> int:
    """Exit code 1 where a seed fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", "--seeds", type=_seeds, required=True, help="one, or FIRST-LAST")
    parser.add_argument("--cluster", action="store_true", help="with members of a cluster")
    parser.add_argument("--trace", action="store_true", help="every step of the run")
    parser.add_argument("--digest", action="store_true", help="only each seed's digest")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    arguments = parser.parse_args()
    began, total, failures = time.monotonic(), Counter[str](), 0
    for seed in arguments.seed:
        outcome = run_cluster(seed) if arguments.cluster else run(seed)
        if arguments.digest:
            print(seed, outcome.digest)  # noqa: T201
            continue
        if arguments.trace:
            _show_trace(outcome)
        total.update(outcome.injected)
        total.update(seeds=1, steps=outcome.steps, acks=outcome.acks, seen=outcome.seen)
        total.update(deletions=outcome.deletions, retained=outcome.retained)
        total.update(torn=outcome.torn, torn_seeds=bool(outcome.torn))
        if outcome.violation:
            failures += 1
            print(f"seed {seed}: {outcome.violation[-1200:]}", flush=True)  # noqa: T201
            if not arguments.keep_going:
                break
    if arguments.digest:
        return 0
    seconds = time.monotonic() - began
    print(f"{dict(sorted(total.items()))}, {total['seeds'] / seconds:.1f} seeds/s")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
