"""What the cluster agrees on: the store's interface, the records in it, and ZooKeeper behind it."""
