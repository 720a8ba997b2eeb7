"""The writer of a ledger: gives entries their ids, counts bytes and rows, closes the ledger.

Always true: entry ids follow each other from 0; each header carries the last add confirmed at the
time of the append and counts that include its entry; after an add has failed, all later adds fail;
a close records what was confirmed, not what was appended. A close that meets a recovery by another
client adopts the result of the recovery.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import index
from typing import Any

from bookie_server.api.codec import encode_add
from bookie_server.api.entry import (
    HEADER_BYTES,
    NO_ENTRY,
    Buffer,
    EntryHeader,
    pack_header,
    payload_crc,
)
from bookie_server.api.messages import Add
from bookie_server.api.status import Status
from spark_ledger.async_tasks import BackgroundTasks, cancel
from spark_ledger.errors import LedgerClosed, LedgerError, LedgerFenced, MessageTooBig
from spark_ledger.ledger import transitions
from spark_ledger.ledger.add_pipeline import AddPipeline, fail_future
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.ensemble_change import EnsembleChange
from spark_ledger.ledger.quorum import PendingAdd
from spark_ledger.ledger.records import MoveRefused, VersionedRecord
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens

ANNOUNCE_AGAIN_S = 1.0  # the pause after an explicit LAC that fewer than Qa bookies took
LAST_RESPONSES_S = 0.5  # the longest wait of a close for the responses to confirmed adds
COUNT_MAX = 2**63 - 1  # what a header has room for

Recover = Callable[[int], Awaitable[VersionedRecord]]


class AsyncLedgerWriter:
    """Appends to one open ledger. Made by LedgerStore.create; there is one per ledger, ever."""

    def __init__(
        self,
        cluster: Cluster,
        versioned: VersionedRecord,
        tokens: Tokens,
        recover: Recover,
        announce_lac: bool = False,
    ) -> None:
        self.ledger_id = versioned.record.ledger_id
        self._cluster = cluster
        self._versioned = versioned
        self._tokens = tokens
        self._recover = recover
        self._loop = asyncio.get_running_loop()
        self._pipeline = AddPipeline(cluster, versioned.record, NO_ENTRY)
        self._change = EnsembleChange(self._pipeline, self._commit_change, tokens.read)
        for number, slot in enumerate(self._pipeline.slots):
            # The ensemble names a bookie that is down only if too few bookies are registered.
            if not cluster.directory.is_registered(slot.bookie_id):
                self._pipeline.slot_failed(number, "the bookie was down when the ledger was made")
        if announce_lac:
            self._pipeline.on_confirmed = self._announce_or_plan
        self._announcing = BackgroundTasks()
        self._announce_timer: asyncio.TimerHandle | None = None
        self._announced = NO_ENTRY
        self._announced_at = float("-inf")
        self._appended_at = 0.0
        self._next_entry = 0
        self._bytes = 0
        self._rows = 0
        self._closing = False
        self._close_lock = asyncio.Lock()
        self._closed: LedgerRecord | None = None

    # -- state --------------------------------------------------------------------------------

    @property
    def record(self) -> LedgerRecord:
        return self._versioned.record

    @property
    def version(self) -> int:
        return self._versioned.version

    @property
    def last_add_confirmed(self) -> int:
        return self._pipeline.pending.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        return self._next_entry - 1

    @property
    def confirmed_bytes(self) -> int:
        """Bytes of the payloads of entries up to the last add confirmed."""
        return self._pipeline.confirmed_bytes

    @property
    def inflight_bytes(self) -> int:
        """See AddPipeline.inflight_bytes."""
        return self._pipeline.inflight_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of appended entries that not every bookie has responded to."""
        return self._pipeline.held_bytes

    @property
    def failure(self) -> LedgerError | None:
        """Why the writer takes no more adds; None if it does."""
        return self._pipeline.failure

    # -- appending ----------------------------------------------------------------------------

    def append(self, payload: Sequence[Buffer] | Buffer, rows: int = 0) -> asyncio.Future[int]:
        """Append one entry: the concatenation of the buffers of `payload`, counted as `rows` rows.

        Never blocks; see `room`. The caller may change its buffers as soon as this returns: the
        writer copies those that are not read-only. The futures are done in the order of the
        appends, each with its entry's id when Qa bookies have synced the entry (of a ledger with
        page-cache durability: written it).
        A future fails with MessageTooBig (nothing was sent, the writer goes on), LedgerFenced,
        LedgerClosed, NotEnoughBookies, TimedOut, Unauthorized or NoSuchLedger; an entry that failed
        may still turn up when the ledger is recovered.
        """
        future: asyncio.Future[int] = self._loop.create_future()
        self.append_for(future, payload, rows)
        return future

    def append_for(self, waiter: Any, payload: Sequence[Buffer] | Buffer, rows: int = 0) -> None:
        """As `append`, but the caller gives the future, `waiter`; it is done on the event loop."""
        parts = read_only_parts(payload)
        size = sum(map(len, parts))
        refusal = self._refusal(size, rows)
        if refusal is not None:
            fail_future(waiter, refusal)
            return
        entry_id, lac = self._next_entry, self._pipeline.pending.last_add_confirmed
        bytes_so_far, rows_so_far = self._bytes + size, self._rows + index(rows)
        crc = payload_crc(parts)
        header = pack_header(
            EntryHeader(self.ledger_id, entry_id, lac, bytes_so_far, rows_so_far, size, crc)
        )
        # Nothing above changes the writer: an entry that cannot be packed takes no id.
        self._next_entry, self._bytes, self._rows = entry_id + 1, bytes_so_far, rows_so_far
        self._appended_at = now = self._loop.time()
        packed = encode_add(Add([header, *parts], recovery=False, token=self._tokens.add))
        stored = size + HEADER_BYTES
        self._pipeline.push(
            PendingAdd(entry_id, packed, stored, bytes_so_far, rows_so_far, now, waiter)
        )

    async def room(self) -> None:
        """Return when the bytes in flight are below the setting `inflight_bytes`, or the writer has
        failed. Await `room` before each append to keep memory bounded."""
        await self._pipeline.room()

    async def held_below(self, bytes_max: int) -> None:
        """Return when `held_bytes` is at most `bytes_max`, which is not negative."""
        await self._pipeline.held_below(bytes_max)

    async def wait_for_copies(self, timeout_s: float, first_entry: int = 0) -> list[str]:
        """Wait up to `timeout_s` until each bookie has responded to the adds that are confirmed
        now. Returns the bookies that lack a copy of a confirmed entry from `first_entry` on: [] if
        each of these entries has Qw copies."""
        await self._pipeline.wait_for_responses(timeout_s)
        return self._pipeline.lacking(first_entry)

    def _refusal(self, size: int, rows: int) -> LedgerError | None:
        if not 0 <= rows <= COUNT_MAX - self._rows:
            raise ValueError(f"rows are 0 or more, {COUNT_MAX} in a ledger at most; got {rows}")
        if (error := self._pipeline.late_add_error()) is not None:
            return error
        if self._closing:
            return LedgerClosed(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)
        limit = self._cluster.config.entry_bytes_max - HEADER_BYTES
        if size > limit:
            return MessageTooBig(
                f"an entry of {size} bytes is larger than the {limit} allowed", size=size
            )
        return None

    async def is_fenced(self) -> bool:
        """Whether an add was refused by a fence, or a bookie of the last ensemble responds that the
        ledger is fenced; False if no bookie responds."""
        if isinstance(self.failure, LedgerFenced):
            return True
        bookies, token = self._cluster.bookies, self._tokens.read
        requests = [
            asyncio.ensure_future(bookies.read_lac(slot.bookie_id, self.ledger_id, token=token))
            for slot in self._pipeline.slots
        ]
        try:
            for next_response in asyncio.as_completed(requests):  # a hung request delays no other
                response = await next_response
                if response.status is Status.OK and response.fenced:
                    return True
            return False
        finally:
            await cancel(*requests)

    # -- closing ------------------------------------------------------------------------------

    async def close(self) -> LedgerRecord:
        """Wait for the pending adds, then close the ledger at the last add confirmed.

        Returns the CLOSED record, the same each time. A failed writer closes too: entries that were
        confirmed stay. If another client recovers the ledger, returns the record of that recovery.
        Raises Unavailable (try again), NoSuchLedger, DataUnavailable.
        """
        self._closing = True
        async with self._close_lock:
            if self._closed is None:
                await self._pipeline.wait_until_drained()
                await self._change.stop()
                await self._pipeline.wait_for_responses(LAST_RESPONSES_S)
                self._versioned = await self._close_record()
                self._closed = self._versioned.record
                self._stop_announcing()
            return self._closed

    def abandon(self, failure: LedgerError | None = None) -> None:
        """Stop at once, without closing the ledger: pending adds fail, with `failure` if given. The
        ledger stays open until a recovery closes it. Nothing happens if the writer is closed."""
        if self._closed is not None:
            return
        self._closing = True
        given_up = LedgerClosed(f"the writer of ledger {self.ledger_id} was given up")
        self._pipeline.fail(failure or given_up)
        self._stop_announcing()

    async def _close_record(self) -> VersionedRecord:
        pipeline = self._pipeline
        last = pipeline.pending.last_add_confirmed
        end = transitions.LastEntry(last, pipeline.confirmed_bytes, pipeline.confirmed_rows)
        try:
            return await self._cluster.records.move(
                self._versioned, lambda record: transitions.close(record, end)
            )
        except MoveRefused:
            recovered = await self._recover(self.ledger_id)
        closed_at = transitions.end_of(recovered.record).last_entry
        if closed_at < last:
            raise LedgerError(
                f"ledger {self.ledger_id} was closed at entry {closed_at}, but {last} was"
                " acknowledged: acknowledged entries are lost"
            )
        return recovered

    def _stop_announcing(self) -> None:
        if self._announce_timer is not None:
            self._announce_timer.cancel()
        self._announcing.cancel()

    # -- ensemble changes ---------------------------------------------------------------------

    async def _commit_change(
        self, failed: Mapping[int, str], replacements: Mapping[int, str], first_entry: int
    ) -> LedgerRecord:
        self._versioned = await self._cluster.records.move(
            self._versioned,
            lambda record: transitions.change_ensemble(record, failed, replacements, first_entry),
        )
        return self._versioned.record

    # -- explicit LACs ------------------------------------------------------------------------

    def _announce_or_plan(self) -> None:
        """Write an explicit LAC now, or later; the pipeline calls this when adds were confirmed.

        Write it now if no add is pending and the last explicit LAC is `explicit_lac_s` old.
        Otherwise write it when no add was appended for `explicit_lac_s`: a pending add carries this
        LAC, but may be stuck."""
        if self._announce_timer is not None or self._closing:
            return
        pause_s = self._cluster.config.explicit_lac_s
        if self._pipeline.pending or self._loop.time() < self._announced_at + pause_s:
            self._announce_timer = self._loop.call_later(pause_s, self._announce_if_quiet)
        else:
            self._announce(self.last_add_confirmed)

    def _announce_if_quiet(self) -> None:
        self._announce_timer = None
        lac = self.last_add_confirmed
        if self._closing or self.failure is not None or lac <= self._announced:
            return  # the next confirmation calls _announce_or_plan again
        quiet_at = self._appended_at + self._cluster.config.explicit_lac_s
        if self._loop.time() < quiet_at:
            self._announce_timer = self._loop.call_at(quiet_at, self._announce_if_quiet)
            return
        self._announce(lac)

    def _announce(self, lac: int) -> None:
        self._announced, self._announced_at = lac, self._loop.time()
        self._announcing.start(self._write_lac(lac), name=f"lac of {self.ledger_id}")

    async def _write_lac(self, lac: int) -> None:
        """Write the explicit LAC to the write set of entry `lac`, and again after a pause if fewer
        than Qa bookies took it."""
        pipeline = self._pipeline
        responses = await asyncio.gather(
            *(
                self._cluster.bookies.write_lac(
                    pipeline.slots[slot].bookie_id, self.ledger_id, lac, token=self._tokens.add
                )
                for slot in pipeline.quorum.write_set(lac)
                if not pipeline.slots[slot].failed
            )
        )
        taken = sum(response.status is Status.OK for response in responses)
        if taken < pipeline.quorum.ack_quorum and self._announced == lac and not self._closing:
            self._announced = NO_ENTRY
            if self._announce_timer is None:
                self._announce_timer = self._loop.call_later(
                    ANNOUNCE_AGAIN_S, self._announce_if_quiet
                )


def read_only_parts(payload: Sequence[Buffer] | Buffer) -> list[Buffer]:
    """The payload as a list of buffers that the caller cannot change: a buffer that is not
    read-only is copied, because the pipeline may send it long after the caller's future is done.
    `len` of each is its number of bytes."""
    if isinstance(payload, bytes):
        return [payload]
    if isinstance(payload, (bytearray, memoryview)) or not isinstance(payload, (list, tuple)):
        return [_read_only(payload)]  # type: ignore[arg-type]
    return [part if isinstance(part, bytes) else _read_only(part) for part in payload]


def _read_only(part: Buffer) -> Buffer:
    view = memoryview(part)
    return view.cast("B") if view.readonly else view.tobytes()
