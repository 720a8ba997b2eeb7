"""What a cluster does for its topics: retention, cleaning, merging."""
