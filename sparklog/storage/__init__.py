"""Everything that lies under a root, and the rules by which it is written and read back.

No broker is needed to use this floor, and none is known to it.
"""
