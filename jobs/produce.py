"""Writes rows of files, a table or a query to a topic: `spark-submit jobs/produce.py --help`."""

from sparklog.jobs.produce import main

main()
