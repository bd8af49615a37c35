"""Everything stored under a root, and the rules for writing it and reading it back.

This layer works without a broker, and does not depend on the broker's code.
"""
