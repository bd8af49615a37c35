"""Records of one topic into another: `spark-submit jobs/replay.py --help`."""

from sparklog.jobs.replay import main

main()
