"""Security: credentials that are not printed, encoded or pickled, and certificates."""
