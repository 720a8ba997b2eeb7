"""One storage node: keeps entries of replicated ledgers and never denies what it may have had."""

__version__ = "0.1.0"
