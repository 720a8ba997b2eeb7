"""The source: batch, stream, listings, lag."""
