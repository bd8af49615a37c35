"""Seeded simulation: sparklog's real code as many processes in one thread, with a checked history.

A seed decides everything: who runs next, when time passes, what the store refuses, loses or
answers too late, who freezes, who dies, and when the power goes. The same seed is the same run.

| room | job |
|---|---|
| `scheduler` | greenlets as threads of processes, time, and a stand-in for `threading` |
| `faults` | what a seed lets go wrong, and the store as each process sees it |
| `brokers` | a broker put together as `sparklog.broker.agent` does it, without sockets |
| `clients` | producers that retry, queries that stage, administrators |
| `engines` | another engine that rewrites the tables' files |
| `readers` | followers of the root that need no broker |
| `history` | what was acked and what was seen, and what may never be otherwise |
| `world` | one run: calm start, chaos, recovery, and the checks at the end |
| `mutations` | deliberate mistakes in the real code, each of which the checks must notice |

`python -m tests.simulation --seed 1234 --trace` replays a run; `--seeds 0-999` makes many.
"""
