"""Which broker leads which partition: failover, moves between members, and what they go by."""
