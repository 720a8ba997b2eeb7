"""What journals and direct logs say is put into the engine, batch by batch, while it flushes.

Always true: states change in the order of the records, and a ledger's entries follow the record
that tells of the ledger; the entries of a batch are put together, for nothing reads them yet; of
what direct logs hold only that counts which is not known otherwise, as new or newer; both halves
of the write cache and the batch at hand are all that is in memory: without room the replay waits
for the flush.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from bookie_server.api.entry import Buffer
from bookie_server.disk.interface import DiskFailed, DiskHung
from bookie_server.journal.format import Record, RecordKind
from bookie_server.logs.index import (
    EVERY_LEDGER,
    LedgerState,
    LimboReason,
    Location,
    decode_ledger_state,
    doubted,
    merged,
)
from bookie_server.storage.storage import LedgerStorage
from bookie_server.storage.write_cache import DirectLocation

_ENTRY = RecordKind.ENTRY
_log = logging.getLogger(__name__)


class Replayed:
    """Applies records. One for all journals; `end` or `cancel` it."""

    def __init__(self, storage: LedgerStorage) -> None:
        self._storage = storage
        self._flush: asyncio.Task[None] | None = None
        self.ledgers: dict[int, None] = {}
        """Those of which there was a record."""

    async def apply(self, records: list[Record]) -> None:
        """Known from now on. Raises DiskFailed when a flush did."""
        entries: dict[int, dict[int, Buffer]] = {}
        for record in records:
            kind, ledger_id, entry_id, body, _ = record
            if kind is not _ENTRY:
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

    async def add_locations(
        self, directory: str, ledger_id: int, locations: Sequence[Location]
    ) -> None:
        """Entries of the ledger lie in the directory's direct log; no index may know them. After
        the journals. Raises DiskFailed when a flush did."""
        state = self._state_with(directory, ledger_id)
        if state is None or state.deleted or directory not in state.directories:
            return
        entry_ids = [location.entry_id for location in locations]
        known = await self._stored(ledger_id, min(entry_ids), max(entry_ids), directory)
        new = [DirectLocation(directory, each) for each in locations if each.entry_id not in known]
        if new:
            await self._when_there_is_room(lambda: self._storage.replay_locations(ledger_id, new))

    def _state_with(self, directory: str, ledger_id: int) -> LedgerState | None:
        """With the directory, if the record that named it may be among what journals have lost."""
        state, every = self._storage.state(ledger_id), self._storage.state(EVERY_LEDGER)
        doubt = every.limbo if every is not None else LimboReason.NONE
        if state is None:
            if not doubt:
                return None  # it was deleted and forgotten
            state = LedgerState(ledger_id, limbo=doubt, met=False)
            state = doubted(state) if doubt == LimboReason.LOST else state
        known = directory in (*state.directories, *dict(state.given_up))
        if known or state.deleted or not (doubt or state.limbo):
            return state
        return self._storage.restore_state(
            replace(state, directories=(directory, *state.directories))
        )

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
            state = LedgerState(ledger_id, limbo=LimboReason.LOST, met=False)
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        storage, ledger_id = self._storage, record.ledger_id
        if record.kind is RecordKind.LEDGER:
            known = storage.state(ledger_id)
            logged = decode_ledger_state(bytes(record.body))
            storage.restore_state(logged if known is None else merged(logged, known))
        elif record.kind is RecordKind.FENCE:
            storage.restore_state(replace(self._known(ledger_id), fenced=True))
        elif record.kind is RecordKind.LAC:
            state = self._known(ledger_id)
            lac = max(state.explicit_lac, record.entry_id)
            storage.restore_state(replace(state, explicit_lac=lac))

    async def _put(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        await self._when_there_is_room(lambda: self._storage.put_all(ledger_id, entries))

    async def _stored(
        self, ledger_id: int, first: int, last: int, directory: str
    ) -> dict[int, None]:
        """What is as new as locations in the directory, or newer. An index that cannot say was told
        of, if it is damaged; a location is as good then as any that it might have, but none that
        came from a journal. Raises DiskHung."""
        try:
            return await self._storage.reader.stored(ledger_id, first, last, directory)
        except DiskHung:
            raise
        except DiskFailed as error:
            _log.error("what is stored of ledger %d cannot be said: %s", ledger_id, error)
            return self._storage.reader.stored_in_cache(ledger_id, first, last)

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


class LateReplayed(Replayed):
    """Applies the records of journals that were away, after those of all others."""

    async def apply(self, records: list[Record]) -> None:
        """See Replayed.apply."""
        await super().apply([each for each in records if each.ledger_id != EVERY_LEDGER])

    def _known(self, ledger_id: int) -> LedgerState:
        state = self._storage.state(ledger_id)
        if state is None:
            state = doubted(LedgerState(ledger_id, met=False))
            self._storage.restore_state(state)
        return state

    def _apply_state(self, record: Record) -> None:
        if record.kind is not RecordKind.LEDGER:
            super()._apply_state(record)
            return
        known = self._storage.state(record.ledger_id)
        logged = decode_ledger_state(bytes(record.body))
        if known is None:
            self._storage.restore_state(doubted(logged))
        else:
            both = merged(known, replace(logged, revision=0))
            self._storage.restore_state(replace(both, limbo=known.limbo))

    async def _put(self, ledger_id: int, entries: dict[int, Buffer]) -> None:
        if self._known(ledger_id).deleted:
            return
        here = await self._storage.reader.stored(ledger_id, min(entries), max(entries))
        absent = {i: entry for i, entry in entries.items() if i not in here}
        if absent:
            await super()._put(ledger_id, absent)
