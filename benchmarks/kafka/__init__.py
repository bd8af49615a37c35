"""Compares the Kafka listener with a real Kafka, by Kafka's own clients.

Each side runs alone on the machine with the client, in turns, and its better turn counts. The
report shows our figure as a multiple of Kafka's. Kafka acks from the page cache, sparklog after the
fsync. If Java, Kafka's jars or a client is missing, the report says so.
"""
