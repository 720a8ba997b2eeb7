"""Options of the source and the sink, offsets and limits."""
