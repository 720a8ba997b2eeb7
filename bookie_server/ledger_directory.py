"""The handles of all ledgers this node has met, and first contact with a ledger.

Always true: there is one handle per ledger; a ledger is met once, however many requests come for
it meanwhile; verifiers come from the metadata, never from a request; first contact is logged (a
ledger record in the journal) before anything else of that ledger is; a ledger that was buried
(tombstones.py) stays buried.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from bookie_server.api.entry import NO_ENTRY
from bookie_server.api.status import Status
from bookie_server.disk import DiskFailed
from bookie_server.entry_index import EVERY_LEDGER, LedgerState, encode_ledger_state
from bookie_server.journal import Journal
from bookie_server.journal_format import Kind, Record, body_crc
from bookie_server.ledger_handle import LedgerHandle
from bookie_server.ledger_storage import LedgerStorage, Undeliverable
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.store import MetadataStore, NoNode, StoreError

METADATA_WAIT_S = 2.0  # well below a caller's time-out: it joins a contact that may be stuck


class Refused(Exception):
    """First contact did not come about; `status` is what the caller answers."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class LedgerDirectory:
    """Ledger id to handle."""

    def __init__(self, storage: LedgerStorage, journal: Journal, metadata: MetadataStore) -> None:
        self._storage = storage
        self._journal = journal
        self._metadata = metadata
        self._handles: dict[int, LedgerHandle] = {}
        self._meeting: dict[int, asyncio.Task[LedgerHandle]] = {}

    def known(self, ledger_id: int) -> bool:
        """Whether this node ever met the ledger. In every-ledger limbo nobody can say no."""
        every = self._storage.state(EVERY_LEDGER)
        return self._storage.state(ledger_id) is not None or (every is not None and every.limbo)

    def get(self, ledger_id: int) -> LedgerHandle | None:
        return self._handles.get(ledger_id)

    async def meet(self, ledger_id: int) -> LedgerHandle:
        """The ledger's handle, after first contact if need be. Raises Refused."""
        handle = self._handles.get(ledger_id)
        if handle is not None:
            return handle
        task = self._meeting.get(ledger_id)
        if task is None:
            task = self._meeting[ledger_id] = asyncio.ensure_future(self._meet(ledger_id))
            task.add_done_callback(lambda done: self._met(ledger_id, done))
        return await asyncio.shield(task)

    def alive(self) -> list[int]:
        """Every ledger that was met and is not buried, by id."""
        return [
            state.ledger_id
            for state in self._storage.states()
            if state.met and not state.deleted and state.ledger_id != EVERY_LEDGER
        ]

    async def bury(self, ledger_ids: Sequence[int]) -> None:
        """Take no normal add of these ledgers from now on; durable when it returns.

        Raises JournalFailed.
        """
        records = []
        for ledger_id in ledger_ids:
            handle = self._handles.get(ledger_id)
            known = handle.state if handle is not None else self._storage.state(ledger_id)
            assert known is not None, "only a ledger that was met is buried"
            state = replace(known, deleted=True)
            if handle is not None:
                handle.bury(state)
            self._storage.set_state(state)
            records.append(_ledger_record(state))
        await asyncio.shield(self._journal.append(records))

    def wake_all(self) -> None:
        """The node stops: nobody is kept waiting."""
        for handle in self._handles.values():
            handle.end_waiting()

    def _met(self, ledger_id: int, done: asyncio.Task[LedgerHandle]) -> None:
        del self._meeting[ledger_id]
        if not done.cancelled():
            done.exception()  # whoever waited has it; perhaps all were cancelled

    async def _meet(self, ledger_id: int) -> LedgerHandle:
        state = self._storage.state(ledger_id)
        if state is None or not state.met:
            state = await self._first_contact(ledger_id, state)
        try:
            last, lac = await self._last(ledger_id)
        except DiskFailed as error:
            raise Refused(Status.IO_ERROR, str(error)) from error
        state = self._storage.state(ledger_id) or state  # it may have been buried meanwhile
        handle = self._handles[ledger_id] = LedgerHandle(state, last, lac)
        return handle

    async def _first_contact(self, ledger_id: int, damaged: LedgerState | None) -> LedgerState:
        """Read the ledger's record and log that it was met; `damaged` is what replay could save."""
        path = paths.ledger(ledger_id)
        try:
            async with asyncio.timeout(METADATA_WAIT_S):
                await self._metadata.sync(path)
                found = ledger_record.decode((await self._metadata.get(path)).value)
        except NoNode as error:
            raise Refused(Status.LEDGER_DELETED, "the ledger has no record") from error
        except TimeoutError as error:
            reason = f"the metadata store did not answer within {METADATA_WAIT_S} s"
            raise Refused(Status.METADATA_UNAVAILABLE, reason) from error
        except (StoreError, ledger_record.BadLedgerRecord) as error:
            raise Refused(Status.METADATA_UNAVAILABLE, str(error)) from error
        state = LedgerState(
            ledger_id,
            found.verifiers,
            found.durability,
            fenced=damaged is not None and damaged.fenced,
            explicit_lac=damaged.explicit_lac if damaged is not None else NO_ENTRY,
            limbo=damaged is not None and damaged.limbo,
        )
        self._storage.set_state(state)
        self._journal.append([_ledger_record(state)])
        return state

    async def _last(self, ledger_id: int) -> tuple[int, int]:
        """The highest entry stored, and the last add confirmed that its header carries."""
        last = await self._storage.last_entry(ledger_id)
        if last is None:
            return NO_ENTRY, NO_ENTRY
        header = (await self._storage.headers(ledger_id, [last])).get(last)
        if header is None or isinstance(header, Undeliverable):
            return last, NO_ENTRY
        return last, header.last_add_confirmed


def _ledger_record(state: LedgerState) -> Record:
    body = encode_ledger_state(state)
    return Record(Kind.LEDGER, state.ledger_id, NO_ENTRY, body, body_crc(body))
