"""Ledgers for blocking code: `LedgerClient`, and the writer and reader that it returns.

    with LedgerClient("zk://127.0.0.1:2281/ledger") as client:
        with client.create_ledger(3, 3, 2) as writer:
            entry_id = writer.append(b"hello")
        with client.open_ledger(writer.ledger_id) as reader:
            for entry_id, payload in reader.read(0, reader.last_add_confirmed):
                ...

Always true: all work is done on the process's background loop; these classes only submit work and
wait for its end. Several threads may use them; appends of one thread keep their order.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures._base import PENDING
from types import MappingProxyType, TracebackType
from typing import Any, Self

from bookie_server.api.entry import Buffer, Entry
from spark_ledger.config import (
    ClientConfig,
    check_client,
    durability_of,
    entries_of,
    entry_id_of,
    flag,
    ledger_id_of,
    metadata_of,
    password_of,
    resolve_service_url,
    seconds,
    whole,
    whole_or,
)
from spark_ledger.errors import LedgerError, LedgerInUse, NoSuchLedger
from spark_ledger.ledger.add_pipeline import fail_future
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.ledger_view import EntryStream
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.ledger.writer import AsyncLedgerWriter, read_only_parts
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.process import Calls, background_loop, connect

BATCH_ENTRIES_MAX = 256
APPENDS_PER_STEP = 256
NO_METADATA: Mapping[str, str] = MappingProxyType({})


class LedgerClient:
    """The ledgers of one cluster. `service_url` is `zk://host:port[,host:port...]/root`; None: the
    URL of `config` if it has one, else LEDGER_SERVICE_URL, else the default. `config`: see
    spark_ledger.config.client_config.

    Raises BadConfig for a malformed URL, Unavailable when ZooKeeper is unreachable. The constructor
    and every method raise TypeError for an argument of a wrong type, ValueError for an argument out
    of range, before any effect.
    """

    def __init__(self, service_url: str | None = None, config: ClientConfig | None = None) -> None:
        check_client(service_url, config)
        self.service_url = resolve_service_url(service_url, config)
        self._background = background_loop()
        self._calls = Calls(self._background)
        self._store: LedgerStore = self._calls.run(connect(self.service_url, config))

    def create_ledger(
        self,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        password: bytes = b"",
        metadata: Mapping[str, str] = NO_METADATA,
        durability: str = "synced",
    ) -> "LedgerWriter":
        """Create a ledger on `ensemble_size` bookies, with `write_quorum` copies of each entry,
        acknowledged when `ack_quorum` are on disk (None: the client's settings, 3, 3 and 2; see
        docs/protocol.md). `password` is needed to read, append and recover; `metadata`, str to str,
        is kept in the record. `durability` is "synced" or "page-cache" and never changes. With
        "page-cache", bookies acknowledge entries when they are written, up to a second before they
        are synced: if all bookies that have an entry lose power, it may be lost; a killed process
        loses none.

        Durable on return: the record, OPEN and without entries.

        Raises BadConfig, NotEnoughBookies, RecordTooBig, Unavailable.
        """
        config = self._store.config
        writer = self._calls.run(
            self._store.create(
                whole_or("ensemble_size", ensemble_size, config.ensemble_size),
                whole_or("write_quorum", write_quorum, config.write_quorum),
                whole_or("ack_quorum", ack_quorum, config.ack_quorum),
                password=password_of(password),
                custom=metadata_of(metadata),
                durability=durability_of(durability),
                announce_lac=True,
            )
        )
        return LedgerWriter(self._calls, writer, config.inflight_bytes)

    def open_ledger(
        self, ledger_id: int, recover: bool = True, password: bytes = b""
    ) -> "LedgerReader":
        """A reader. With `recover` the ledger is fenced and closed first, so that its end is final;
        without `recover` a ledger can be read while it is written.

        Durable on return, with `recover`: the close. The ledger's writer can append no further
        entry, and every entry that it acknowledged is in the ledger. Without `recover` nothing
        changes.

        Raises NoSuchLedger, DataUnavailable (the end cannot be decided now), Unauthorized,
        Unavailable.
        """
        store, ledger_id, secret = self._store, ledger_id_of(ledger_id), password_of(password)
        recover = flag("recover", recover)

        async def open_it() -> AsyncLedgerReader:
            reader = await store.open(ledger_id, recover=recover, password=secret)
            await reader.refresh_last_add_confirmed()
            return reader

        return LedgerReader(self._calls, self._calls.run(open_it()))

    def delete_ledger(self, ledger_id: int) -> None:
        """Delete a closed ledger; without effect if there is no such ledger.

        Durable on return: its record is gone. Bookies drop the entries later.

        Raises LedgerNotClosed, LedgerInUse if the ledger was made for a topic (maintenance deletes
        such ledgers), Unavailable.
        """
        self._calls.run(self._delete(ledger_id_of(ledger_id)))

    async def _delete(self, ledger_id: int) -> None:
        try:
            record = (await self._store.record(ledger_id, fresh=True)).record
        except NoSuchLedger:
            return
        if record.topic:
            raise LedgerInUse(
                f"ledger {ledger_id} holds rows of topic {record.topic}", ledger_id=ledger_id
            )
        await self._store.delete(ledger_id)

    def list_ledgers(self) -> Iterator[int]:
        """Ids of all ledgers, ascending, fetched in batches. Raises Unavailable."""
        ids = self._store.list()

        async def next_batch() -> list[int]:
            batch: list[int] = []
            async for ledger_id in ids:
                batch.append(ledger_id)
                if len(batch) == BATCH_ENTRIES_MAX:
                    break
            return batch

        while batch := self._calls.run(next_batch()):
            yield from batch

    def ledger_metadata(self, ledger_id: int) -> LedgerRecord:
        """The ledger's record as it is now. Raises NoSuchLedger, Unavailable."""
        versioned = self._calls.run(self._store.record(ledger_id_of(ledger_id), fresh=True))
        return versioned.record

    def close(self) -> None:
        """Close the connections. Open writers are not closed: their ledgers stay OPEN until a
        recovery. Calls of other threads, to this client or to its writers and readers, end at once
        with ClientClosed; so does every later call. Nothing durable changes."""
        if self._calls.close():
            self._background.run(self._store.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LedgerWriter:
    """Appends to one ledger. Leaving its `with` block closes the ledger."""

    def __init__(
        self,
        calls: Calls,
        writer: AsyncLedgerWriter,
        inflight_bytes: int,
    ) -> None:
        self.ledger_id = writer.ledger_id
        self._calls = calls
        self._writer = writer
        self._inflight_bytes = inflight_bytes
        self._lock = SharedLock()
        self._pending_appends: deque[tuple[Future[int], Sequence[Buffer] | Buffer, int, int]] = (
            deque()
        )
        self._pending_total_bytes = 0  # of all appends so far; only the blocking side writes it
        self._accepted_bytes = 0  # of all appends that the loop accepted; only the loop writes it
        self._order = threading.Lock()
        self._is_scheduled = False
        self._closed = False

    def append(self, payload: Sequence[Buffer] | Buffer, rows: int = 0) -> int:
        """Append one entry, the concatenated buffers of `payload`, and wait until it is
        acknowledged; returns its id. `rows` is how many rows the entry counts as. Afterwards the
        caller may change the payload (see `append_async`).

        Durable on return: this entry and all entries before it, each on at least `ack_quorum`
        bookies: synced to disk, or, in a page-cache ledger, written (docs/protocol.md, Append).
        After NotEnoughBookies, TimedOut or LedgerFenced the ledger may have the entry or not;
        recovery decides.

        Raises MessageTooBig, LedgerFenced, LedgerClosed, NotEnoughBookies, TimedOut, Unauthorized.
        """
        return self.append_async(payload, rows).result()

    def append_async(self, payload: Sequence[Buffer] | Buffer, rows: int = 0) -> "Future[int]":
        """Append one entry. The future is done with the entry's id when the entry is acknowledged,
        or with an error of `append`; futures are done in the order of the appends. Nothing is
        durable when this returns; the promise of `append` holds when the future is done.

        Blocks while the setting `inflight_bytes` is used up. The caller may change its payload as
        soon as this returns: a buffer that is not read-only is copied. A read-only buffer is not
        copied: the memory of a read-only view must not change until the writer is closed. A
        callback of the future runs on the event loop: it must not block.
        """
        self._calls.check_process()
        future = AppendFuture(self._lock)
        size, rows = _size(payload), whole("rows", rows)
        parts = payload if isinstance(payload, bytes) else read_only_parts(payload)
        with self._order:
            waiting = self._pending_total_bytes - self._accepted_bytes
            if waiting + self._writer.inflight_bytes >= self._inflight_bytes:
                self._calls.run(self._room())
            self._pending_appends.append((future, parts, rows, size))
            self._pending_total_bytes += size
            wake = not self._is_scheduled
            self._is_scheduled = True
        if wake:
            self._calls.loop.call_soon_threadsafe(self._accept_appends)
        return future

    @property
    def last_add_confirmed(self) -> int:
        """The id of the last entry acknowledged; -1 before the first."""
        return self._writer.last_add_confirmed

    def close(self) -> None:
        """Wait for pending appends and close the ledger at the last acknowledged entry.

        Durable on return: the ledger's end, and all entries up to it. May be called again. Raises
        Unavailable (call again), DataUnavailable, NoSuchLedger.
        """
        if not self._closed:
            self._calls.run(self._close())
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except LedgerError:
            if error is None:
                raise

    # -- on the loop --------------------------------------------------------------------------

    def _accept_appends(self) -> None:
        """Append the payloads of `append_async`, a part of them in each step of the loop, so that
        the first frame is sent while the next is made."""
        self._is_scheduled = False
        pending, append = self._pending_appends, self._writer.append_for
        for _ in range(min(len(pending), APPENDS_PER_STEP)):
            future, payload, rows, size = pending.popleft()
            self._accepted_bytes += size
            try:
                append(future, payload, rows)
            except Exception as error:
                fail_future(future, error)  # other appends wait behind this one: continue
        if pending and not self._is_scheduled:
            self._is_scheduled = True
            self._calls.loop.call_soon(self._accept_appends)

    async def _accept_all_appends(self) -> None:
        while self._pending_appends:
            self._accept_appends()
            await asyncio.sleep(0)

    async def _room(self) -> None:
        await self._accept_all_appends()
        await self._writer.room()

    async def _close(self) -> None:
        await self._accept_all_appends()
        await self._writer.close()


class LedgerReader:
    """Reads one ledger. Leaving its `with` block has no effect."""

    def __init__(self, calls: Calls, reader: AsyncLedgerReader) -> None:
        self.ledger_id = reader.ledger_id
        self._calls = calls
        self._reader = reader

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that may be read. While the ledger is open, each access asks the bookies;
        -1 does not prove that no entry was written. Raises Unavailable."""
        if self._reader.is_closed:
            return self._reader.last_add_confirmed
        return self._calls.run(self._reader.refresh_last_add_confirmed())

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is closed: then `last_add_confirmed` is its final end. While it is
        open, each access reads its record. Raises NoSuchLedger, Unavailable."""
        if not self._reader.is_closed:
            self._calls.run(self._reader.refresh_record())
        return self._reader.is_closed

    @property
    def metadata(self) -> Mapping[str, str]:
        """The `metadata` that the ledger was created with."""
        return self._reader.record.custom

    def read(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        """(entry id, payload) of first..last, both included, in order, fetched ahead.

        A payload is a view that stays valid as long as it is kept; `bytes(payload)` copies it. If
        `last` is `first - 1`, the range is empty. Raises NoSuchEntry for an unconfirmed entry,
        DataUnavailable, DigestMismatch, Unauthorized; ValueError at once for a malformed range.
        """
        return self._read(*entries_of(first, last))

    def _read(self, first: int, last: int) -> Iterator[tuple[int, memoryview]]:
        entries: EntryStream = self._reader.read(first, last)
        try:
            while batch := self._calls.run(self._next_batch(entries)):
                for entry_id, entry in batch:
                    yield entry_id, entry.payload
        finally:
            self._calls.submit(entries.aclose())

    def read_when_confirmed(self, after: int, timeout_s: float) -> list[tuple[int, memoryview]]:
        """(entry id, payload) of entries after `after`, in order, as soon as an entry is confirmed:
        at least one entry, some megabytes at most. Takes `timeout_s` seconds at most; [] means that
        no entry could be read in that time (no entry is confirmed, or bookies are unreachable), or
        that a closed ledger has no further entry. `after` -1: from the first entry on.

        Raises DataUnavailable, DigestMismatch, Unauthorized; NoSuchLedger if it was deleted.
        """
        after, timeout_s = entry_id_of("after", after, -1), seconds("timeout_s", timeout_s)
        entries = self._calls.run(self._reader.read_when_confirmed(after, timeout_s))
        return [(entry_id, entry.payload) for entry_id, entry in entries]

    def tail(self, first: int = 0) -> Iterator[tuple[int, memoryview]]:
        """(entry id, payload) from `first` on, each once and in order, waiting for entries that are
        not written yet; ends when the ledger is closed and every entry was returned.

        Open the ledger with `recover=False`, as recovery would end its writer. Ctrl-C, or leaving
        the loop, ends the wait. Raises what `read_when_confirmed` raises; to go on after an error,
        call `tail(last returned + 1)`.
        """
        return self._tail(entry_id_of("first", first))

    def _tail(self, first: int) -> Iterator[tuple[int, memoryview]]:
        reader = self._reader
        while True:
            last = self._calls.run(reader.wait_for_entry(first))
            if last < first:
                return
            yield from self._read(first, last)
            first = last + 1

    async def _next_batch(self, entries: EntryStream) -> list[tuple[int, Entry]]:
        """The next entries, at most a batch. If an entry cannot be read, returns the entries before
        it; the next call requests that entry again, and raises."""
        batch: list[tuple[int, Entry]] = []
        size = 0
        try:
            async for entry_id, entry in entries:
                batch.append((entry_id, entry))
                size += len(entry.payload)
                if len(batch) == BATCH_ENTRIES_MAX or size >= (1 << 20):
                    break
        except LedgerError:
            if not batch:
                raise
        return batch

    def close(self) -> None:
        """Without effect: a reader holds no resource."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _size(payload: Sequence[Buffer] | Buffer) -> int:
    """The bytes of the payload. Raises TypeError for a value that is no payload."""
    if isinstance(payload, bytes):
        return len(payload)
    try:
        if isinstance(payload, (list, tuple)):
            return sum(memoryview(part).nbytes for part in payload)
        return memoryview(payload).nbytes  # type: ignore[arg-type]
    except TypeError as error:
        kind = type(payload).__name__
        raise TypeError(f"payload is bytes, or a list of buffers, got {kind}: {error}") from None


_RLock = type(threading.RLock())


class SharedLock(_RLock):  # type: ignore[misc, valid-type]
    """What the futures of one writer share in the place of a condition each. No thread waits for
    it."""

    def notify_all(self) -> None:
        """Without effect: a callback of the future wakes the waiting thread."""

    def wait(self, _timeout: float | None = None) -> bool:
        """Without effect: the AppendFuture has waited already."""
        return False


class AppendFuture(Future[int]):
    """A Future without a lock and a condition of its own; only a thread that waits makes an Event.
    The ten objects of a plain Future would cost a fifth of an append of 1 KiB, most of that in the
    garbage collector (docs/performance-trials.md)."""

    def __init__(self, lock: SharedLock) -> None:
        # As Future.__init__, except for the condition.
        self._condition = lock
        self._state = PENDING
        self._result = None
        self._exception = None
        self._waiters = []
        self._done_callbacks: list[Any] = []

    def result(self, timeout: float | None = None) -> int:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            is_done = threading.Event()
            self.add_done_callback(lambda _: is_done.set())
            is_done.wait(timeout)
