"""Producers of a partition, and the open end of its log."""
