"""Bringing copies back where bookies lost them."""
