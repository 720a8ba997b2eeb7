"""What a long run must have met: each situation by name, and how it is recognised.

Always true: a situation is recognised by what was observed (exchanges, metadata writes, acks,
outcomes of calls), never by what the plan intended; nothing here judges. A run of 10,000 seeds that
misses one of SOMETIMES is too tame: `missed` says which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bookie_server.api import messages as m
from bookie_server.api.entry import NO_ENTRY, EntryHeader
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from tests.simulation import contents
from tests.simulation.ghost import BookieGhost, Ghost, LedgerGhost
from tests.simulation.invariants.repair import is_of_repair
from tests.simulation.network import Exchange

SOMETIMES: tuple[tuple[str, str], ...] = (
    ("ensemble changed", "a writer put a fragment with another bookie behind what is confirmed"),
    (
        "fragment replaced at the same key",
        "it changed again before an entry was confirmed",
    ),
    ("slot flapped C->D->C", "a slot had a bookie, another one, and the first one again"),
    ("ensemble changed in recovery", "recovery closed with other members than it began with"),
    ("closed with an empty last fragment", "no entry was confirmed since the last change"),
    ("closed by its writer", "OPEN -> CLOSED"),
    ("recovered", "IN_RECOVERY -> CLOSED"),
    ("closed with its tail on an ack quorum", "at the closing write a tail entry lacked a copy"),
    (
        "two recoverers saw different tails",
        "one was given an entry that was denied to the other",
    ),
    ("close raced a recovery, the writer first", "a writer closed while somebody recovered"),
    ("close raced a recovery, the recoverer first", "marked IN_RECOVERY while its writer closed"),
    ("recovery aborted, then finished", "an attempt failed, and the ledger was recovered later"),
    ("recoverer killed, another finished", "an attempt died with its process; another closed"),
    ("ended by negatives with a holder unheard", "a positive for the dropped entry was possible"),
    ("unacknowledged entry recovered", "recovery kept an entry whose writer never had its ack"),
    ("unacknowledged entry dropped", "a bookie holds an entry beyond the end of a closed ledger"),
    ("unknown outcome of a move, applied", "a record was written and the answer was lost"),
    ("unknown outcome of a move, not applied", "the request to write a record was lost"),
    ("zombie add after close", "a writer's add came to a bookie after the ledger was CLOSED"),
    ("zombie add refused as fenced", "a bookie answered FENCED to a writer"),
    ("zombie add after wipe", "an add came for an identity whose disk was lost"),
    ("zombie add after delete", "an add came after the ledger's record was gone"),
    ("deleted ledger refused an add", "a bookie answered LEDGER_DELETED"),
    ("crashed in the middle of a checkpoint", "a bookie died with part of a flush on its disk"),
    ("long poll woken by an explicit LAC", "a waiting reader was answered by a WriteLac"),
    ("long poll woken by an add", "a waiting reader was answered by an add's header"),
    ("long poll woken by a fence", "a waiting reader was answered by a recoverer's fence"),
    ("long poll ended by time-out", "a waiting reader was told that there is nothing new"),
    ("waiting reader told of the end", "a reader that waited for entries heard of the close"),
    ("wrong bookie refused", "a request came to a bookie of another identity"),
    ("wrong token refused", "a bookie answered UNAUTHORIZED"),
    ("overload answered", "a bookie answered BUSY"),
    ("limbo answered", "a bookie that may have lost data answered LIMBO instead of a negative"),
    ("torn limbo answered", "a bookie that lacks an entry after a torn tail answered LIMBO_TORN"),
    (
        "recovery decided by a torn limbo",
        "the end was found because the whole write set had answered, some of it LIMBO_TORN",
    ),
    ("limbo cleared by repair", "a bookie took the word of whoever compared it with its peers"),
    ("one of several directories lost", "a bookie went on with the others, or came back with them"),
    ("copies of a lost directory brought back", "and everything that belonged there was there"),
    ("entries that lie apart read at once", "a request for several was answered with several"),
    ("entries read at locations that a bookie gave", "a client read and checked them there"),
    ("entries read at locations given ahead", "a client asked the bookie nothing for them"),
    (
        "location given in vain",
        "the file was gone, bad or too slow, and the bookie was asked for the entries",
    ),
    ("bit rot met by a reader", "a read met an entry that its bookie had and cannot deliver"),
    ("bit rot met by a recovery", "a fencing read met such an entry"),
    (
        "large entry acknowledged where it was placed",
        "it lay in a ledger directory, and a journal knew that the ledger has entries there",
    ),
    (
        "large entry waited for the record of its ledger",
        "it was placed before a journal knew that the ledger has entries there",
    ),
    (
        "large entry that could not be placed went to the journal",
        "its directory failed or was full when it was written there",
    ),
    (
        "large entry flushed elsewhere, its directory was lost",
        "its place was given up before a flush had told an index of it",
    ),
    (
        "large entry rescued before its directory was given up",
        "it was in memory alone when a repair cleared its ledger",
    ),
    (
        "crashed while large entries were written",
        "a bookie died, and some of the write may be torn",
    ),
    (
        "crashed between a large entry's ack and its flush",
        "a bookie died when only the direct log's mark told of the entry",
    ),
    ("places replayed at a start", "an index was told of an entry that an earlier run placed"),
    (
        "places replayed of a directory that was away",
        "an earlier start had missed the directory, and this one read its direct logs",
    ),
    ("torn write in a direct log at a start", "what a crash left could not be read to its end"),
    ("damage in a direct log at a start", "what was synced could not be read beyond the mark"),
    ("flush waited for large entries", "some of what it took was still on its way to a place"),
    (
        "large entry on its way taken over by the journal",
        "recovery came to the ledger before the entry was placed",
    ),
    ("log of large entries sealed", "it was full, and its index had all its places"),
    ("log of large entries compacted", "its living entries were copied, and it went"),
    ("no spare bookie", "an entry was acked with a member gone and nobody to take its place"),
    ("change put off", "an entry was acked with a member gone although there was a spare"),
    ("equal entry added again", "a bookie that has an entry was sent it again and said OK"),
    ("acked without a copy of the whole write set", "an ack came at fewer than Qw copies"),
    ("ledger deleted", "the record of a closed ledger was removed"),
    ("three recoveries of one ledger at once", "more than two clients recovered it at a time"),
    ("marked by one, closed by another", "who closed found the ledger IN_RECOVERY already"),
    ("long poll ended by a deletion", "the ledger was deleted while a reader waited"),
    ("append: TimedOut", "an add was given up as a whole"),
    ("append: NotEnoughBookies", "a write set had too few bookies left, for too long"),
    ("append: LedgerFenced", "a writer heard that its ledger is fenced"),
    ("recover: DataUnavailable", "the end could not be decided: the ledger stayed IN_RECOVERY"),
    ("read: DataUnavailable", "a confirmed entry could not be had then, and that was said"),
    ("read beyond what is confirmed refused", "a reader was told that the entry is not there yet"),
    ("old reader with an old record", "one opened before the ensembles changed read to the end"),
    (
        "audit: a ledger is unavailable, over budget",
        "too much was lost to close it, and it said so",
    ),
    ("audit: an entry is unavailable, over budget", "too much was lost to read it, and it said so"),
    (
        "audit: a torn tail beside a lost disk leaves the end undecided",
        "together they may have been an ack quorum, and the ledger stayed IN_RECOVERY",
    ),
    ("drill with a hung bookie", "everything was tried while one bookie hung"),
    ("commit: LedgerFenced", "a commit whose intent was condemned was refused"),
    ("janitor deleted", "a janitor deleted what no commit names"),
    ("two janitors at work during the chaos", "a pass began while another's was under way"),
    ("rows in a partition that came later", "a commit has rows for one that its topic grew by"),
    ("rows replaced", "a batch took the place of all rows of its topic"),
    ("overwrite of held rows refused", "a subscription held rows that were to be replaced"),
    ("held rows replaced on demand", "rows were replaced that a subscription held"),
    ("row read that was taken away before", "who had folded before it was given the row"),
    ("way stays cut for ever", "all else healed, but requests or answers still never arrived"),
    (
        "drill beside ways that stay cut",
        "who met them wrote, closed and read a ledger",
    ),
    (
        "copy rotted before compaction read it back",
        "it was damaged between its last sync and the first look at it",
    ),
    (
        "power lost with entries in the page cache alone",
        "of ledgers that are acknowledged before they are synced",
    ),
    (
        "audit: closed with a bookie declared gone",
        "an operator ended a recovery that nothing else could decide",
    ),
    ("index made anew", "an operator had lost it, and the entry logs gave it back"),
    ("power cut while an index was made anew", "the command was given again"),
    ("entries skipped by their keys", "filters said that they have none of those looked for"),
    ("live segment cut", "it was read from within an entry or to within one"),
    ("every copy of a ledger compared", "an operator had every bookie of it looked at"),
    ("lost bookie forgotten", "one that will never come back was taken off the list"),
    ("unused subscription holds rows", "one that no query has yet is there"),
    ("topic truncated", "somebody let all rows go"),
    ("topic terminated", "somebody ended a topic for good"),
    ("job committed", "a batch of an app id that nobody gives again is in the log"),
    ("schema registered", "somebody gave a topic columns of its own"),
    ("pass over the whole cluster", "the elected process trimmed, checkpointed and cleaned"),
)
"""(name, what happened)."""

RARE: tuple[str, ...] = (
    "audit: closed with a bookie declared gone",
    "copy rotted before compaction read it back",
    "audit: a torn tail beside a lost disk leaves the end undecided",
    "recovery decided by a torn limbo",
    "torn limbo answered",
    "append: TimedOut",
    "copies of a lost directory brought back",
    "large entry that could not be placed went to the journal",
    "large entry flushed elsewhere, its directory was lost",
    "large entry rescued before its directory was given up",
    "crashed while large entries were written",
    "places replayed of a directory that was away",
    "torn write in a direct log at a start",
    "damage in a direct log at a start",
    "bit rot met by a reader",
    "bit rot met by a recovery",
    "slot flapped C->D->C",
    "recoverer killed, another finished",
    "two recoverers saw different tails",
    "deleted ledger refused an add",
    "waiting reader told of the end",
    "three recoveries of one ledger at once",
    "long poll ended by a deletion",
    "recover: DataUnavailable",
    "old reader with an old record",
    "audit: a ledger is unavailable, over budget",
    "audit: an entry is unavailable, over budget",
    "commit: LedgerFenced",
    "janitor deleted",
    "lost bookie forgotten",
    "topic terminated",
    "power cut while an index was made anew",
)
"""Those of SOMETIMES that a few hundred seeds may miss."""


def missed(met: Mapping[str, int], faults: Sequence[str] = (), *, rare: bool = True) -> list[str]:
    """The situations that a run did not meet, each with its sentence, and the classes of fault
    (of `faults`) that never happened. Without `rare`, those of RARE may be missed."""
    wanted = [*SOMETIMES, *((f"fault: {name}", "a class of fault happened") for name in faults)]
    return [
        f"{name}: {sentence}"
        for name, sentence in wanted
        if not met.get(name) and (rare or name not in RARE)
    ]


@dataclass
class _Poll:
    """A long poll that was answered with news, whose cause has not been seen yet."""

    bookie_id: str
    ledger_id: int
    lac: int
    fenced: bool
    ended: int


@dataclass
class Situations:
    """Recognises situations from what observers tell it, and counts them in the ghost."""

    ghost: Ghost
    available: dict[str, None] = field(default_factory=dict)
    """Bookies that are registered as writable."""
    _recovering: dict[int, int] = field(default_factory=dict)
    """By ledger: how many calls of recover are under way."""
    _marked_by: dict[int, str] = field(default_factory=dict)
    """By ledger: the client that moved it to IN_RECOVERY."""
    _closing: dict[int, None] = field(default_factory=dict)
    """Ledgers whose writer's close is under way."""
    _owners: dict[int, list[list[str]]] = field(default_factory=dict)
    """By ledger and slot: the bookies it had, one after the other."""
    _polls: list[_Poll] = field(default_factory=list)

    # -- answers of bookies --------------------------------------------------------------------

    def add(
        self,
        ledger: LedgerGhost,
        bookie_id: str,
        recovery: bool,
        header: EntryHeader,
        status: Status,
        exchange: Exchange,
    ) -> None:
        ghost, bookie = self.ghost, self.ghost.bookie(bookie_id)
        self._status(status)
        held = bookie.stored.get((ledger.ledger_id, header.entry_id))
        if status is Status.OK:
            if held is not None and held < exchange.begun:
                ghost.meet("equal entry added again")
            self._woke(bookie_id, ledger, header.last_add_confirmed, exchange, "an add")
        if recovery:
            return
        if status is Status.FENCED:
            ghost.meet("zombie add refused as fenced")
        if ledger.deleted:
            ghost.meet("zombie add after delete")
        elif ledger.closed:
            ghost.meet("zombie add after close")
        if bookie.wiped:
            ghost.meet("zombie add after wipe")

    def read(
        self,
        ledger: LedgerGhost,
        request: m.ReadRequest,
        response: m.ReadResponse,
        bookie: BookieGhost,
    ) -> None:
        self._status(response.status)
        if request.further and len(response.results) > 1:
            self.ghost.meet("entries that lie apart read at once")
        for entry_id, result in contents.results(request, response, 0):
            if result.status is Status.LIMBO:
                self.ghost.meet("limbo answered")
            elif result.status is Status.LIMBO_TORN:
                self.ghost.meet("torn limbo answered")
            damaged = result.status in (Status.IO_ERROR, Status.BAD_DIGEST)
            if damaged and (ledger.ledger_id, entry_id) in bookie.stored:
                who = "a recovery" if request.fence else "a reader"
                self.ghost.meet(f"bit rot met by {who}")

    def looked(self, found: bool, unasked: bool) -> None:
        what = "entries read at locations that a bookie gave" if found else "location given in vain"
        self.ghost.meet("entries read at locations given ahead" if unasked else what)

    def read_lac(
        self,
        ledger: LedgerGhost,
        request: m.ReadLacRequest,
        response: m.ReadLacResponse,
        exchange: Exchange,
    ) -> None:
        self._status(response.status)
        bookie_id, lac = request.bookie_id, response.last_add_confirmed
        if request.fence and response.status is Status.OK:
            self._woke(bookie_id, ledger, NO_ENTRY, exchange, "a fence")
        if not request.wait_ms or response.status is not Status.OK:
            return
        if lac > request.previous_lac or response.fenced:
            news = NO_ENTRY if lac <= request.previous_lac else lac
            poll = _Poll(bookie_id, ledger.ledger_id, news, response.fenced, exchange.ended)
            self._polls.append(poll)
        else:
            cause = "a deletion" if ledger.deleted else "time-out"
            self.ghost.meet(f"long poll ended by {cause}")

    def write_lac(
        self,
        ledger: LedgerGhost,
        request: m.WriteLacRequest,
        response: m.WriteLacResponse,
        exchange: Exchange,
    ) -> None:
        self._status(response.status)
        lac = request.last_add_confirmed
        if response.status is Status.OK:
            self._woke(request.bookie_id, ledger, lac, exchange, "an explicit LAC")

    def _woke(
        self, bookie_id: str, ledger: LedgerGhost, lac: int, exchange: Exchange, cause: str
    ) -> None:
        """What an exchange changed was what a poll, answered while it was under way, waited for."""
        for poll in list(self._polls):
            if (poll.bookie_id, poll.ledger_id) != (bookie_id, ledger.ledger_id):
                continue
            same = poll.lac == lac and (lac > NO_ENTRY or poll.fenced)
            if same and exchange.begun < poll.ended:
                self.ghost.meet(f"long poll woken by {cause}")
            if same or exchange.begun > poll.ended:
                self._polls.remove(poll)

    def _status(self, status: Status) -> None:
        what = _ANSWERS.get(status)
        if what is not None:
            self.ghost.meet(what)

    # -- the store -----------------------------------------------------------------------------

    def registered(self, bookie_id: str, here: bool) -> None:
        if here:
            self.available[bookie_id] = None
        else:
            self.available.pop(bookie_id, None)

    def moved(
        self, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord | None, author: str
    ) -> None:
        """The ledger's record was replaced; the ghost still has the one before."""
        meet = self.ghost.meet
        if after is None:
            meet("ledger deleted")
            return
        if is_of_repair(before, after):
            meet("record changed by repair")
            return
        if before.state is after.state is RecordState.OPEN:
            same = before.last_fragment.first_entry == after.last_fragment.first_entry
            meet("fragment replaced at the same key" if same else "ensemble changed")
            self._owner(ledger.ledger_id, before, after)
        elif after.state is RecordState.IN_RECOVERY:
            self._marked_by[ledger.ledger_id] = author
            if ledger.ledger_id in self._closing:
                meet("close raced a recovery, the recoverer first")
        elif before.state is RecordState.IN_RECOVERY:
            meet("recovered")
            self._recovered(ledger, before, after, author)
        elif after.closed:
            meet("closed by its writer")
            if self._recovering.get(ledger.ledger_id):
                meet("close raced a recovery, the writer first")
        last = after.last_entry
        if last is not None:
            if last < after.last_fragment.first_entry:
                meet("closed with an empty last fragment")
            if last + 1 in ledger.stored:
                meet("unacknowledged entry dropped")

    def _owner(self, ledger_id: int, before: LedgerRecord, after: LedgerRecord) -> None:
        first = [[bookie] for bookie in before.last_fragment.ensemble]
        slots = self._owners.setdefault(ledger_id, first)
        for had, bookie in zip(slots, after.last_fragment.ensemble, strict=True):
            if had[-1] != bookie:
                if bookie in had:
                    self.ghost.meet("slot flapped C->D->C")
                had.append(bookie)

    def _recovered(
        self, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord, author: str
    ) -> None:
        meet, last = self.ghost.meet, after.last_entry
        assert last is not None
        if before.fragments != after.fragments:
            meet("ensemble changed in recovery")
        if last > ledger.acked:
            meet("unacknowledged entry recovered")
        if self._marked_by.get(ledger.ledger_id) != author:
            meet("marked by one, closed by another")
        if any(told.aborted and told.fenced for told in ledger.recoveries.values()):
            meet("recovery aborted, then finished")
        denied = ledger.recovery(author).who_said(last + 1, Meaning.NEGATIVE)
        if any(bookie not in denied for bookie in ledger.stored.get(last + 1, ())):
            meet("ended by negatives with a holder unheard")

    def judged_differently(self, ledger: LedgerGhost) -> bool:
        """Whether two clients were told of different tails: to one somebody gave an entry, to the
        other so many denied it that for it the ledger ended there."""
        needed = ledger.write_quorum - ledger.ack_quorum + 1
        told = list(ledger.recoveries.values())
        for one in told:
            given = [e for e in one.said if one.who_said(e, Meaning.POSITIVE)]
            for other in told:
                for entry_id in given:
                    if other is not one and not other.who_said(entry_id, Meaning.POSITIVE):
                        denied = other.who_said(entry_id, Meaning.NEGATIVE)
                        members = _members(ledger, entry_id)
                        if sum(bookie in denied for bookie in members) >= needed:
                            return True
        return False

    def at_the_end(self) -> None:
        """What can be told only when all is over."""
        for ledger in self.ghost.ledgers.values():
            if len(ledger.recoveries) < 2:
                continue
            if self.judged_differently(ledger):
                self.ghost.meet("two recoverers saw different tails")
            if ledger.closed and any(told.killed for told in ledger.recoveries.values()):
                self.ghost.meet("recoverer killed, another finished")

    # -- clients -------------------------------------------------------------------------------

    def recovery_begins(self, ledger_id: int) -> None:
        self._recovering[ledger_id] = self._recovering.get(ledger_id, 0) + 1
        if self._recovering[ledger_id] == 3:
            self.ghost.meet("three recoveries of one ledger at once")

    def recovery_ends(self, ledger_id: int, client: str, failed: bool, killed: bool) -> None:
        self._recovering[ledger_id] -= 1
        ledger = self.ghost.ledgers.get(ledger_id)
        if ledger is not None and failed and client in ledger.recoveries:
            told = ledger.recoveries[client]
            told.aborted, told.killed = True, told.killed or killed

    def close_begins(self, ledger_id: int) -> None:
        self._closing[ledger_id] = None

    def close_ends(self, ledger_id: int) -> None:
        self._closing.pop(ledger_id, None)

    def acked(self, ledger: LedgerGhost, entry_id: int) -> None:
        members = _members(ledger, entry_id, ledger.record.fragment_of(entry_id).ensemble)
        if len(ledger.stored.get(entry_id, ())) < ledger.write_quorum:
            self.ghost.meet("acked without a copy of the whole write set")
        if all(bookie in self.available for bookie in members):
            return
        ensemble = ledger.record.last_fragment.ensemble
        spare = any(bookie not in ensemble for bookie in self.available)
        self.ghost.meet("change put off" if spare else "no spare bookie")

    def told_of_the_end(self) -> None:
        self.ghost.meet("waiting reader told of the end")

    def outcome_unknown(self, applied: bool) -> None:
        self.ghost.meet(f"unknown outcome of a move, {'' if applied else 'not '}applied")

    def crashed(self, flushing: bool) -> None:
        if flushing:
            self.ghost.meet("crashed in the middle of a checkpoint")


def _members(
    ledger: LedgerGhost, entry_id: int, ensemble: tuple[str, ...] | None = None
) -> list[str]:
    """The write set of an entry, by default in the ensemble that recoveries read from."""
    if ensemble is None:
        fragment = ledger.recovered_from or ledger.record.last_fragment
        ensemble = fragment.ensemble
    return [ensemble[(entry_id + i) % len(ensemble)] for i in range(ledger.write_quorum)]


_ANSWERS: dict[Status, str] = {
    Status.UNAUTHORIZED: "wrong token refused",
    Status.BUSY: "overload answered",
    Status.LIMBO: "limbo answered",
    Status.LEDGER_DELETED: "deleted ledger refused an add",
    Status.WRONG_BOOKIE: "wrong bookie refused",
}
assert all(meaning(status) is Meaning.UNKNOWN for status in _ANSWERS)
assert set(RARE) <= {name for name, _ in SOMETIMES}
