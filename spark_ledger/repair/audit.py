"""A check of every ledger: whether each entry has all its copies at bookies that the record names,
whether they are well placed, and whether a topic refers to the ledger.

    each record -> each bookie of each settled fragment is asked which entries its index has (no
    bytes) -> counts, and what is wrong with each ledger; `deep` reads every entry at every member
    instead

Always true: nothing is changed; an open ledger is checked as far as its record confirms its
entries: the last fragment of an open ledger is its writer's. If a bookie does not respond, the
copies that it should have count as missing. The command and the tasks of a Spark job
(spark/jobs.py) run `audit_some`.
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
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens, entries_of, keeps
from spark_ledger.metadata.store_calls import call_each, in_batches, reachable
from spark_ledger.repair import slots, work_list
from spark_ledger.repair.copies import count_in, delivered, windows
from spark_ledger.repair.work_list import ListedLedger

LEDGERS_AT_ONCE = 16
EXAMPLES_MAX = 100

Referred = Mapping[str, Container[int] | None]
"""By topic id, the ledgers that the topic refers to; None: it may refer to any."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of one ledger. `lacking`: by bookie, how many entries it should keep and lacks; of
    a bookie in `silent`, which did not respond, also those that it may have. `nowhere`: how many
    entries no member has, by the responses of all of them or by a worker's finding;
    `first_nowhere` is the first. `near`: how many slots a better placed bookie can take
    (slots.py)."""

    ledger_id: int
    entries: int
    lacking: dict[str, int] = field(default_factory=dict)
    nowhere: int = 0
    first_nowhere: int = -1
    near: int = 0
    blocked: str = ""
    silent: frozenset[str] = frozenset()


@dataclass(slots=True)
class Audit:
    """The check of all ledgers. `wrong`: up to EXAMPLES_MAX ledgers with something wrong. `silent`
    bookies did not respond: the copies that they should have count as missing."""

    ledgers: int = 0
    entries: int = 0
    under_replicated: int = 0
    misplaced: int = 0
    damaged: int = 0
    blocked: int = 0
    unreferenced: int = 0
    wrong: list[Checked] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether nothing is under-replicated, damaged or blocked."""
        return not (self.under_replicated or self.damaged or self.blocked)

    def counts(self) -> dict[str, int]:
        names = "ledgers entries under_replicated misplaced damaged blocked unreferenced"
        return {name: getattr(self, name) for name in names.split()}

    def add(self, checked: Checked) -> None:
        self.ledgers += 1
        self.entries += checked.entries
        self.under_replicated += bool(checked.lacking)
        self.misplaced += bool(checked.near)
        self.damaged += checked.nowhere
        self.blocked += bool(checked.blocked)
        self.silent |= checked.silent
        wrong = checked.lacking or checked.near or checked.blocked
        if wrong and len(self.wrong) < EXAMPLES_MAX:
            self.wrong.append(checked)

    def merge(self, other: "Audit") -> None:
        """Add the check of other ledgers."""
        for name, count in other.counts().items():
            setattr(self, name, getattr(self, name) + count)
        self.silent |= other.silent
        self.wrong = [*self.wrong, *other.wrong][:EXAMPLES_MAX]


async def audit(
    ledgers: LedgerStore, tokens: Tokens, *, deep: bool = False, referred: Referred | None = None
) -> Audit:
    """Check every ledger. Raises Unavailable."""
    result = Audit()
    async for batch in in_batches(ledgers.list(), 16 * LEDGERS_AT_ONCE):
        result.merge(await audit_some(ledgers, tokens, batch, deep=deep, referred=referred))
    return result


