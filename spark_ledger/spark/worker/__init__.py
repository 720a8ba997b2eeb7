"""How Spark's Python processes start and end."""
