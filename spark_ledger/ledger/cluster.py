"""What the ledger's parts share: the cluster they work in."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory, BookieInfo
from spark_ledger.config import ClientConfig
from spark_ledger.errors import LedgerError
from spark_ledger.ledger.placement import Placement, PlacementRequest, choose
from spark_ledger.ledger.quorum import Quorum
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
    at_close: dict[object, Callable[[LedgerError], None]] = field(default_factory=dict)
    """What is under way and waits for bookies: how to end it when the client is closed."""

    def place(
        self,
        quorum: Quorum,
        slots: Sequence[int],
        candidates: Sequence[BookieInfo],
        members: Mapping[int, BookieInfo],
    ) -> Mapping[int, str]:
        """Bookies for `slots` of an ensemble out of `candidates`, as far as there are any that
        fit. Raises BadConfig for a placement policy that misbehaves."""
        request = PlacementRequest(
            candidates=tuple(candidates),
            slots=tuple(slots),
            ensemble_size=quorum.ensemble_size,
            write_quorum=quorum.write_quorum,
            ack_quorum=quorum.ack_quorum,
            members=members,
            suspects=tuple(self.bookies.quarantine.suspects()),
            racks=self.config.racks,
        )
        return self.placement(request, self.rng)

    def describe(self, bookie_id: str) -> str:
        """One bookie for an error text, with its rack and why it is chosen last, if it is."""
        rack = self.directory.rack(bookie_id)
        facts = [f"rack {rack}" if rack else "", self.bookies.quarantine.why(bookie_id)]
        return ", ".join([self.directory.describe(bookie_id), *filter(None, facts)])
