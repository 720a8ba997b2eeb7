"""Reads a notebook's file and runs it; the commands are in spark_ledger/notebook."""
