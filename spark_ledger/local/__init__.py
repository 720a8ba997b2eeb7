"""A whole cluster on this machine: `with LocalCluster(bookies=3) as cluster: ...`."""

from spark_ledger.local.cluster import LocalCluster
from spark_ledger.local.processes import LocalBookie

__all__ = ["LocalBookie", "LocalCluster"]
