"""How a client reads a ledger: ranges, runs of entries, the tail of an open one."""
