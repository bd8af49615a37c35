"""Copies records of one topic to another: `spark-submit jobs/replay.py --help`."""

from sparklog.jobs.replay import main

main()
