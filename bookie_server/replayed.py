"""What a journal says is put into the engine, batch by batch, while the engine flushes.

Always true: states change in the order of the records, and a ledger's entries follow the record
that tells of the ledger; the entries of a batch are put together, for nothing reads them yet; a
place counts only for what is not known otherwise, which is as new or newer (placing.py); both
halves of the write cache and the batch at hand are all that is in memory: without room the replay
waits for the flush.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from bookie_server.api.entry import Buffer
from bookie_server.disk import DiskFailed
from bookie_server.entry_index import LedgerState, decode_ledger_state, merged
from bookie_server.journal_format import Kind, Record
from bookie_server.ledger_storage import LedgerStorage
from bookie_server.placed import Place, decode_place

_ENTRY, _PLACED = Kind.ENTRY, Kind.PLACED
_log = logging.getLogger(__name__)


class Replayed:
    """Applies records. One for all journals; `end` or `cancel` it."""

    def __init__(self, storage: LedgerStorage) -> None:
        self._storage = storage
        self._flush: asyncio.Task[None] | None = None
        self.ledgers: dict[int, None] = {}
        """Those of which there was a record."""
        self.absent: dict[int, dict[int, None]] = {}
        """By ledger, entries that lie in directories that are not there, or were given up, and that
        were nowhere else when their place was read."""

    async def apply(self, records: list[Record]) -> None:
        """Known from now on. Raises DiskFailed when a flush did."""
        entries: dict[int, dict[int, Buffer]] = {}
        places: dict[int, dict[int, Place]] = {}
        for record in records:
            kind, ledger_id, entry_id, body, _ = record
            if kind is _PLACED:
                self.ledgers[ledger_id] = None
                places.setdefault(ledger_id, {})[entry_id] = decode_place(record)
            elif kind is not _ENTRY:
                self.ledgers[ledger_id] = None
                self._apply_state(record)
            elif (of_ledger := entries.get(ledger_id)) is not None:
                of_ledger[entry_id] = body
            else:
                entries[ledger_id] = {entry_id: body}
                self.ledgers[ledger_id] = None
                self._known(ledger_id)
        for ledger_id, of_ledger in entries.items():
            await self._put(ledger_id, of_ledger)
        for ledger_id, placed in places.items():
            await self._place(ledger_id, placed)

    async def end(self) -> None:
        """No flush is under way when this returns. Raises DiskFailed when one failed."""
        if (flush := self._flush) is not None:
            self._flush = None
            await flush

    def cancel(self) -> None:
        """Whatever happened, do not go on."""
        if self._flush is not None:
            self._flush.cancel()

    def _known(self, ledger_id: int) -> LedgerState:
        """Without a state its ledger record is among what is damaged."""
        state = self._storage.state(ledger_id)
        if state is None:
            state = LedgerState(ledger_id, limbo="lost", met=False)
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        storage, ledger_id = self._storage, record.ledger_id
        if record.kind is Kind.LEDGER:
            known = storage.state(ledger_id)
            logged = decode_ledger_state(bytes(record.body))
            storage.restore_state(logged if known is None else merged(logged, known))
        elif record.kind is Kind.FENCE:
            storage.restore_state(replace(self._known(ledger_id), fenced=True))
        elif record.kind is Kind.LAC:
            state = self._known(ledger_id)
            lac = max(state.explicit_lac, record.entry_id)
            storage.restore_state(replace(state, explicit_lac=lac))

    async def _put(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        await self._when_there_is_room(lambda: self._storage.put_all(ledger_id, entries))

    async def _place(self, ledger_id: int, places: dict[int, Place]) -> None:
        state = self._known(ledger_id)
        if state.deleted:
            return
        if not (state.directories or state.given_up):  # its ledger record is among what is damaged
            there = tuple(dict.fromkeys([place.directory for place in places.values()]))
            state = self._storage.restore_state(replace(state, directories=there))
        known = await self._stored(ledger_id, min(places), max(places))
        new: list[Place] = []
        for entry_id, place in places.items():
            if entry_id in known:
                continue
            listed = place.directory in state.directories
            if listed and self._storage.has_directory(place.directory):
                new.append(place)
            else:  # who gave the directory up may have found the entry in memory, and here alone
                self.absent.setdefault(ledger_id, {})[entry_id] = None
        if new:
            await self._when_there_is_room(lambda: self._storage.replay_places(ledger_id, new))

    async def _stored(self, ledger_id: int, first: int, last: int) -> dict[int, None]:
        """An index that cannot say was told of, if it is damaged; a place is as good then as any
        that it might have."""
        try:
            return await self._storage.stored(ledger_id, first, last)
        except DiskFailed as error:
            _log.error("what is stored of ledger %d cannot be said: %s", ledger_id, error)
            return {}

    async def _when_there_is_room(self, put: Callable[[], bool]) -> None:
        while not put():
            self._go_on()
            await self.end()
        if self._flush is not None and self._flush.done():
            await self.end()
        if self._flush is None and self._storage.is_flushing:
            self._go_on()

    def _go_on(self) -> None:
        """A flush was begun: let it run beside what comes next."""
        if self._flush is None:
            self._flush = asyncio.ensure_future(self._storage.carry_out())
