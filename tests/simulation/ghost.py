"""What truly happened, as no participant can know it: the state that invariants are judged on.

Always true: the ghost is fed by observers (the network's tap, the store's listener, the watched
writers) and never feeds anything back; whatever it keeps is in order of insertion.
"""

from dataclasses import dataclass, field

from bookie_server.api.entry import NO_ENTRY
from spark_ledger.metadata.ledger_record import LedgerRecord

Identity = tuple[int, ...]


@dataclass
class LedgerGhost:
    """One ledger. Entry ids count from 0; -1 is none."""

    ledger_id: int
    ack_quorum: int
    write_quorum: int
    record: LedgerRecord
    submitted: list[bytes] = field(default_factory=list)
    """Payloads in the order of append, by the only writer."""
    submitted_rows: list[int] = field(default_factory=list)
    acked: int = NO_ENTRY
    """Highest id ever acknowledged to the writer."""
    failed: bool = False
    """An append of the writer has failed."""
    identities: dict[int, Identity] = field(default_factory=dict)
    """By entry: what the first valid copy seen anywhere was."""
    stored: dict[int, dict[str, None]] = field(default_factory=dict)
    """By entry: the bookies that ever said that they have it durably."""
    durable_prefix: int = NO_ENTRY
    """Every entry up to here was said to be stored by an ack quorum of bookies."""
    lac_heard: int = NO_ENTRY
    """Highest last-add-confirmed in any header or reply."""
    returned: int = NO_ENTRY
    """Highest id a confirmed read returned."""
    deleted: bool = False
    """Its record is gone from the store."""
    stored_at_delete: dict[int, int] | None = None
    """When somebody was told so first: by entry, how many bookies had it."""

    @property
    def closed(self) -> bool:
        return self.record.closed

    def delete_returned(self) -> None:
        if self.stored_at_delete is None:
            self.stored_at_delete = {entry: len(on) for entry, on in self.stored.items()}


@dataclass
class BookieGhost:
    """What one bookie identity promised, to be kept across crashes."""

    bookie_id: str
    stored: dict[tuple[int, int], None] = field(default_factory=dict)
    """(ledger, entry) it acknowledged."""
    fence_replied: dict[int, int] = field(default_factory=dict)
    """By ledger: the moment of its first reply to a fencing request."""
    fenced_negatives: dict[tuple[int, int], int] = field(default_factory=dict)
    """(ledger, entry) it denied under a fence flag: the moment of that reply."""
    wiped: bool = False
    rotten: bool = False
    """Durable bytes of it were damaged: of what it promised it may know nothing any more, but it
    never denies it."""


@dataclass
class Ghost:
    over_budget: bool = False
    """More disks are lost or rotten than the protocol bears: only silent wrongs count."""
    ledgers: dict[int, LedgerGhost] = field(default_factory=dict)
    bookies: dict[str, BookieGhost] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    """How often each invariant was looked at: one that never was, proves nothing."""
    met: dict[str, int] = field(default_factory=dict)
    """Situations met ("sometimes" counters)."""

    def meet(self, situation: str) -> None:
        self.met[situation] = self.met.get(situation, 0) + 1

    def bookie(self, bookie_id: str) -> BookieGhost:
        found = self.bookies.get(bookie_id)
        if found is None:
            found = self.bookies[bookie_id] = BookieGhost(bookie_id)
        return found
