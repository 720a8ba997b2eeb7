"""What a task reads: plans, slices, entries to rows."""
