"""A checker of Kafka brokers: runs clients, records their observations, and reports anomalies.

`driving` runs producers, consumers and groups against any broker, `history` records the answers
that they receive, `analysis` finds anomalies in them, `report` shows these. The kinds of anomalies
are those of Jepsen's workload for Kafka, and some for consumer groups.
"""
