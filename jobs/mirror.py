"""Topics of a Kafka into a log, at their offsets: `spark-submit jobs/mirror.py --help`."""

from sparklog.jobs.mirror import main

main()
