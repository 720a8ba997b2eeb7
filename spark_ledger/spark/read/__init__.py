"""The source: batch, stream, listings, SQL functions."""
