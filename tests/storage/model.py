"""What a node promised, kept in dictionaries; every answer it gives is judged against them.

Always true of a node within its means (no directory lost, nothing rotten):
- what was answered OK is served again, the same bytes, until its ledger is deleted;
- what is served under an id was sent under it, and is one entry for ever once it was acknowledged
  or was found after a restart; another one is refused;
- a fence that was answered stays, and no normal add begun after it is taken;
- the last add confirmed is never below an explicit one that was answered, nor above all sent;
- what was acknowledged is never denied; what was found gone with its deleted ledger after a
  restart stays gone, unless recovery adds it again.
When a directory was lost, "unknown" is an answer to everything, until it is back; a negative never
is one. Nor is it any more of a ledger whose limbo was cleared: what the comparison found, and what
was acknowledged since it began, is served then, whatever the directory does; what it did not find
may be served or denied (`forgiven`).
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.status import Status

NEGATIVES = (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
SIZES = (40, 10, 200, 900, 2500, 3900, 120, 60)
_BYTES = bytes(range(256)) * 32


class Broken(AssertionError):
    """The node broke a promise."""


@lru_cache(maxsize=1 << 14)
def entry_of(ledger_id: int, entry_id: int, variant: int, lac: int, size: int) -> bytes:
    """An entry; its identity follows from all arguments but `lac`."""
    start = (31 * entry_id + 7 * variant + ledger_id) % 256
    payload = _BYTES[start : start + size]
    count = entry_id + 1
    header = EntryHeader(
        *(ledger_id, entry_id, lac, count * 1000 + variant, count, size, payload_crc([payload]))
    )
    return pack_header(header) + payload


def identity(entry: bytes) -> bytes:
    """The bytes of a header that two equal entries have in common (not LAC, flags, own CRC)."""
    return entry[6:24] + entry[32:56]


@dataclass
class LedgerModel:
    """One ledger. An identity is in `acked` from its first OK on, or since it was read after a
    restart; `sent` are the bytes that may lie under an id."""

    ledger_id: int
    acked: dict[int, bytes] = field(default_factory=dict)
    sent: dict[int, list[bytes]] = field(default_factory=dict)
    fence_asked: bool = False
    fenced: bool = False
    explicit_lac: int = -1
    lac_sent: int = -1
    next_entry: int = 0
    deleted: bool = False
    buried: bool = False
    gone: dict[int, None] = field(default_factory=dict)
    """Entries that were acked, and denied after a restart, for the ledger is deleted."""
    forked: dict[int, None] = field(default_factory=dict)
    """Of which another content was sent while the first may have been out of reach."""
    page_cache: bool = False
    """What was acknowledged may be lost with the power, and is then unknown, never denied."""
    lost: dict[int, None] = field(default_factory=dict)
    """Entries of a page-cache ledger that were acknowledged and went with the power."""
    power_lost: bool = False
    """Since it was last verified."""
    compared: "Compared | None" = None
    """The last comparison that ended."""
    forgiven: dict[int, None] = field(default_factory=dict)
    """Entries that the ledger's limbo was cleared without, or may have been."""
    does_without: dict[str, None] = field(default_factory=dict)
    """Directories that were lost when its limbo was cleared, and are not back since."""
    clearing: bool = False
    """Somebody compares or clears it; one at a time."""

    @contextmanager
    def being_cleared(self) -> Iterator[None]:
        self.clearing = True
        try:
            yield
        finally:
            self.clearing = False


class Compared(NamedTuple):
    """What the node said of a ledger when somebody began to compare it with its peers, and the
    entries that were acknowledged by then, were not found, and are not here since: what they are,
    if that is known."""

    revision: int
    lacking: dict[int, bytes | None]


