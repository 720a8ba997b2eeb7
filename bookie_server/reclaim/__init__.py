"""How space comes back: collection, compaction, scrub, tombstones."""
