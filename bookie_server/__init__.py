"""One storage node: keeps entries of replicated ledgers and answers for them truthfully."""

__version__ = "0.1.0"
