"""What truly happened, as no participant can know it: the state that invariants are judged on.

Always true: the ghost is fed by observers (the network's taps, the store's listener, the watched
writers, readers and stores) and never feeds anything back; whatever it keeps is in order of
insertion. A *moment* is a number that rises with every beginning and ending of a request at any
bookie (network.Exchange).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bookie_server.api.entry import NO_ENTRY
from bookie_server.api.status import Meaning
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState

Identity = tuple[int, ...]


@dataclass
class RecoveryGhost:
    """The answers that reached one client while it recovered one ledger."""

    fenced: dict[str, int] = field(default_factory=dict)
    """By bookie that confirmed its fence: the last add confirmed it named."""
    said: dict[int, dict[str, Meaning]] = field(default_factory=dict)
    """By entry and bookie: what it answered to a fencing read. A positive is never forgotten."""
    refused: dict[str, None] = field(default_factory=dict)
    """Bookies that refused its token."""
    aborted: bool = False
    """An attempt of it failed or died."""
    killed: bool = False
    """An attempt of it died with its process."""

    def hear(self, entry_id: int, bookie_id: str, answer: Meaning) -> None:
        said = self.said.setdefault(entry_id, {})
        if said.get(bookie_id) is not Meaning.POSITIVE:
            said[bookie_id] = answer

    def who_said(self, entry_id: int, answer: Meaning) -> dict[str, None]:
        """The bookies that gave this answer about the entry."""
        said = self.said.get(entry_id, {})
        return {bookie: None for bookie, told in said.items() if told is answer}


class LedgerRead(NamedTuple):
    """The entries that a reader got, which asked at `begun_s`. `whole`: it asked for the whole
    ledger."""

    begun_s: float
    entries: dict[int, int | bytes]
    """By entry id: which append it was, or bytes that no client appended."""
    whole: bool


def is_named(record: LedgerRecord, bookie_id: str) -> bool:
    """Whether the bookie keeps copies by the record, or is being given some: by this file's own
    look, not by that of the code under test."""
    members = [bookie for each in record.fragments for bookie in each.ensemble]
    return bookie_id in members or any(one.bookie_id == bookie_id for one in record.joining)


@dataclass
class LedgerGhost:
    """One ledger. Entry ids count from 0; -1 stands for no entry."""

    ledger_id: int
    ack_quorum: int
    write_quorum: int
    record: LedgerRecord
    author: str = ""
    """The client that made it, and the only one that may append."""
    submitted: list[bytes] = field(default_factory=list)
    """Payloads in the order of append, by the only writer."""
    submitted_rows: list[int] = field(default_factory=list)
    acked: int = NO_ENTRY
    """Highest id ever acknowledged to the writer."""
    acked_s: list[float] = field(default_factory=list)
    """By entry: when it was acknowledged, in simulated seconds."""
    reads: list[LedgerRead] = field(default_factory=list)
    confirmed: int = NO_ENTRY
    """Last add confirmed of the writer's handle."""
    failed: bool = False
    """An append of the writer has failed."""
    identities: dict[int, Identity] = field(default_factory=dict)
    """By entry: what the first valid copy seen anywhere was."""
    stored: dict[int, dict[str, None]] = field(default_factory=dict)
    """By entry: the bookies that ever answered that they have it durably."""
    declared_gone: dict[str, None] = field(default_factory=dict)
    """Bookies that an operator declared gone for ever."""
    slots: dict[str, int] = field(default_factory=dict)
    """By bookie: the mask of the slots it had in any published ensemble."""
    copied: dict[tuple[str, str, int], None] = field(default_factory=dict)
    """(client, bookie, entry) of the copies that a repair gave: no part of a recovery."""
    shown: dict[tuple[str, str, int], None] = field(default_factory=dict)
    """(client, bookie, entry) of what a bookie showed to a repair when it was asked last."""
    took: dict[tuple[str, int], None] = field(default_factory=dict)
    """(bookie, first entry of the fragment) of the slots that were ever given away."""
    durable_prefix: int = NO_ENTRY
    """An ack quorum of bookies answered for every entry up to here that it is stored."""
    lac_heard: int = NO_ENTRY
    """Highest last-add-confirmed in any header, reply or handle."""
    moves_s: list[float] = field(default_factory=list)
    """When entries of it were acknowledged, or its record changed."""
    returned: int = NO_ENTRY
    """Highest id a confirmed read returned."""
    recovered_from: Fragment | None = None
    """The last fragment as it was when the ledger was marked IN_RECOVERY: reads go there."""
    recoveries: dict[str, RecoveryGhost] = field(default_factory=dict)
    """By client that ever tried to recover it."""
    busy_since: dict[str, float] = field(default_factory=dict)
    """By bookie: when it began to answer adds with BUSY, if it does."""
    deleted: bool = False
    """Its record is gone from the store."""
    stored_at_delete: dict[int, int] | None = None
    """When a client first learned of the deletion: by entry, how many bookies had it."""

    @property
    def closed(self) -> bool:
        return self.record.closed

    def names(self, bookie_id: str) -> bool:
        """Whether the record names the bookie; another one may have dropped its copies."""
        return is_named(self.record, bookie_id)

    def was_acked(self, entry_id: int, now_s: float) -> None:
        self.acked = entry_id
        self.acked_s.append(now_s)
        self.moves_s.append(now_s)

    def was_read(self, begun_s: float, found: Mapping[int, bytes], whole: bool) -> None:
        entries = {entry_id: self._which(entry_id, got) for entry_id, got in found.items()}
        self.reads.append(LedgerRead(begun_s, entries, whole))

    def _which(self, entry_id: int, payload: bytes) -> int | bytes:
        """Its own id if that was appended with these bytes: several appends may have the same."""
        if self.submitted[entry_id : entry_id + 1] == [payload]:
            return entry_id
        return self.submitted.index(payload) if payload in self.submitted else payload

    def recovery(self, client: str) -> RecoveryGhost:
        found = self.recoveries.get(client)
        if found is None:
            found = self.recoveries[client] = RecoveryGhost()
        return found

    def adopt(self, record: LedgerRecord | None) -> None:
        """Note the record that the store has now; None: it has no record any more."""
        if record is None:
            self.deleted = True
            return
        if record.state is RecordState.IN_RECOVERY and self.recovered_from is None:
            self.recovered_from = self.record.last_fragment
        self.record = record
        for fragment in record.fragments:  # a recovery may publish several at once
            for slot, bookie in enumerate(fragment.ensemble):
                self.slots[bookie] = self.slots.get(bookie, 0) | 1 << slot
        for one in record.joining:
            self.slots[one.bookie_id] = self.slots.get(one.bookie_id, 0) | 1 << one.slot

    def shows_copy(
        self, bookie: "BookieGhost", entry_id: int, moment: int, *, fenced: bool
    ) -> None:
        """A bookie shows a recovery or repair that it has a copy. Without a fence it may have that
        in memory alone, its add unanswered, and lose it in a crash: such a copy counts once the
        bookie has cleared the ledger's limbo."""
        if not fenced:
            bookie.shown.setdefault(self.ledger_id, {})[entry_id] = None
            return
        bookie.synced[self.ledger_id, entry_id] = None
        self._counts(bookie, entry_id, moment)

    def cleared_at(self, bookie: "BookieGhost", moment: int) -> None:
        """The bookie has cleared the ledger's limbo: repair counts on what it showed before."""
        bookie.cleared.setdefault(self.ledger_id, moment)
        for entry_id in bookie.shown.pop(self.ledger_id, ()):
            self._counts(bookie, entry_id, moment)

    def _counts(self, bookie: "BookieGhost", entry_id: int, moment: int) -> None:
        self.stored.setdefault(entry_id, {})[bookie.bookie_id] = None
        bookie.stored.setdefault((self.ledger_id, entry_id), moment)

    def forget_copies_of(self, bookie: "BookieGhost") -> None:
        """It joins, and was named by the record no more: what it had it may have let go."""
        for entry_id, stored in self.stored.items():
            stored.pop(bookie.bookie_id, None)
            bookie.stored.pop((self.ledger_id, entry_id), None)
            bookie.synced.pop((self.ledger_id, entry_id), None)
        self.shown = {what: None for what in self.shown if what[1] != bookie.bookie_id}
        for way in (bookie.cleared, bookie.compared, bookie.told_to_clear, bookie.shown):
            way.pop(self.ledger_id, None)

    def delete_returned(self) -> None:
        if self.stored_at_delete is None:
            self.stored_at_delete = {entry: len(on) for entry, on in self.stored.items()}


