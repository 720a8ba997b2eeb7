"""What consumers acknowledged in the partitions of a topic, made durable in ack ledgers."""
