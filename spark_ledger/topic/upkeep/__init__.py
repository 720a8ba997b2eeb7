"""The upkeep of a cluster's topics: retention, cleaning, merging."""