@dataclass
class BookieGhost:
    """What one bookie identity promised, to be kept across crashes."""

    bookie_id: str
    stored: dict[tuple[int, int], int] = field(default_factory=dict)
    """(ledger, entry) it acknowledged: the moment of the first OK. Also what recovery and repair
    count on: what it showed in answer to a fence, or before it cleared the ledger's limbo."""
    shown: dict[int, dict[int, None]] = field(default_factory=dict)
    """By ledger, entries that it showed to repair without a fence since it started: such a read
    shows what is in memory alone, too, and promises nothing."""
    fence_replied: dict[int, int] = field(default_factory=dict)
    """By ledger: the moment of its first reply to a fencing request."""
    fenced_negatives: dict[tuple[int, int], int] = field(default_factory=dict)
    """(ledger, entry) it denied under a fence flag: the moment of that reply."""
    denied: dict[int, int] = field(default_factory=dict)
    """By ledger: the moment of its first negative under a fence flag."""
    wiped: bool = False
    rotten: bool = False
    """Durable bytes of it were damaged: of what it promised it may know nothing any more, but it
    never denies it."""
    decayed: bool = False
    """So it was where they lay, and what was copied since may be damaged with them."""
    bereft: bool = False
    """A directory of it was lost as a whole, and is not damaged any more; if it was the only one it
    is rotten too."""
    unsynced: bool = False
    """It lost power in a run with ledgers of page-cache durability: of those it may lack what it
    acknowledged, but it never denies it."""
    synced: dict[tuple[int, int], None] = field(default_factory=dict)
    """(ledger, entry) that it took from a recovery or a repair, or showed in answer to a fence:
    they are durable, whatever the ledger's durability."""
    unsure: bool = False
    """A directory failed at its first start of all, or it once started with none that was there to
    the last: it cannot know what was there."""
    partial: dict[int, None] = field(default_factory=dict)
    """Ledgers of which a directory was not there when it last started: it may not know what it
    promised of them, but it never denies it."""
    cleared: dict[int, int] = field(default_factory=dict)
    """By ledger: the moment from which the bookie answers that it has everything again."""
    compared: dict[int, int] = field(default_factory=dict)
    """Those that were cleared before it last lost a directory."""
    told_to_clear: dict[int, None] = field(default_factory=dict)
    """Those that it may have cleared, though it has not answered: it may have been killed."""


