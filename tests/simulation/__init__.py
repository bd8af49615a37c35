"""Seeded simulation: sparklog's real code as many processes in one thread, with a checked history.

A seed decides everything: which task runs next, when time passes, which requests the store refuses,
loses or answers too late, which processes freeze or die, and when the power fails. The same seed
gives the same run.

| module | contents |
|---|---|
| `scheduler` | greenlets as threads of processes, time, and a stand-in for `threading` |
| `faults` | the faults of a seed, and the store as each process sees it |
| `brokers` | the real broker, without sockets |
| `clients` | producers that retry, queries that stage, administrators |
| `engines` | another engine that rewrites the tables' files |
| `puts` | the budget of puts, and what follows from it |
| `typed`, `columns` | values of typed topics, and their columns at each commit |
| `scales` | the memory of decoding, against its bounds |
| `readers` | followers of the root that need no broker |
| `history` | acked and observed records, and the invariants that they must satisfy |
| `world` | one run: calm start, chaos, recovery, and the checks at the end |
| `mutations` | deliberate mistakes in the real code, each of which the checks must notice |

`python -m tests.simulation --seed 1234 --trace` replays a run; `--seeds 0-999` makes many.
"""
