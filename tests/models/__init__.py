"""Exhaustive models of protocols, and tests that the code does as they do."""
