"""Reads a notebook's file, runs it and shows its outputs; to users it is spark_ledger.notebook."""
