"""A checker of Kafka brokers: clients at work, all that they saw, and what in it must not be.

`driving` runs producers, consumers and groups against any broker, `history` keeps what each of them
was told, `analysis` finds in it what a log may not do, `report` shows it. The kinds of findings are
those of Jepsen's workload for Kafka, and some of the groups' own.
"""
