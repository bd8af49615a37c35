"""Mirrors topics of a Kafka cluster, with their offsets: `spark-submit jobs/mirror.py --help`."""

from sparklog.jobs.mirror import main

main()
