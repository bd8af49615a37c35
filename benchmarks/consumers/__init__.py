"""Many consumers, large records and many partitions, beside a real Kafka where it is there."""
