"""Records and messages as bytes: pure encoders and decoders, without sockets, clocks or threads."""
