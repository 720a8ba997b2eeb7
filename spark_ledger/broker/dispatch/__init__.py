"""Subscriptions: what is sent to which consumer, and what is acknowledged."""
