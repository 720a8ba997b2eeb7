"""One storage node: keeps entries of replicated ledgers and answers for them truthfully."""
