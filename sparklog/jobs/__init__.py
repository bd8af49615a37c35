"""Programs for `spark-submit`, which are also run by `python -m sparklog.jobs.<name>`.

Each job has typed options and `--help` with an example, checks all that it can before it writes
anything, and shows its plan with `--dry-run`. Its last line says what it has done. It may be
stopped and run again at any point. Exit codes are those of the command line.
"""

from __future__ import annotations

from typing import Final

JOBS: Final = {
    "compact": "the table of a topic is compacted: retention, last records of keys, small files",
    "load": "records made up at a rate, with the times of their acks",
    "mirror": "topics of a Kafka, or of another log, with the same offsets",
    "produce": "rows of files, a table or a query become records of a topic, once",
    "replay": "a range of a topic's records become records of another, at once or at a pace",
    "to_table": "JSON values of a topic become rows of a Delta table, once",
    "verify": "the records of a root are checked: tables, write-ahead log, and gaps",
}
"""Names of the jobs, which are those of modules here and of files in `jobs/`."""
