"""The Arrow Flight listener, and the gRPC server beneath it."""
