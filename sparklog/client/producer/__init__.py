"""The producer: batches of records on their way to the brokers."""
