"""TLS of the listeners: contexts from files, handshakes, and the engine of a connection."""
