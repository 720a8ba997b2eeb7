"""Rows of Spark and columns of topics."""
