"""The Kafka door, measured beside a real Kafka, by Kafka's own clients.

Each side runs alone on the machine with the client, in turns, and its better turn counts; what is
told is how many times Kafka's figure ours is. Kafka acks from the page cache, we after the fsync.
Where Java, Kafka's jars or a client cannot be got, the report says so.
"""
