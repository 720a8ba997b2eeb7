"""Rows as entries: formats, columns, routing, filters."""
