"""The replicated ledger, client side: write to quorums, read what is confirmed, fence, recover."""
