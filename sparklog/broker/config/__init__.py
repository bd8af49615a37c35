"""Topic and broker configuration under Kafka's names."""
