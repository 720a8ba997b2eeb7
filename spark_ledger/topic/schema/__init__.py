"""Schemas of topics: records, rules, registry."""
