"""Exactly once, proven in real Spark: queries are hurt at each step of a batch, and then every row
of their input must be in the topic once, in order, with dense offsets and no ledger left over.

`cases.py` is the list. Points inside a batch are reached from outside: a source that waits at a
file (`source.py`), and a proxy before ZooKeeper that holds what it is told to
(`zookeeper_proxy.py`). The query itself is a driver process of its own (`driver.py`), killed with
all that it started.
"""
