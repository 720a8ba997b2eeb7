"""Who consumes: subscriptions, their consumers and what these have acknowledged."""
