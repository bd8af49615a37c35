"""The consumer: records on their way in, alone or as a member of a group."""
