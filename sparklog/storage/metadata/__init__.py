"""The metadata of a root: its brokers, their epochs and liveness, its topics and their leaders."""
