"""Generates records at a given rate: `python jobs/load.py --help`."""

from sparklog.jobs.load import main

main()
