"""A check of every ledger: whether the bookies that its record names have all copies of each entry,
whether the copies are well placed, and whether a topic refers to the ledger.

    each record -> each bookie of each complete fragment is asked which entries its index has (the
    entries are not read); with `deep` every entry is read at every member -> the faults of each
    ledger, counted

Always true: a check changes nothing. The last fragment of an open ledger is not checked, as its
writer still changes it; of a ledger in recovery no fragment is checked. If a bookie does not
respond, the copies that it should have count as missing. The command and the tasks of a Spark job
(spark/jobs.py) run `audit_batch`.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from bookie_server.api.messages import ReadResponse, StoredResponse
from bookie_server.api.status import Status
from spark_ledger.errors import NoSuchLedger
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.transitions import is_fragment_complete
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens, entries_of, should_keep
from spark_ledger.metadata.store_calls import call_each, in_batches, unavailable_while
from spark_ledger.repair import slots, work_list
from spark_ledger.repair.copies import ask_in_windows, covered_count, delivered_entries
from spark_ledger.repair.work_list import ListedLedger

LEDGERS_AT_ONCE = 16
EXAMPLES_MAX = 100

References = Mapping[str, Container[int] | None]
"""The ledgers to which each topic refers, by topic id; None: the topic could not be read, so it may
refer to any ledger."""


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """The result for one ledger. `entries`: how many entries were checked, those of complete
    fragments. `lacking`: for each bookie, how many entries it should keep and
    lacks. `silent`: the bookies that did not respond; all entries that they should keep count as
    lacking. `nowhere`: how many entries no member has, by the responses of all members or by a
    worker's finding; `first_nowhere` is the first of these entries. `misplaced_slots`: how many
    slots a better placed bookie can take (slots.py). `blocked`: the obstacle to the repair that a
    worker noted (ListedLedger.blocked); empty if there is none."""

    ledger_id: int
    entries: int
    lacking: dict[str, int] = field(default_factory=dict)
    nowhere: int = 0
    first_nowhere: int = -1
    misplaced_slots: int = 0
    blocked: str = ""
    silent: frozenset[str] = frozenset()


@dataclass(slots=True)
class Audit:
    """The result for all ledgers: how many ledgers are `under_replicated`, `misplaced`, `blocked`
    (their repair cannot go on) and `unreferenced`; `damaged`: how many entries no member has.
    `wrong`: up to EXAMPLES_MAX ledgers with a fault. `silent`: the bookies that did not respond;
    the copies that they should have count as missing."""

    ledgers: int = 0
    entries: int = 0
    under_replicated: int = 0
    misplaced: int = 0
    damaged: int = 0
    blocked: int = 0
    unreferenced: int = 0
    wrong: list[LedgerCheck] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether no ledger is under-replicated, damaged or blocked."""
        return not (self.under_replicated or self.damaged or self.blocked)

    def counts(self) -> dict[str, int]:
        names = "ledgers entries under_replicated misplaced damaged blocked unreferenced"
        return {name: getattr(self, name) for name in names.split()}

    def add(self, ledger_check: LedgerCheck) -> None:
        self.ledgers += 1
        self.entries += ledger_check.entries
        self.under_replicated += bool(ledger_check.lacking)
        self.misplaced += bool(ledger_check.misplaced_slots)
        self.damaged += ledger_check.nowhere
        self.blocked += bool(ledger_check.blocked)
        self.silent |= ledger_check.silent
        is_wrong = ledger_check.lacking or ledger_check.misplaced_slots or ledger_check.blocked
        if is_wrong and len(self.wrong) < EXAMPLES_MAX:
            self.wrong.append(ledger_check)

    def merge(self, other: "Audit") -> None:
        """Add the result for other ledgers."""
        for name, count in other.counts().items():
            setattr(self, name, getattr(self, name) + count)
        self.silent |= other.silent
        self.wrong = [*self.wrong, *other.wrong][:EXAMPLES_MAX]


async def audit(
    ledgers: LedgerStore, tokens: Tokens, *, deep: bool = False, referred: References | None = None
) -> Audit:
    """Check every ledger. Raises Unavailable."""
    result = Audit()
    async for batch in in_batches(ledgers.list(), 16 * LEDGERS_AT_ONCE):
        result.merge(await audit_batch(ledgers, tokens, batch, deep=deep, referred=referred))
    return result


