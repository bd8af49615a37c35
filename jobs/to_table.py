"""Writes JSON values of a topic to a Delta table: `spark-submit jobs/to_table.py --help`."""

from sparklog.jobs.to_table import main

main()
