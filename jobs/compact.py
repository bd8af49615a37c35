"""Compacts a large table with Spark: `spark-submit jobs/compact.py --help`."""

from sparklog.jobs.compact import main

main()
