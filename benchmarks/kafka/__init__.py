"""Compares the Kafka listener with a real Kafka, using Kafka's own clients.

The sides take turns, each alone on the machine with the client, and the better turn of each counts.
The report shows our figure as a multiple of Kafka's. Kafka acks from the page cache, sparklog after
the fsync. If Java, Kafka's jars or a client is missing, the report says so.
"""
