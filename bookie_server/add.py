"""Adds: the entries of a frame are checked, decided on one by one, and journalled in one step.

Always true:
- between the decision on an entry and its append to cache and journal there is no await, so adds
  and fences of a ledger have one order, and an entry is in the cache before it is in the journal;
- entries are views into the frame; if less than half of a frame is taken, the taken entries are
  copied, so that they do not keep the frame in memory;
- an entry id above all stored ids needs no look-up: only other ids can be in conflict;
- while a fence of the ledger may be lost here no normal add is taken
  (LedgerHandle.fence_uncertain).
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby, repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple

from bookie_server.api import messages as m
from bookie_server.api.entry import (
    HEADER_BYTES,
    Buffer,
    DamagedEntry,
    EntryHeader,
    check_entries,
    check_entry,
    unpack_header,
)
from bookie_server.api.status import Status
from bookie_server.config import StorageConfig
from bookie_server.journal.format import Record, RecordKind
from bookie_server.journal.writer import JournalFailed
from bookie_server.lanes import Lane, retry_after_ms
from bookie_server.ledgers.registry import FirstContactFailed, LedgerHandle, LedgerHandles
from bookie_server.storage.entry_reader import Undeliverable
from bookie_server.storage.storage import LedgerStorage

_OK = m.AddResult(Status.OK)
_ENTRY = RecordKind.ENTRY
_Stored = dict[tuple[int, int], EntryHeader | Undeliverable]


class _Item(NamedTuple):
    """A well-formed add: its `add_index` in the frame, and the entry as one buffer."""

    add_index: int
    add: m.Add
    header: EntryHeader
    entry: Buffer


class _Decision(NamedTuple):
    """By lane: the items to append, and the ledgers of items that were stored already."""

    items: dict[Lane, list[_Item]]
    repeated_ledgers: dict[Lane, dict[int, None]]


class Adder:
    """The write path from a request to the journal. Adds under way are counted in bytes."""

    def __init__(
        self,
        storage: LedgerStorage,
        ledgers: LedgerHandles,
        config: StorageConfig,
    ) -> None:
        self._storage = storage
        self._ledgers = ledgers
        self._config = config
        self.undecided_bytes = 0
        """Bytes of adds that were admitted to the budget and not appended yet."""

    async def add(
        self, request: m.AddRequest, readonly_reason: str = "", *, even_recovery: bool = False
    ) -> m.AddResponse:
        """One result for each add; OK only after the sync that covers it, or after the write if the
        ledger's durability is page-cache.

        With a `readonly_reason` only recovery's adds are taken; with `even_recovery` no adds are.
        """
        results: list[m.AddResult] = [_OK] * len(request.adds)
        items, admitted_bytes = self._admit(request.adds, results, readonly_reason, even_recovery)
        self.undecided_bytes += admitted_bytes
        try:
            handles = await self._meet(items, results)
            for handle in handles.values():
                handle.use_count += 1
            stored = await self._look_up(items, handles)
            decision = self._decide(items, handles, stored, results)
            durable = self._append(decision, admitted_bytes)
        finally:
            self.undecided_bytes -= admitted_bytes
        try:
            for done in durable:
                await asyncio.shield(done)
        except JournalFailed as error:
            failed = m.AddResult(Status.IO_ERROR, reason=str(error))
            results = [failed if result is _OK else result for result in results]
        return m.AddResponse(results)

    @property
    def retry_after_ms(self) -> int:
        """When there should be room for adds that are refused now."""
        wait_s = self._storage.wait_s
        return retry_after_ms(wait_s, self._config.retry_after_ms)

    @property
    def _busy_result(self) -> m.AddResult:
        return m.AddResult(Status.BUSY, self.retry_after_ms)

    def _admit(
        self,
        adds: Sequence[m.Add],
        results: list[m.AddResult],
        readonly_reason: str,
        even_recovery: bool,
    ) -> tuple[list[_Item], int]:
        """The adds that are well-formed and within the budget, and their bytes; each other add gets
        its result."""
        items: list[_Item] = []
        total = 0
        used_bytes = self._storage.pending_bytes + self.undecided_bytes
        budget, space = self._config.journal_pending_bytes_max, self._storage.pending_bytes_max
        recovery_room = min(budget + self._config.recovery_reserve_bytes, space) - used_bytes
        room = min(budget, space) - used_bytes
        size_max = self._config.entry_bytes_max + HEADER_BYTES
        all_room = min(room, recovery_room)
        if not readonly_reason and (admitted := _admit_all(adds, all_room, size_max)):
            return admitted
        for index, add in enumerate(adds):
            entry = add.entry[0] if len(add.entry) == 1 else b"".join(add.entry)
            size = len(entry)
            size_allowed = recovery_room if add.recovery else room
            if readonly_reason and (even_recovery or not add.recovery):
                results[index] = m.AddResult(Status.READ_ONLY, reason=readonly_reason)
            elif size > size_max:
                reason = f"{size - HEADER_BYTES} bytes > {self._config.entry_bytes_max}"
                results[index] = m.AddResult(Status.TOO_LARGE, reason=reason)
            elif total + size > size_allowed:
                results[index] = self._busy_result
            else:
                try:
                    header = check_entry(entry)
                except DamagedEntry as error:
                    results[index] = m.AddResult(Status.BAD_DIGEST, reason=str(error))
                    continue
                if header.ledger_id < 0 or header.entry_id < 0:
                    results[index] = m.AddResult(Status.BAD_REQUEST, reason="a negative id")
                    continue
                items.append(_Item(index, add, header, entry))
                total += size
        return items, total

    async def _meet(
        self, items: Sequence[_Item], results: list[m.AddResult]
    ) -> dict[int, LedgerHandle]:
        """The handles of the ledgers in the frame; an item whose ledger's first contact failed gets
        its result."""
        ids = list(dict.fromkeys([item.header.ledger_id for item in items]))
        handles = {i: handle for i in ids if (handle := self._ledgers.get(i)) is not None}
        if len(handles) < len(ids):
            await self._meet_missing(items, handles, results)
        uncertain = [handle for handle in handles.values() if handle.fence_uncertain]
        if uncertain:
            normal_ids = {item.header.ledger_id: None for item in items if not item.add.recovery}
            to_check = [handle for handle in uncertain if handle.ledger_id in normal_ids]
            await asyncio.gather(*map(self._ledgers.check_fence, to_check))
        await self._compare_if_needed(list(handles.values()), new_session=False)
        return handles

    async def _compare_if_needed(
        self, handles: Sequence[LedgerHandle], *, new_session: bool
    ) -> None:
        """Compare with their records the ledgers that need a comparison
        (LedgerHandles.needs_comparison)."""
        needs_comparison = self._ledgers.needs_comparison
        to_compare = [h for h in handles if needs_comparison(h, new_session=new_session)]
        if to_compare:
            await asyncio.gather(*map(self._ledgers.compare, to_compare))

    async def _meet_missing(
        self,
        items: Sequence[_Item],
        handles: dict[int, LedgerHandle],
        results: list[m.AddResult],
    ) -> None:
        """Add the handles of ledgers that were not met yet in this run."""
        ids = dict.fromkeys([item.header.ledger_id for item in items])
        missing_ids = [i for i in ids if i not in handles]
        contacts = map(self._ledgers.meet, missing_ids)
        outcomes = await asyncio.gather(*contacts, return_exceptions=True)
        refusals: dict[int, m.AddResult] = {}
        for ledger_id, outcome in zip(missing_ids, outcomes, strict=True):
            if isinstance(outcome, FirstContactFailed):
                refusals[ledger_id] = m.AddResult(outcome.status, reason=outcome.reason)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                handles[ledger_id] = outcome
        for item in items:
            if item.header.ledger_id in refusals:
                results[item.add_index] = refusals[item.header.ledger_id]

    async def _look_up(self, items: Sequence[_Item], handles: dict[int, LedgerHandle]) -> _Stored:
        """Headers of those entries of the frame that are in an entry log already."""
        candidates = _possibly_stored(items, handles)
        if candidates:
            await self._compare_if_needed(
                [handles[ledger_id] for ledger_id in candidates], new_session=True
            )
        while candidates := candidates and _possibly_stored(items, handles):
            flushes = self._storage.flushes
            await self._ledgers.wait_for_removals(candidates)
            stored: _Stored = {}
            for ledger_id, ids in candidates.items():
                headers = await self._storage.reader.headers(ledger_id, ids)
                stored.update(((ledger_id, e), header) for e, header in headers.items())
            if flushes == self._storage.flushes:  # else an entry may have moved meanwhile
                return stored
        return {}

    def _decide(
        self,
        items: Sequence[_Item],
        handles: dict[int, LedgerHandle],
        stored: _Stored,
        results: list[m.AddResult],
    ) -> _Decision:
        """Decide whether each item is taken. A refused item gets its result; a taken item is put
        into the cache. No await."""
        decision = _Decision({}, {})
        for run in _runs(items):
            _, add, header, _ = run[0]
            handle = handles.get(header.ledger_id)
            if handle is None:
                continue
            status = handle.refusal_of_add(add.token, add.recovery)
            if status is not None:
                for item in run:
                    results[item.add_index] = m.AddResult(status)
            elif not self._take_all(run, handle, decision):
                self._take_each(run, handle, stored, results, decision)
        return decision

    def _take_all(self, run: list[_Item], handle: LedgerHandle, decision: _Decision) -> bool:
        """Take a run whose entries are all new and ascending, if there is room. Returns whether the
        run was taken; if not, nothing has changed."""
        entries = {item.header.entry_id: item.entry for item in run}
        ids = list(entries)
        if len(ids) < len(run) or ids[0] <= handle.last_entry or ids != sorted(ids):
            return False
        add, ledger_id = run[0].add, handle.ledger_id
        if handle.is_origin_unknown:
            return False
        if not self._storage.put_all(ledger_id, entries, reserve=add.recovery):
            return False
        handle.note_add(max([item.header for item in run], key=_LAC))
        handle.note_add(run[-1].header)
        decision.items.setdefault(_lane(add, handle), []).extend(run)
        return True

    def _take_each(
        self,
        run: list[_Item],
        handle: LedgerHandle,
        stored: _Stored,
        results: list[m.AddResult],
        decision: _Decision,
    ) -> None:
        storage, lane = self._storage, _lane(run[0].add, handle)
        for item in run:
            index, add, header, entry = item
            status = None
            if header.entry_id <= handle.last_entry:
                status = self._compare(header, stored, add.recovery)
                if status is Status.OK:
                    decision.repeated_ledgers.setdefault(lane, {})[header.ledger_id] = None
                    continue
            if status is None and handle.is_origin_unknown:  # another bookie can take it
                status = Status.LIMBO
            if status is not None:
                results[index] = m.AddResult(status)
            elif not storage.has_room(len(entry), reserve=add.recovery):
                results[index] = self._busy_result
            else:
                storage.put(header.ledger_id, header.entry_id, entry)
                handle.note_add(header)
                decision.items.setdefault(lane, []).append(item)

    def _compare(self, header: EntryHeader, stored: _Stored, recovery: bool) -> Status | None:
        """OK: the same entry is stored. None: no entry is stored. Otherwise the refusal.

        An add of recovery or repair replaces a stored copy that cannot be read any more.
        """
        cached = self._storage.cache.get(header.ledger_id, header.entry_id)
        earlier: EntryHeader | Undeliverable | None
        if cached is not None:
            earlier = unpack_header(cached)
        else:
            earlier = stored.get((header.ledger_id, header.entry_id))
        if earlier is None:
            return None
        if isinstance(earlier, Undeliverable):
            return None if recovery else Status.IO_ERROR
        return Status.OK if earlier.identity == header.identity else Status.CONFLICTING_ENTRY

    def _append(self, decision: _Decision, frame_bytes: int) -> list[asyncio.Future[None]]:
        """Append the records to the journal. Returns the futures of the appends; once all are done,
        every OK may be sent."""
        taken_bytes = sum([len(item.entry) for items in decision.items.values() for item in items])
        must_copy = taken_bytes * 2 < frame_bytes
        durable = []
        for lane in Lane:
            items, after = decision.items.get(lane, ()), decision.repeated_ledgers.get(lane, ())
            if items or after:
                records = self._records(items, must_copy)
                durable.append(self._storage.append(records, lane, list(after)))
        return durable

    def _records(self, items: Sequence[_Item], must_copy: bool) -> list[Record]:
        fields = [(_ENTRY, *h[:2], entry, h.payload_crc) for _, _, h, entry in items]
        if must_copy:
            fields = [
                (k, i, e, self._storage.cache.compact(i, e), crc) for k, i, e, _, crc in fields
            ]
        return list(map(tuple.__new__, repeat(Record), fields))


def _admit_all(adds: Sequence[m.Add], room: int, size_max: int) -> tuple[list[_Item], int] | None:
    """All adds of a frame and their bytes; None if an add is malformed or there is no room for all.
    The work is done column by column: a Python loop over the adds would be the largest cost of
    small adds."""
    buffers = [add.entry for add in adds]
    if any([len(several) != 1 for several in buffers]):
        return None
    entries = [entry for (entry,) in buffers]
    total = sum(map(len, entries))
    if total > room or max(map(len, entries), default=0) > size_max:
        return None
    headers = check_entries(entries)
    if headers is None or min(map(min, map(_IDS, headers)), default=0) < 0:
        return None
    fields = zip(range(len(adds)), adds, headers, entries, strict=True)
    return list(map(tuple.__new__, repeat(_Item), fields)), total


_LAC = attrgetter("last_add_confirmed")
_IDS = itemgetter(0, 1)  # ledger and entry of a header
_RUN_KEY = attrgetter("header.ledger_id", "add.token", "add.recovery")  # of an item


def _runs(items: Sequence[_Item]) -> list[list[_Item]]:
    """The items in their order, cut where the ledger, the token or the recovery flag changes:
    rights are checked once for each run."""
    return [list(run) for _, run in groupby(items, _RUN_KEY)]


def _lane(add: m.Add, handle: LedgerHandle) -> Lane:
    return Lane.RECOVERY if add.recovery else handle.lane


def _possibly_stored(
    items: Sequence[_Item], handles: dict[int, LedgerHandle]
) -> dict[int, list[int]]:
    """By ledger, the ids of the frame's entries that are not above all stored ids."""
    candidates: dict[int, list[int]] = {}
    for item in items:
        handle = handles.get(item.header.ledger_id)
        if handle is not None and item.header.entry_id <= handle.last_entry:
            candidates.setdefault(item.header.ledger_id, []).append(item.header.entry_id)
    return candidates
