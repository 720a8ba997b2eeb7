"""Adds: a frame of entries is checked, decided entry by entry, and journalled in one go.

Always true:
- between the decision on an entry and its place in cache and journal there is no await, so adds
  and fences of a ledger have one order, and the cache holds what the journal is about to;
- entries are carried as views into the frame; a frame of which less than half is taken is not
  kept alive by it (what is taken is copied);
- an entry id above all stored ones needs no look-up: only others can be in conflict.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from bookie_server.api import messages as m
from bookie_server.api.entry import (
    HEADER_BYTES,
    BadEntry,
    Buffer,
    EntryHeader,
    unpack_entry,
    unpack_header,
)
from bookie_server.api.status import Status
from bookie_server.journal import Journal, JournalFailed
from bookie_server.journal_format import Kind, Record
from bookie_server.ledger_directory import LedgerDirectory, Refused
from bookie_server.ledger_handle import LedgerHandle
from bookie_server.ledger_storage import LedgerStorage, Undeliverable
from bookie_server.storage_config import StorageConfig

_OK = m.AddResult(Status.OK)
_Stored = dict[tuple[int, int], EntryHeader | Undeliverable]


class _Item(NamedTuple):
    """A well-formed add: its place in the frame, and the entry as one buffer."""

    at: int
    add: m.Add
    header: EntryHeader
    entry: Buffer


class Adder:
    """The write path from a request to the journal. Adds under way are counted in bytes."""

    def __init__(
        self,
        storage: LedgerStorage,
        journal: Journal,
        ledgers: LedgerDirectory,
        config: StorageConfig,
    ) -> None:
        self._storage = storage
        self._journal = journal
        self._ledgers = ledgers
        self._config = config
        self._busy = m.AddResult(Status.BUSY, config.retry_after_ms)
        self._undecided_bytes = 0

    async def add(self, request: m.AddRequest, readonly_reason: str = "") -> m.AddResponse:
        """One result for each add; OK only after the sync that covers it.

        With a `readonly_reason` only recovery's adds are taken.
        """
        results: list[m.AddResult] = [_OK] * len(request.adds)
        items, admitted_bytes = self._admit(request.adds, results, readonly_reason)
        self._undecided_bytes += admitted_bytes
        try:
            handles = await self._meet(items, results)
            stored = await self._look_up(items, handles)
            accepted = self._decide(items, handles, stored, results)
            durable = self._journal.append(self._records(accepted, admitted_bytes))
        finally:
            self._undecided_bytes -= admitted_bytes
        try:
            if any(result is _OK for result in results):
                await asyncio.shield(durable)
        except JournalFailed as error:
            failed = m.AddResult(Status.IO_ERROR, reason=str(error))
            results = [failed if result is _OK else result for result in results]
        return m.AddResponse(results)

    def _admit(
        self, adds: Sequence[m.Add], results: list[m.AddResult], readonly_reason: str
    ) -> tuple[list[_Item], int]:
        """The adds that are well-formed and within the budget, and their bytes."""
        items: list[_Item] = []
        total = 0
        room = self._config.journal_pending_bytes_max
        room -= self._journal.pending_bytes + self._undecided_bytes
        for index, add in enumerate(adds):
            entry = add.entry[0] if len(add.entry) == 1 else b"".join(add.entry)
            size = len(entry)
            allowed = room + self._config.recovery_reserve_bytes if add.recovery else room
            if readonly_reason and not add.recovery:
                results[index] = m.AddResult(Status.READ_ONLY, reason=readonly_reason)
            elif size - HEADER_BYTES > self._config.entry_bytes_max:
                reason = f"{size - HEADER_BYTES} bytes > {self._config.entry_bytes_max}"
                results[index] = m.AddResult(Status.TOO_LARGE, reason=reason)
            elif total + size > allowed:
                results[index] = self._busy
            else:
                try:
                    header = unpack_entry(entry).header
                except BadEntry as error:
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
        """The handles of all ledgers in the frame; the others' items get their result."""
        ids = list(dict.fromkeys([item.header.ledger_id for item in items]))
        handles = {i: handle for i in ids if (handle := self._ledgers.get(i)) is not None}
        if len(handles) == len(ids):
            return handles
        missing = [i for i in ids if i not in handles]
        met = await asyncio.gather(*map(self._ledgers.meet, missing), return_exceptions=True)
        refusals: dict[int, m.AddResult] = {}
        for ledger_id, outcome in zip(missing, met, strict=True):
            if isinstance(outcome, Refused):
                refusals[ledger_id] = m.AddResult(outcome.status, reason=outcome.reason)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                handles[ledger_id] = outcome
        for item in items:
            if item.header.ledger_id in refusals:
                results[item.at] = refusals[item.header.ledger_id]
        return handles

    async def _look_up(self, items: Sequence[_Item], handles: dict[int, LedgerHandle]) -> _Stored:
        """Headers of the frame's entries that are in an entry log already."""
        while wanted := _perhaps_stored(items, handles):
            flushes = self._storage.flushes
            stored: _Stored = {}
            for ledger_id, ids in wanted.items():
                for entry_id, header in (await self._storage.headers(ledger_id, ids)).items():
                    stored[ledger_id, entry_id] = header
            if flushes == self._storage.flushes:  # else one may have moved, or come and moved
                return stored
        return {}

    def _decide(
        self,
        items: Sequence[_Item],
        handles: dict[int, LedgerHandle],
        stored: _Stored,
        results: list[m.AddResult],
    ) -> list[_Item]:
        """Give each item its result and put those that are taken into the cache. No await."""
        accepted: list[_Item] = []
        storage = self._storage
        for item in items:
            index, add, header, entry = item
            handle = handles.get(header.ledger_id)
            if handle is None:
                continue
            status = handle.refusal_of_add(add.token, add.recovery)
            if status is None and header.entry_id <= handle.last_entry:
                status = self._compare(header, stored, add.recovery)
                if status is Status.OK:
                    continue
            if status is not None:
                results[index] = m.AddResult(status)
            elif not storage.has_room(len(entry), reserve=add.recovery):
                results[index] = self._busy
            else:
                storage.put(header.ledger_id, header.entry_id, entry)
                handle.heard(header)
                accepted.append(item)
        return accepted

    def _compare(self, header: EntryHeader, stored: _Stored, recovery: bool) -> Status | None:
        """OK: the same entry is stored. None: none is. Otherwise the refusal.

        A stored copy that cannot be read any more is replaced by recovery's or repair's.
        """
        cached = self._storage.cached(header.ledger_id, header.entry_id)
        known: EntryHeader | Undeliverable | None
        if cached is not None:
            known = unpack_header(cached)
        else:
            known = stored.get((header.ledger_id, header.entry_id))
        if known is None:
            return None
        if isinstance(known, Undeliverable):
            return None if recovery else Status.IO_ERROR
        return Status.OK if known.identity == header.identity else Status.CONFLICTING_ENTRY

    def _records(self, accepted: Sequence[_Item], frame_bytes: int) -> list[Record]:
        taken_bytes = sum([len(item.entry) for item in accepted])
        copy = taken_bytes * 2 < frame_bytes
        records = []
        for item in accepted:
            header, entry = item.header, item.entry
            if copy:
                entry = self._storage.compact(header.ledger_id, header.entry_id)
            records.append(
                Record(Kind.ENTRY, header.ledger_id, header.entry_id, entry, header.payload_crc)
            )
        return records


def _perhaps_stored(
    items: Sequence[_Item], handles: dict[int, LedgerHandle]
) -> dict[int, list[int]]:
    """By ledger, the entries of the frame that are not above all stored ones."""
    wanted: dict[int, list[int]] = {}
    for item in items:
        handle = handles.get(item.header.ledger_id)
        if handle is not None and item.header.entry_id <= handle.last_entry:
            wanted.setdefault(item.header.ledger_id, []).append(item.header.entry_id)
    return wanted
