"""Every interleaving of a small scope, by production code: see docs/exhaustive.md."""
