"""The open ends of partitions in the hands of the broker that owns them."""
