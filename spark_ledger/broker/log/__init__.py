"""Which broker owns which partition, and the logs of partitions in the hands of their owner."""
