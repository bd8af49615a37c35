"""Consumer groups: their members, their generations, and the offsets that they commit."""
