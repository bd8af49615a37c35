"""Many consumers, large records and many partitions, alongside a real Kafka where it is there."""
