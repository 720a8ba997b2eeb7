"""The topics and partitions that this broker owns, with their producers and subscriptions."""
