"""Many consumers, large records and many partitions, compared with a real Kafka if available."""
