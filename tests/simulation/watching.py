"""Clients that are watched: what they call, when it ends, and what their handles take for true.

Always true: what is watched behaves as if it were not; it tells the observers and hands on.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from bookie_server.api.entry import NO_ENTRY
from bookie_server.api.messages import Add, AddResult, ReadRequest, ReadResponse
from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Operation, OutcomeUnknown
from tests.simulation.disk import SimDisk
from tests.simulation.loop import current_process
from tests.simulation.observers import Observers
from tests.simulation.store import SimSession, SimStore


class WatchedLedgerStore(LedgerStore):
    """A LedgerStore whose writers and readers tell the observers what they do."""

    observers: Observers
    client = ""

    async def create(self, *args: Any, **options: Any) -> Any:
        writer = await super().create(*args, **options)
        watch_writer(writer, self.observers)
        return writer

    async def create_several(self, *args: Any, **options: Any) -> Any:
        writers = await super().create_several(*args, **options)
        for writer in writers:
            watch_writer(writer, self.observers)
        return writers

    async def open(self, *args: Any, **options: Any) -> Any:
        reader = await super().open(*args, **options)
        watch_reader(reader, self.observers, f"a reader of {self.client}")
        return reader

    async def recover(self, ledger_id: int, **options: Any) -> Any:
        situations = self.observers.situations
        situations.recovery_begins(ledger_id)
        failed = killed = False
        try:
            return await super().recover(ledger_id, **options)
        except asyncio.CancelledError:
            process = current_process()
            killed = process is not None and not process.alive
            failed = True
            raise
        except Exception:
            failed = True
            raise
        finally:
            situations.recovery_ends(ledger_id, self.client, failed, killed)

    async def delete(self, ledger_id: int, only_if: Sequence[Operation] = ()) -> bool:
        gone = await super().delete(ledger_id, only_if)
        ledger = self.observers.ghost.ledgers.get(ledger_id)
        if gone and ledger is not None:
            ledger.delete_returned()
        return gone


def watch_writer(writer: Any, observers: Observers) -> None:
    """Let the observers hear of every append of the writer, of its end, and of its close."""
    plain_append, plain_close = writer.append, writer.close
    ledger_id, pushed = writer.ledger_id, writer.last_add_pushed
    observers.writes(ledger_id, writer)

    def append(payload: Any, rows: int = 0) -> "asyncio.Future[int]":
        nonlocal pushed
        future = plain_append(payload, rows)
        if writer.last_add_pushed == pushed:
            return future  # refused before it had an id
        pushed = writer.last_add_pushed
        observers.submitted(ledger_id, payload, rows)
        future.add_done_callback(functools.partial(observers.appended, ledger_id, pushed))
        return future

    async def close() -> Any:
        observers.situations.close_begins(ledger_id)
        try:
            return await plain_close()
        finally:
            observers.situations.close_ends(ledger_id)

    writer.append, writer.close = append, close


def watch_reader(reader: Any, observers: Observers, who: str) -> None:
    """Let the observers hear of every entry that the reader reads and of its handle's LAC."""
    plain_runs = reader._runs
    plain_refresh, plain_wait = reader.refresh_last_add_confirmed, reader.wait_beyond
    ledger_id, known = reader.ledger_id, NO_ENTRY

    def look() -> int:
        nonlocal known
        lac = reader.last_add_confirmed
        observers.reader_says(ledger_id, known, lac, who)
        known = max(known, lac)
        return lac

    async def runs(ids: Any, known_confirmed: int | None) -> AsyncIterator[Any]:
        told = NO_ENTRY if known_confirmed is None else known_confirmed
        async with aclosing(plain_runs(ids, known_confirmed)) as found:
            async for run in found:
                for entry in run:
                    entry_id = entry.header.entry_id
                    confirmed = look() if entry_id > known else known
                    observers.returned(ledger_id, entry_id, entry.payload, max(confirmed, told))
                yield run

    async def refresh() -> int:
        await plain_refresh()
        return look()

    async def wait_beyond(after: int, timeout_s: float) -> int:
        was_closed = reader.is_closed
        last = await plain_wait(after, timeout_s)
        if timeout_s > 0 and look() <= after and reader.is_closed and not was_closed:
            observers.situations.told_of_the_end()
        return int(last)

    look()
    reader._runs = runs
    reader.refresh_last_add_confirmed, reader.wait_beyond = refresh, wait_beyond


def watch_copies(bookies: BookieClient, client: str, observers: Observers) -> None:
    """Let the observers hear of every single add: a copy that a repair gives. (What a writer or a
    recovery adds goes through a lane.)"""
    plain_add = bookies.add

    async def add(bookie_id: str, add: Add) -> AddResult:
        observers.copies(client, bookie_id, add)
        return await plain_add(bookie_id, add)

    bookies.add = add  # type: ignore[method-assign]


def watch_local_reads(bookies: BookieClient, observers: Observers) -> None:
    """Let the observers hear of what the client reads at the locations that bookies give."""
    reads = bookies._local_reads
    plain = reads._fill

    async def fill(request: ReadRequest, located: ReadResponse, asked: bool) -> ReadResponse | None:
        response = await plain(request, located, asked)
        looked = any(result.location is not None for result in located.results)
        if looked and (asked or response is not None):
            observers.looked(request, response, not asked)
        return response

    reads._fill = fill  # type: ignore[method-assign]


def watch_session(session: SimSession, store: SimStore, observers: Observers) -> None:
    """Let the observers hear of every move of a ledger's record whose outcome was lost."""
    plain_set = session.set

    async def set_(path: str, value: bytes, version: int) -> int:
        try:
            return await plain_set(path, value, version)
        except OutcomeUnknown:
            if path.startswith(paths.LEDGERS):
                found = store.peek(path)
                observers.situations.outcome_unknown(found is not None and found.value == value)
            raise

    session.set = set_  # type: ignore[method-assign]


def half_written(disk: SimDisk) -> bool:
    """Whether something that was written to the disk is not synced: the middle of a flush."""
    return any(disk.inode_of(path).unsynced for path in disk.paths())
