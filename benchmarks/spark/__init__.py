"""The Spark source and sink, measured alongside a real Kafka and Spark's own connector to it.

Both sides are measured in one run, by one Spark session, on two cores shared by brokers and Spark;
our figure counts as a multiple of the other's. Spark has its default settings, but no UI. If
Kafka's or Delta's jars are unavailable, the report says so, and the rest is measured anyway.
"""
