"""The client of a broker: sends and reads records by Flight messages, and never touches storage."""
