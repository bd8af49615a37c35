"""Checks the records of a root: `spark-submit jobs/verify.py --help`."""

from sparklog.jobs.verify import main

main()
