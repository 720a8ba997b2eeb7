"""What a task writes: rows to entries to ledgers."""
