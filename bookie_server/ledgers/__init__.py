"""What a node knows of each ledger: fences, limbo, and what the cluster says of it."""
