"""The storage engine: caches, flush, reads and the directories of ledgers."""
