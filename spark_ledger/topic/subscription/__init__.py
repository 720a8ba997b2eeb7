"""Subscriptions, their cursors and lag."""
