"""A cluster and Spark checkpoints made by an earlier version, stored as files.

`cluster-1.tar.xz` has the data directory of an embedded cluster of four bookies and the checkpoints
of three streaming queries; `expected.json` says what is in them. `python -m tests.stored.make` made
both. tests/spark/test_stored_cluster.py starts the cluster with the code at hand and compares.

Nothing in the archive names the machine it was made on: the settings of a bookie come with each
start, a bookie registers the address it listens on anew, and files are found relative to their
directory. Only logs and `zoo.cfg` name folders, and these are not packed.
"""
