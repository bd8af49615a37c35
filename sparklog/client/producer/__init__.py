"""The producer: sends batches of records to the brokers."""
