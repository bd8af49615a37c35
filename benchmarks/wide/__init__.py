"""Many topics and many partitions: acks, table lag, memory and processor time of one broker.

The load comes from processes of their own, on the same machine: what they use of the processor is
part of the figures.
"""
