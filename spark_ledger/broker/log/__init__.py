"""Which broker owns which partition, and a partition's log as its owner reads and commits it."""
