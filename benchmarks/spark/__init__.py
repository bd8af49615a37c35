"""The Spark source and sink, measured alongside a real Kafka and Spark's own connector to it.

Both sides are measured in one run, by one Spark, on two cores that brokers and Spark share; what
counts is how many times the other's figure ours is. Spark is as it comes, but for its UI. Where
Kafka's or Delta's jars cannot be got, the report says so, and the rest is measured all the same.
"""
