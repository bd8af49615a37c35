"""A checker of Kafka brokers: runs clients, records their observations, and reports anomalies.

`driving` runs producers, consumers and groups against any broker, `history` records the answers
that they receive, `analysis` finds anomalies in them, `report` displays these. The kinds of
anomalies are those of Jepsen's Kafka workload, plus some for consumer groups.
"""
