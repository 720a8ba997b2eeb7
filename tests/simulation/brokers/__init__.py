"""Brokers in a run: production's, at simulated connections; who uses them, and what is judged."""
