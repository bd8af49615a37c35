"""Partition leadership: failover, moves between members, and the heartbeats they rely on."""
