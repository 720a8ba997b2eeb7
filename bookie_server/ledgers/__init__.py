"""What a node has of each ledger: fences, limbo, and its record in the metadata store."""
