"""The broker: orders records, makes them durable, publishes them, and serves clients."""
