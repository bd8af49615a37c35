"""The log of a broker: partitions, the WAL's writer and cleaner, readers, and the publisher."""