class Model:
    """What one node promised. `unknown_allowed`: something of it is damaged or lost, of any ledger.
    `lost`: ids of the directories that are. `failing`: one is failing, so any request may be
    answered IO_ERROR until the next restart."""

    def __init__(self, ledger_ids: range) -> None:
        self.ledgers = {ledger_id: LedgerModel(ledger_id) for ledger_id in ledger_ids}
        self.unknown_allowed = False
        self.lost: dict[str, None] = {}
        self.failing = False
        self.judged = 0
        self._any_was_lost = False

    def unknown(self, ledger: LedgerModel) -> bool:
        """Whether something of the ledger may be out of reach."""
        return self.unknown_allowed or any(each not in ledger.does_without for each in self.lost)

    def loses(self, directory_id: str) -> None:
        """The directory is lost, and what it has is out of reach of adds that are under way."""
        self.lost[directory_id] = None
        self._any_was_lost = True
        for ledger in self.ledgers.values():
            if not (ledger.acked or ledger.fenced or ledger.explicit_lac >= 0):
                ledger.fence_asked = True  # it alone may know it, and may be away when others do
            for entry_id, known in ledger.sent.items():
                if len({identity(each) for each in known}) > 1:
                    ledger.forked[entry_id] = None

    def back(self, directory_id: str) -> None:
        """The directory is there again; who did without it may come to rely on it."""
        self.lost.pop(directory_id, None)
        for ledger in self.ledgers.values():
            ledger.does_without.pop(directory_id, None)

    # -- adds --

    def sends(self, ledger: LedgerModel, entry_id: int, entry: bytes, lac: int) -> None:
        known = ledger.sent.setdefault(entry_id, [])
        if entry not in known:
            known.append(entry)
        ledger.lac_sent = max(ledger.lac_sent, lac)
        ledger.next_entry = max(ledger.next_entry, entry_id + 1)
        ledger.gone.pop(entry_id, None)
        if self.unknown(ledger) or self.failing or ledger.deleted:
            others = [each for each in known if identity(each) != identity(entry)]
            ledger.forked.update({entry_id: None} if others else {})

    def added(
        self, ledger: LedgerModel, entry_id: int, entry: bytes, status: Status, begun: "Begun"
    ) -> None:
        """The answer to an add that was begun when things were as `begun` says."""
        self.judged += 1
        what = identity(entry)
        if status is Status.OK:
            self._taken(ledger, entry_id, what, begun)
            return
        where = _at(ledger, entry_id)
        if status is Status.FENCED:
            _hold(ledger.fence_asked, f"an add of {where} was FENCED, and nobody fenced")
        elif status is Status.CONFLICTING_ENTRY:
            others = [e for e in ledger.sent[entry_id] if identity(e) != what]
            _hold(bool(others), f"{where} conflicts with nothing that was sent")
        elif status is Status.LEDGER_DELETED:
            _hold(ledger.deleted, f"{where}: the ledger was not deleted")
            ledger.buried = True
        elif status not in (Status.BUSY, Status.SHUTTING_DOWN):
            # after a torn tail a fence may be forgotten, and no record is there to say so
            unsure = ledger.deleted and status is Status.METADATA_UNAVAILABLE
            allowed = self.unknown(ledger) or self.failing or unsure
            _hold(allowed, f"an add of {where} was answered {status.name}")

    def _taken(self, ledger: LedgerModel, entry_id: int, what: bytes, begun: "Begun") -> None:
        where = _at(ledger, entry_id)
        if not begun.recovery:
            _hold(not begun.fenced, f"a normal add of {where}, begun after the fence, was taken")
            _hold(not begun.buried, f"a normal add of {where}, a buried ledger's, was taken")
        if begun.compared is ledger.compared:  # else the comparison may have come before it
            ledger.forgiven.pop(entry_id, None)
            if ledger.compared is not None:
                ledger.compared.lacking.pop(entry_id, None)
        elif entry_id in ledger.forgiven:
            return
        before = ledger.acked.setdefault(entry_id, what)
        if ledger.deleted or entry_id in ledger.forked:
            ledger.acked[entry_id] = what  # the first may be collected, or out of reach
        else:
            _hold(before == what, f"two different entries were acknowledged as {where}")

    # -- reads --

    def read(
        self, ledger: LedgerModel, entry_id: int, status: Status, entry: bytes, begun: "Begun"
    ) -> None:
        """The answer for one entry to a read that was begun when things were as `begun` says."""
        self.judged += 1
        if status is Status.OK:
            self._served(ledger, entry_id, entry, begun)
            return
        if status in NEGATIVES:
            promised = entry_id in begun.acked or entry_id in ledger.lost
            if promised and not (ledger.deleted or entry_id in ledger.forgiven):
                raise Broken(
                    f"{_at(ledger, entry_id)} was acknowledged, and is denied: {status.name}"
                )
        elif status is not Status.LEDGER_DELETED:
            where = _at(ledger, entry_id)
            known = entry_id in begun.acked and entry_id not in ledger.forgiven
            known = known and not ledger.deleted and not ledger.power_lost
            allowed = self.unknown(ledger) or (not known and status.name.startswith("LIMBO"))
            allowed = allowed or self.failing
            retried = status in (Status.BUSY, Status.SHUTTING_DOWN)
            _hold(allowed or retried, f"a read of {where} was answered {status.name}")

    def _served(self, ledger: LedgerModel, entry_id: int, entry: bytes, begun: "Begun") -> None:
        possible = ledger.sent.get(entry_id, [])
        if entry not in possible:
            where = _at(ledger, entry_id)
            raise Broken(f"what is served as {where} was never sent, or was replaced")
        if entry_id in ledger.gone:
            raise Broken(f"{_at(ledger, entry_id)} of a deleted ledger came back")
        if entry_id in begun.acked and entry_id not in ledger.forked:
            what = identity(entry)
            if what not in (begun.acked[entry_id], ledger.acked.get(entry_id)):
                raise Broken(f"{_at(ledger, entry_id)}: another one was acked")
            if len(possible) > 1 and not self._any_was_lost:
                possible[:] = [entry, *(e for e in possible if identity(e) != what)]

    def crashed(self, *, power: bool) -> None:
        for ledger in self.ledgers.values():
            ledger.power_lost = ledger.power_lost or (ledger.page_cache and power)

    def settle(self, ledger: LedgerModel, found: dict[int, bytes], denied: list[int]) -> None:
        """After a restart, nothing under way: what was found stays, what was denied is gone."""
        for entry_id, entry in found.items():
            ledger.acked[entry_id] = identity(entry)
            if entry_id not in ledger.forked:
                ledger.sent[entry_id] = self._may_lie_here(ledger, entry_id, entry)
            ledger.lost.pop(entry_id, None)
            ledger.forgiven.pop(entry_id, None)
            if ledger.compared is not None:
                ledger.compared.lacking.pop(entry_id, None)
        if ledger.power_lost:
            for entry_id in [e for e in ledger.acked if e not in found]:
                del ledger.acked[entry_id]
                ledger.lost[entry_id] = None
        ledger.power_lost = False
        for entry_id in denied:
            ledger.forgiven.pop(entry_id, None)
            if ledger.acked.pop(entry_id, None) is not None:
                ledger.gone[entry_id] = None
                ledger.forked.pop(entry_id, None)
            elif entry_id not in ledger.gone and not self.lost:  # what is away may bring it back
                ledger.sent.pop(entry_id, None)

    def _may_lie_here(self, ledger: LedgerModel, entry_id: int, found: bytes) -> list[bytes]:
        """The bytes that were found, and if directories may differ what may lie in another one: the
        same entry, sent again with another last add confirmed."""
        others = ledger.sent.get(entry_id, []) if self._any_was_lost else []
        return [found, *(e for e in others if e != found and identity(e) == identity(found))]

    # -- limbo --

    def clears(self, ledger: LedgerModel, compared: Compared) -> dict[int, bytes | None]:
        """From now on what this comparison did not find may be missing for good: this."""
        promised = {**dict.fromkeys(ledger.lost), **ledger.acked}
        forgiven = {e: promised[e] for e in compared.lacking if e in promised}
        for entry_id in forgiven:
            ledger.acked.pop(entry_id, None)
            ledger.lost.pop(entry_id, None)
            ledger.forgiven[entry_id] = None
        return forgiven

    def cleared(
        self,
        ledger: LedgerModel,
        forgiven: Mapping[int, bytes | None],
        lost: Collection[str],
        status: Status,
    ) -> None:
        """The answer to who cleared the ledger without these entries when `lost` were lost."""
        self.judged += 1
        if status is Status.OK:
            ledger.does_without.update(dict.fromkeys(each for each in lost if each in self.lost))
        elif status is Status.LIMBO:  # it was refused: nothing has changed
            for entry_id, what in forgiven.items():
                if ledger.forgiven.pop(entry_id, self) is not self:
                    if what is None:
                        ledger.lost[entry_id] = None
                    else:
                        ledger.acked.setdefault(entry_id, what)
        else:
            self.limbo_unanswered(ledger, status)

    def limbo_unanswered(self, ledger: LedgerModel, status: Status) -> None:
        """How it stands was not said, or whether it was cleared."""
        expected = ledger.deleted or self.unknown(ledger) or self.failing
        stops = status in (Status.SHUTTING_DOWN, Status.BUSY)
        where = f"ClearLimbo of {ledger.ledger_id}"
        _hold(expected or stops, f"{where} was answered {status.name}")

    # -- fences, last add confirmed --

    def lac_read(self, ledger: LedgerModel, status: Status, lac: int, fenced: bool) -> None:
        self.judged += 1
        if status is not Status.OK:
            expected = ledger.deleted or self.unknown(ledger) or self.failing
            stops = status is Status.SHUTTING_DOWN
            _hold(expected or stops, f"the LAC of {ledger.ledger_id}: {status.name}")
            return
        _hold(lac <= ledger.lac_sent, f"LAC {lac} of {ledger.ledger_id} was never said")
        _hold(ledger.fence_asked or not fenced, f"{ledger.ledger_id} is fenced, by nobody")
        if not ledger.deleted:
            _hold(fenced or not ledger.fenced, f"the fence of {ledger.ledger_id} is lost")
            enough = lac >= ledger.explicit_lac
            _hold(enough, f"LAC {lac} of {ledger.ledger_id} < {ledger.explicit_lac}")


class Begun(NamedTuple):
    """What had been answered when a request was begun; `acked` within the range of a read."""

    recovery: bool = False
    fenced: bool = False
    buried: bool = False
    acked: dict[int, bytes] = {}
    compared: Compared | None = None


def _at(ledger: LedgerModel, entry_id: int) -> str:
    """The entry, in words; each judgement that holds, and most do, does without them."""
    return f"{ledger.ledger_id}:{entry_id}"


def _hold(true: bool, otherwise: str) -> None:
    if not true:
        raise Broken(otherwise)