async def audit_batch(
    ledgers: LedgerStore,
    tokens: Tokens,
    ledger_ids: Collection[int],
    *,
    deep: bool = False,
    referred: References | None = None,
) -> Audit:
    """Check the ledgers of these ids that exist. A closed ledger that was made for a topic counts
    as `unreferenced` if the topic does not refer to it; without `referred` no ledger counts as
    unreferenced. Raises Unavailable."""
    result = Audit()

    async def check(ledger_id: int) -> None:
        try:
            record = (await ledgers.record(ledger_id)).record
        except NoSuchLedger:
            return  # the ledger was deleted meanwhile
        with unavailable_while("looking up a listed ledger"):
            work = await work_list.find(ledgers.metadata, ledger_id)
        result.add(await check_ledger(ledgers, record, tokens, work, deep=deep))
        if referred is not None and record.topic and record.closed:
            referred_ledgers = referred.get(record.topic, ())
            result.unreferenced += (
                referred_ledgers is not None and ledger_id not in referred_ledgers
            )

    await call_each(check, ledger_ids, LEDGERS_AT_ONCE)
    return result


async def check_ledger(
    ledgers: LedgerStore,
    record: LedgerRecord,
    tokens: Tokens,
    work: ListedLedger | None = None,
    *,
    deep: bool = False,
) -> LedgerCheck:
    """Check one ledger by its record. `work`: the ledger on the list of under-replicated ledgers,
    if it is listed."""
    last = record.last_entry
    if last is None:
        last = record.last_fragment.first_entry - 1
    lacking: dict[str, int] = {}
    silent: set[str] = set()
    checked, nowhere, first_nowhere = 0, 0, -1
    unsupplied = frozenset(work.damaged if work is not None else ())  # found by a worker
    for fragment, entries in entries_of(record, last):
        if not entries or not is_fragment_complete(record, fragment.first_entry):
            continue
        checked += len(entries)
        # By entry id the number of copies that are lacking, and of these at bookies that responded.
        lacking_copies, denied_copies = Counter[int](), Counter[int]()
        results = await asyncio.gather(
            *(
                _missing_at(ledgers, record, bookie, slot, entries, tokens, deep)
                for slot, bookie in enumerate(fragment.ensemble)
            )
        )
        for bookie, (missing, responded) in zip(fragment.ensemble, results, strict=True):
            if missing:
                lacking[bookie] = lacking.get(bookie, 0) + len(missing)
            lacking_copies.update(missing)
            if responded:
                denied_copies.update(missing)
            else:
                silent.add(bookie)
        lost_entries = sorted(
            entry_id
            for entry_id, count in lacking_copies.items()
            if count == record.write_quorum
            and (denied_copies[entry_id] == count or entry_id in unsupplied)
        )
        if lost_entries:
            nowhere += len(lost_entries)
            first_nowhere = lost_entries[0] if first_nowhere < 0 else first_nowhere
    blocked = work.blocked if work is not None and (lacking or nowhere) else ""
    misplaced_slots = len(slots.misplaced(ledgers.cluster, record))
    return LedgerCheck(
        *(record.ledger_id, checked, lacking, nowhere, first_nowhere, misplaced_slots, blocked),
        frozenset(silent),
    )


async def _missing_at(
    ledgers: LedgerStore,
    record: LedgerRecord,
    bookie_id: str,
    slot: int,
    entries: range,
    tokens: Tokens,
    deep: bool,
) -> tuple[list[int], bool]:
    """The entries that the bookie should keep and lacks, and whether it responded for all
    entries."""
    missing: list[int] = []
    has_responded = True
    bookies, place = ledgers.cluster.bookies, (bookie_id, record.ledger_id)

    async def ask(first: int, last: int) -> ReadResponse | StoredResponse:
        if not deep:
            return await bookies.stored_entries(*place, first, last, token=tokens.read)
        size = ledgers.config.read_request_bytes
        return await bookies.read(*place, first, last, max_bytes=size, token=tokens.read)

    async for window, response in ask_in_windows(entries, ask):
        present_entries = _entries_at(response, record.ledger_id, window)
        has_responded = has_responded and present_entries is not None
        missing += [
            e for e in window if should_keep(record, slot, e) and e not in (present_entries or ())
        ]
    return missing, has_responded


def _entries_at(
    response: ReadResponse | StoredResponse, ledger_id: int, window: range
) -> Collection[int] | None:
    """The entries of the window that the bookie has: after a read, those that were delivered and
    passed the check; otherwise those in the bookie's index. None if the bookie did not respond."""
    if not covered_count(response, window.start):
        is_read = isinstance(response, ReadResponse)
        return () if is_read and response.status is Status.NO_SUCH_LEDGER else None
    if isinstance(response, ReadResponse):
        return delivered_entries(response, ledger_id, window)
    return _entry_ids(response.spans)


def _entry_ids(spans: Sequence[tuple[int, int]]) -> Collection[int]:
    if len(spans) == 1:
        return range(spans[0][0], spans[0][1] + 1)
    return {entry_id for first, last in spans for entry_id in range(first, last + 1)}
