"""Rows of files, a table or a query into a topic: `spark-submit jobs/produce.py --help`."""

from sparklog.jobs.produce import main

main()
