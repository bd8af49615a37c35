"""The client of a broker: sends and reads records over Flight, and never touches storage."""
