"""Connections of clients and of committers: their bytes, and what their commands do."""
