"""How a batch becomes visible: one compare-and-set."""