async def audit_some(
    ledgers: LedgerStore,
    tokens: Tokens,
    ledger_ids: Collection[int],
    *,
    deep: bool = False,
    referred: Referred | None = None,
) -> Audit:
    """Check those of these ledgers that exist. A closed ledger that was made for a topic which does
    not refer to it is `unreferenced`; without `referred` no ledger is. Raises Unavailable."""
    result = Audit()

    async def check(ledger_id: int) -> None:
        try:
            record = (await ledgers.record(ledger_id)).record
        except NoSuchLedger:
            return  # deleted meanwhile
        with reachable("looking up what is under-replicated"):
            work = await work_list.find(ledgers.metadata, ledger_id)
        result.add(await check_ledger(ledgers, record, tokens, work, deep=deep))
        if referred is not None and record.topic and record.closed:
            kept = referred.get(record.topic, ())
            result.unreferenced += kept is not None and ledger_id not in kept

    await call_each(check, ledger_ids, LEDGERS_AT_ONCE)
    return result


async def check_ledger(
    ledgers: LedgerStore,
    record: LedgerRecord,
    tokens: Tokens,
    work: ListedLedger | None = None,
    *,
    deep: bool = False,
) -> Checked:
    """Check one ledger by its record. `work`: the ledger as the list of under-replicated has it."""
    last = record.last_entry
    if last is None:
        last = record.last_fragment.first_entry - 1
    lacking: dict[str, int] = {}
    silent: set[str] = set()
    nowhere, first_nowhere = 0, -1
    damaged = frozenset(work.damaged if work is not None else ())
    for fragment, entries in entries_of(record, last):
        if not entries or not is_fragment_complete(record, fragment.first_entry):
            continue
        without, denied = Counter[int](), Counter[int]()
        members = await asyncio.gather(
            *(
                _of_member(ledgers, record, b, s, entries, tokens, deep)
                for s, b in enumerate(fragment.ensemble)
            )
        )
        for bookie, (missing, responded) in zip(fragment.ensemble, members, strict=True):
            if missing:
                lacking[bookie] = lacking.get(bookie, 0) + len(missing)
            without.update(missing)
            if responded:
                denied.update(missing)
            else:
                silent.add(bookie)
        lost = sorted(
            entry_id
            for entry_id, count in without.items()
            if count == record.write_quorum and (denied[entry_id] == count or entry_id in damaged)
        )
        if lost:
            nowhere += len(lost)
            first_nowhere = lost[0] if first_nowhere < 0 else first_nowhere
    blocked = work.blocked if work is not None and (lacking or nowhere) else ""
    near = len(slots.misplaced(ledgers.cluster, record))
    return Checked(
        *(record.ledger_id, last + 1, lacking, nowhere, first_nowhere, near, blocked),
        frozenset(silent),
    )


async def _of_member(
    ledgers: LedgerStore,
    record: LedgerRecord,
    bookie_id: str,
    slot: int,
    entries: range,
    tokens: Tokens,
    deep: bool,
) -> tuple[list[int], bool]:
    """The entries that the bookie should keep and lacks, and whether it responded for each."""
    missing: list[int] = []
    responded = True
    bookies, asked = ledgers.cluster.bookies, (bookie_id, record.ledger_id)

    async def ask(first: int, last: int) -> ReadResponse | StoredResponse:
        if not deep:
            return await bookies.stored_entries(*asked, first, last, token=tokens.read)
        size = ledgers.config.read_request_bytes
        return await bookies.read(*asked, first, last, max_bytes=size, token=tokens.read)

    async for window, response in windows(entries, ask):
        here = _there(response, record.ledger_id, window)
        responded = responded and here is not None
        missing += [e for e in window if keeps(record, slot, e) and e not in (here or ())]
    return missing, responded


def _there(
    response: ReadResponse | StoredResponse, ledger_id: int, window: range
) -> Collection[int] | None:
    """The entries that the bookie delivers, checked, or those that its index has; None: it does not
    respond."""
    if not count_in(response, window.start):
        is_read = isinstance(response, ReadResponse)
        return () if is_read and response.status is Status.NO_SUCH_LEDGER else None
    if isinstance(response, ReadResponse):
        return delivered(response, ledger_id, window)
    return _ids(response.spans)


def _ids(spans: Sequence[tuple[int, int]]) -> Collection[int]:
    if len(spans) == 1:
        return range(spans[0][0], spans[0][1] + 1)
    return {entry_id for first, last in spans for entry_id in range(first, last + 1)}
