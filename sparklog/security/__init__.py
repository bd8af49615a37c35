"""Certificates: the hosts that they are valid for, and when they expire."""
