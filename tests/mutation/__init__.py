"""Mutation testing: seeded mistakes in the code, and the tests that notice them."""
