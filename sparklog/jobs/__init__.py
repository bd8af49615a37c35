"""Programs for `spark-submit`, which also run with `python -m sparklog.jobs.<name>`.

Each job has typed options and `--help` with an example, checks everything it can before it writes
anything, and shows its plan with `--dry-run`. Its last line says what it has done. It can be
stopped and run again at any point. Exit codes are those of the command line.
"""

from __future__ import annotations

from typing import Final

JOBS: Final = {
    "compact": "compacts a topic's table: retention, superseded records, small files",
    "load": "sends generated records at a given rate, and times their acks",
    "mirror": "copies topics of a Kafka cluster, or of another log, with the same offsets",
    "produce": "writes rows of files, a table or a query to a topic, once",
    "replay": "copies a range of a topic's records to another topic, at once or at a pace",
    "to_table": "writes JSON values of a topic to a Delta table, once",
    "verify": "checks the records of a root: tables, write-ahead log, and gaps",
}
"""Names of the jobs, which are also the names of modules here and of files in `jobs/`."""
