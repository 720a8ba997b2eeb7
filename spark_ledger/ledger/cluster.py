"""What the ledger's parts share: the cluster they work in."""

import random
from dataclasses import dataclass

from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.config import ClientConfig
from spark_ledger.ledger.placement import Placement, choose
from spark_ledger.ledger.records import LedgerRecords


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cluster as one client sees it. `rng` is the only source of chance."""

    records: LedgerRecords
    bookies: BookieClient
    directory: BookieDirectory
    config: ClientConfig
    rng: random.Random
    placement: Placement = choose