class Home(NamedTuple):
    """Where a bookie is: its address, and its rack ("": not known)."""

    address: str
    rack: str


@dataclass
class Ghost:
    over_budget: bool = False
    """More disks are lost or rotten than the protocol bears: only silent wrongs count."""
    answers_come_whole: bool = True
    """Nothing that is read arrives damaged, or is looked up in files."""
    calm_repair: bool = False
    """Nothing holds up the workers of repair: the state that they saw still holds when they act."""
    lost_bookie_delay_s: float = 0.0
    drained: dict[str, None] = field(default_factory=dict)
    """Bookies that an operator has drained, or had a moment ago."""
    registered_s: dict[str, float] = field(default_factory=dict)
    """By bookie that is registered: since when."""
    unregistered_s: dict[str, float] = field(default_factory=dict)
    """By bookie whose registration went: when it went last."""
    only_overload: bool = False
    """Nothing is wrong but that bookies are busy now and then."""
    homes: dict[str, Home] = field(default_factory=dict)
    """By bookie."""
    hard_racks: bool = False
    """No two members of a write set may be on one rack."""
    banned: str = ""
    """The address whose bookies no placement may take."""
    cut_off: dict[str, None] = field(default_factory=dict)
    """Bookies that some processes, or all, can no longer reach."""
    ledgers: dict[int, LedgerGhost] = field(default_factory=dict)
    bookies: dict[str, BookieGhost] = field(default_factory=dict)
    serving: dict[str, str] = field(default_factory=dict)
    """By address: the bookie id of the disk that is behind it now."""
    checks: dict[str, int] = field(default_factory=dict)
    """How often each invariant was looked at: one that never was, proves nothing."""
    met: dict[str, int] = field(default_factory=dict)
    """Situations met ("sometimes" counters)."""
    discovered: Callable[[str], None] | None = None
    """Called when the run meets a situation for the first time (forking.py)."""

    def meet(self, situation: str) -> None:
        times = self.met[situation] = self.met.get(situation, 0) + 1
        if times == 1 and self.discovered is not None:
            self.discovered(situation)

    def unregistered(self, bookie_id: str, now_s: float) -> None:
        self.registered_s.pop(bookie_id, None)
        self.unregistered_s[bookie_id] = now_s

    def bookie(self, bookie_id: str) -> BookieGhost:
        found = self.bookies.get(bookie_id)
        if found is None:
            found = self.bookies[bookie_id] = BookieGhost(bookie_id)
        return found
