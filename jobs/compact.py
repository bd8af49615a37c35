"""Compaction of a large table by Spark: `spark-submit jobs/compact.py --help`."""

from sparklog.jobs.compact import main

main()
