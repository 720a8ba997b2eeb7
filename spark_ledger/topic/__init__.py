"""Topics: logs made of ledger segments; a batch of rows becomes visible by one atomic commit."""
