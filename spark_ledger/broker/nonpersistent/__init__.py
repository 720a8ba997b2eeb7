"""Topics whose messages are only in memory: `non-persistent://` (decision 48)."""
