"""The consumer: reads records, standalone or as a member of a group."""
