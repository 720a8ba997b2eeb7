"""Checkpoints of the log of a topic."""
