"""Many topics and many partitions: acks, table lag, memory and CPU time of one broker.

The load comes from separate processes on the same machine, which compete with the broker for the
CPU.
"""
