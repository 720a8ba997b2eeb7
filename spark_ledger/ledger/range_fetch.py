"""Fetch entries of one fragment from its bookies: chunk by chunk, where the next replica is asked
if one fails (`RangeFetch`), or a long range as one stream from one bookie (`LongRead`).

Always true of `RangeFetch`:
- an entry is requested of one replica at a time. Only if a reader waits for the chunk (`hurry`) and
  the replica has not responded for `speculative_read_delay_s`, a second one is asked as well, then
  a third, and so on through the write set. The first response that has the entry wins, and the
  other requests are given up;
- after any response without the entry (damaged, denied, not known, not allowed) the next replica is
  asked; no such response ends the fetch;
- after `fill` each entry has arrived, or a response stopped before the entry (the caller asks again
  from this entry on), or no member of its write set delivers it (the result has the reasons);
- the responses to requests that are sent together have at most the chunk's `bytes_max` in all. A
  bookie is asked for a whole range: if Qw does not divide E, two bookies may send the same entry,
  within that limit. For entries apart (not consecutive), each bookie is asked only for entries that
  it keeps.

Always true of `LongRead`:
- entries are returned checked and in order; the caller has made sure that the whole range is
  confirmed. If anything but the next entry arrives (damage, denial, BUSY), or nothing in time, the
  stream ends, and the caller fetches the rest with `RangeFetch`;
- the responses under way have `ahead_bytes` at most. A bookie sends within the credit that the
  reader grants, but its last response may exceed the credit; so the reader grants one response
  less, and more only as entries are taken.

A *local read* takes entries from the files of a bookie on this client's host (local_reads.py).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from bookie_server.api.entry import Entry
from bookie_server.api.messages import EntryIds, ReadResponse, as_entry_ids, has_id, spans_of
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import ReadStream, Silent, Unreachable
from spark_ledger.bookies.local_reads import Locations
from spark_ledger.ledger.cluster import DeliveryFailure, judge_response
from spark_ledger.ledger.ledger_view import LedgerView
from spark_ledger.ledger.quorum import Quorum


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A request for entries to the bookie of one slot. It is open until its response, and overdue
    after `due_at`, in seconds of the loop's clock."""

    slot: int
    ids: EntryIds
    due_at: float
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Entries to request of the bookie of one slot."""

    slot: int
    ids: EntryIds


def order_of_slots(
    quorum: Quorum, turn: int, suspects: Iterable[int], local_slots: Iterable[int] = ()
) -> list[int]:
    """All slots in the order in which to ask their bookies: first `local_slots`, last `suspects`,
    also if they are local. `turn` is any number: with the next number another slot comes first, so
    that the bookies share the load."""
    size = quorum.ensemble_size
    cover = quorum.covering_slots(turn % size)
    others = [slot for step in range(size) if (slot := (turn + step) % size) not in cover]
    last, first = sum(1 << slot for slot in suspects), sum(1 << slot for slot in local_slots)
    return sorted((*cover, *others), key=lambda slot: (last >> slot & 1, ~first >> slot & 1))


def plan_first_requests(
    quorum: Quorum, ids: EntryIds, order: Sequence[int]
) -> list[PlannedRequest]:
    """The first requests for these entries: each entry is requested of one slot."""
    size = quorum.ensemble_size
    apart = not isinstance(ids, range)
    if apart or len(ids) <= 2 * size:
        return plan_next_requests(quorum, ids, [], None, order, apart=apart)
    # Each slot's first and last entries are among these, however long the range is.
    edges = (*ids[:size], *ids[-size:])
    return plan_next_requests(quorum, edges, [], None, order)


def plan_next_requests(
    quorum: Quorum,
    missing: Iterable[int],
    asked: Sequence[SlotRequest],
    now: float | None,
    order: Sequence[int],
    *,
    apart: bool = False,
) -> list[PlannedRequest]:
    """The next requests for the missing entries, after the requests `asked`.

    No request is made for an entry while another request for it is open and not overdue at `now`
    (None: no request is ever overdue), nor once every member of its write set was asked. A slot is
    asked for a range, which may have entries that other slots deliver; with `apart`, only for the
    entries that the slot is to deliver.
    """
    masks, size = quorum.write_masks(), quorum.ensemble_size
    askable = {}
    for entry_id in missing:
        left = _askable_slots(masks[entry_id % size], entry_id, asked, now)
        if left:
            askable[entry_id] = left
    plans = []
    for slot in order:
        own = [entry_id for entry_id, left in askable.items() if left >> slot & 1]
        if own:
            plans.append(
                PlannedRequest(slot, as_entry_ids(own) if apart else range(own[0], own[-1] + 1))
            )
            for entry_id in own:
                del askable[entry_id]
    return plans


def _askable_slots(
    holders: int, entry_id: int, asked: Sequence[SlotRequest], now: float | None
) -> int:
    """The mask of the slots that may be asked for the entry now, out of the mask `holders`."""
    for request in asked:
        if has_id(request.ids, entry_id) and holders >> request.slot & 1:
            holders &= ~(1 << request.slot)
            if request.is_open and (now is None or request.due_at > now):
                return 0
    return holders


@dataclass(slots=True)
class ReadChunk:
    """The ids of entries to fetch, and the entries that have arrived. `version` is the version of
    the record that names the ensemble; `addresses` are the addresses of its bookies at that time.
    `reached_entry` is the last entry before which no response stopped. With local reads, one
    replica serves all chunks of one `block_number`, and `later_ids` are the entries of the block's
    later chunks."""

    ids: EntryIds
    ensemble: tuple[str, ...]
    version: int
    bytes_max: int
    addresses: tuple[str | None, ...] = ()
    block_number: int | None = None
    later_ids: EntryIds = ()
    entries: dict[int, Entry] = field(default_factory=dict)
    reached_entry: int = -1
    is_hurried: bool = False
    on_hurry: Callable[[], None] | None = None

    @property
    def last(self) -> int:
        return self.ids[-1]

    def is_cut_short(self, entry_id: int) -> bool:
        """Whether the entry is missing only because responses stopped before it."""
        return self.reached_entry < entry_id <= self.last

    def take(self, ids: EntryIds) -> list[Entry]:
        """Take out these entries, up to the first that is missing."""
        run = []
        for entry_id in ids:
            if (entry := self.entries.pop(entry_id, None)) is None:
                break
            run.append(entry)
        return run

    def hurry(self) -> None:
        """Note that a reader waits for the chunk now."""
        self.is_hurried = True
        if self.on_hurry is not None:
            self.on_hurry()


class DeliveryFailures:
    """Why replicas did not deliver entries. Each reason is noted with the entries that it holds
    for, often all entries of a request."""

    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        self._reasons: list[tuple[int, str, EntryIds, DeliveryFailure]] = []

    def add(self, slot: int, bookie: str, ids: EntryIds, why: DeliveryFailure) -> None:
        self._reasons.append((slot, bookie, ids, why))

    def reasons_for(self, entry_id: int) -> dict[str, DeliveryFailure]:
        """By bookie id, why the bookie did not deliver the entry."""
        write_set = self._quorum.write_set(entry_id)
        return {
            bookie: why
            for slot, bookie, ids, why in self._reasons
            if slot in write_set and has_id(ids, entry_id)
        }


class RangeFetch:
    """Fetches chunks of one ledger, and notes in the ledger's view the last add confirmed of each
    response."""

    def __init__(self, view: LedgerView) -> None:
        self.quorum = view.quorum
        self.cluster = view.cluster
        self._view = view
        self._turn = self._ledger_id = view.ledger_id
        self._locations: dict[str, Locations] = {}  # by bookie
        self.avoided_bookie = ""
        """The id of a bookie to ask last for now, as if it were a suspect; "" for none."""

    async def fill(self, chunk: ReadChunk, ids: EntryIds | None = None) -> DeliveryFailures:
        """Fetch the entries of the chunk; with `ids`, only these, the last of the chunk. Returns
        why entries are missing."""
        fill = ChunkFill(self, chunk, chunk.ids if ids is None else ids)
        try:
            return await fill.run()
        finally:
            fill.give_up()

    # -- for a ChunkFill ----------------------------------------------------------------------

    def next_order(self, ensemble: tuple[str, ...], block: int | None = None) -> list[int]:
        """The slots in the order in which to ask their bookies this time. With local reads, all
        chunks of a block get the same order."""
        self._turn += 1
        local_slots = self.local_slots(ensemble)
        turn = self._turn if block is None or not local_slots else self._ledger_id + block
        suspects = [*self.cluster.bookies.quarantine.suspects(), self.avoided_bookie]
        doubtful = [slot for slot, bookie in enumerate(ensemble) if bookie in suspects]
        return order_of_slots(self.quorum, turn, doubtful, local_slots)

    def local_slots(self, ensemble: tuple[str, ...]) -> list[int]:
        """The slots of bookies that local reads can read."""
        if not self.cluster.config.local_reads:
            return []
        readable = self.cluster.bookies.reads_files_of
        return [slot for slot, bookie in enumerate(ensemble) if readable(bookie)]

    async def ask(
        self, bookie_id: str, ids: EntryIds, bytes_max: int, later: EntryIds = ()
    ) -> ReadResponse:
        span, *further = spans_of(ids)
        local = self.cluster.config.local_reads
        return await self.cluster.bookies.read(
            *(bookie_id, self._ledger_id, *span),
            max_bytes=bytes_max,
            token=self._view.token,
            further=further,
            locations=self._locations.setdefault(bookie_id, {}) if local else None,
            ahead=later,
        )

    def ids_of_slot(self, slot: int, ids: EntryIds) -> EntryIds:
        """The entries of `ids` that the slot's bookie keeps."""
        if self.quorum.write_quorum == self.quorum.ensemble_size:
            return ids
        masks, size = self.quorum.write_masks(), self.quorum.ensemble_size
        return as_entry_ids([entry_id for entry_id in ids if masks[entry_id % size] >> slot & 1])

    def take_response(
        self,
        chunk: ReadChunk,
        request: SlotRequest,
        response: ReadResponse,
        failures: DeliveryFailures,
    ) -> None:
        """Add the entries of a response to the chunk, and note why other entries are missing."""
        slot, bookie = request.slot, chunk.ensemble[request.slot]
        if response.status is not Status.OK:
            failures.add(slot, bookie, request.ids, DeliveryFailure.of(response))
            return
        self._view.note_lac(response.last_add_confirmed)
        for at, entry_id in self._missing_of(chunk, request):
            judged = judge_response(response, self._ledger_id, at, entry_id)
            if judged is None and at > 0:
                chunk.reached_entry = min(chunk.reached_entry, entry_id - 1)
                return
            if judged is None:
                why = DeliveryFailure(None, "an empty answer")
                failures.add(slot, bookie, request.ids[:1], why)
            elif isinstance(judged[1], Entry):
                chunk.entries[entry_id] = judged[1]
            else:
                failures.add(slot, bookie, request.ids[at : at + 1], judged[1])

    def _missing_of(self, chunk: ReadChunk, request: SlotRequest) -> Iterator[tuple[int, int]]:
        """(position in the response, entry id) of the entries of the request that its bookie keeps
        and that have not arrived yet."""
        size, bit = self.quorum.ensemble_size, 1 << request.slot
        held = [bool(mask & bit) for mask in self.quorum.write_masks()]
        for at, entry_id in enumerate(request.ids):
            if held[entry_id % size] and entry_id not in chunk.entries:
                yield at, entry_id


class ChunkFill:
    """One fetch of one chunk."""

    def __init__(self, fetch: RangeFetch, chunk: ReadChunk, ids: EntryIds) -> None:
        self._fetch = fetch
        self._quorum = fetch.quorum
        self._chunk = chunk
        self._ids = ids
        self._order = fetch.next_order(chunk.ensemble, chunk.block_number)
        self._requests: dict[SlotRequest, asyncio.Task[ReadResponse]] = {}
        self._arrived: asyncio.Queue[SlotRequest | None] = asyncio.Queue()  # None: of `hurry`
        self._loop = asyncio.get_running_loop()

    async def run(self) -> DeliveryFailures:
        """Ask bookies until each entry has arrived, or no bookie is left to ask."""
        chunk, failures = self._chunk, DeliveryFailures(self._quorum)
        chunk.reached_entry = chunk.last
        chunk.on_hurry = lambda: self._arrived.put_nowait(None)
        self._send(plan_first_requests(self._quorum, self._ids, self._order))
        while True:
            responded = await self._next_response()
            if responded is not None:
                responded.is_open = False
                response = self._requests[responded].result()
                self._fetch.take_response(chunk, responded, response, failures)
            missing = [e for e in self._ids if e not in chunk.entries and e <= chunk.reached_entry]
            if not missing:
                self._note_overtaken()
                return failures
            now = self._loop.time() if chunk.is_hurried else None
            asked, apart = list(self._requests), not isinstance(self._ids, range)
            self._send(
                plan_next_requests(self._quorum, missing, asked, now, self._order, apart=apart)
            )
            if not any(request.is_open for request in self._requests):
                return failures

    def give_up(self) -> None:
        """Cancel the requests that are still open."""
        self._chunk.on_hurry = None
        for task in self._requests.values():
            task.cancel()

    # -- asking -------------------------------------------------------------------------------

    def _send(self, plans: list[PlannedRequest]) -> None:
        """Send these requests at once; their responses share the chunk's `bytes_max`."""
        for plan in plans:
            due_at = self._loop.time() + self._fetch.cluster.config.speculative_read_delay_s
            request = SlotRequest(plan.slot, plan.ids, due_at)
            bookie = self._chunk.ensemble[plan.slot]
            bytes_max = max(1, self._chunk.bytes_max // len(plans))
            later = self._fetch.ids_of_slot(plan.slot, self._chunk.later_ids)
            task = self._loop.create_task(self._fetch.ask(bookie, plan.ids, bytes_max, later))
            task.add_done_callback(partial(self._ended, request))
            self._requests[request] = task

    def _ended(self, request: SlotRequest, _: "asyncio.Task[ReadResponse]") -> None:
        self._arrived.put_nowait(request)  # it stays open until `run` looks at its response

    # -- waiting ------------------------------------------------------------------------------

    async def _next_response(self) -> SlotRequest | None:
        """The request of the next response; None when a request has become overdue, or a reader
        begins to wait for the chunk."""
        try:
            async with asyncio.timeout_at(self._overdue_at()):
                return await self._arrived.get()
        except TimeoutError:
            return None

    def _overdue_at(self) -> float | None:
        """When the next open request becomes overdue; None if no reader waits for the chunk."""
        if not self._chunk.is_hurried:
            return None
        now = self._loop.time()
        due = [request.due_at for request in self._requests if request.is_open]
        return min((at for at in due if at > now), default=None)

    def _note_overtaken(self) -> None:
        """Note the bookies with overdue requests: others have delivered all entries sooner."""
        now = self._loop.time()
        for request in self._requests:
            if request.is_open and request.due_at <= now:
                bookie = self._chunk.ensemble[request.slot]
                self._fetch.cluster.bookies.quarantine.note_overtaken(bookie)


class LongRead:
    """A stream of the entries first..last from one bookie. One task uses it, and calls `give_up` in
    any case."""

    def __init__(self, view: LedgerView, bookie_id: str, first: int, last: int) -> None:
        self.bookie_id = bookie_id
        self.is_bookie_silent = False
        """Whether the stream ended because the bookie kept the reader waiting."""
        self._cluster = view.cluster
        self._view = view
        self._next = first
        self.last = last
        self._stream: ReadStream | None = None
        self._granted_bytes = 0

    async def next_run(self, request_bytes: int, ahead_bytes: int) -> list[Entry]:
        """The next entries as they arrive; [] after the last one, or when the stream has ended."""
        if self._next > self.last:
            return []
        try:
            if self._stream is None:
                self._stream = await self._cluster.bookies.read_stream(
                    *(self.bookie_id, self._view.ledger_id, self._next, self.last),
                    max_bytes=request_bytes,
                    credit_bytes=max(1, ahead_bytes - request_bytes),
                    token=self._view.token,
                )
            else:
                received_bytes = self._stream.received_bytes
                await self._stream.grant(received_bytes - self._granted_bytes)
                self._granted_bytes = received_bytes
            response = await self._stream.next(self._cluster.config.speculative_read_delay_s)
        except Unreachable as failure:
            self.is_bookie_silent = isinstance(failure, Silent)
            return []
        run = self._entries(response)
        self._next = self._next + len(run) if len(run) == len(response.results) else self.last + 1
        return run

    def give_up(self) -> None:
        """End the stream; later responses are dropped."""
        if self._stream is not None:
            self._stream.give_up()

    def _entries(self, response: ReadResponse) -> list[Entry]:
        """The entries of the response, up to the first entry that is missing or damaged in it."""
        run: list[Entry] = []
        if response.status is not Status.OK:
            return run
        self._view.note_lac(response.last_add_confirmed)
        for entry_id in range(self._next, self.last + 1):
            judged = judge_response(response, self._view.ledger_id, len(run), entry_id)
            if judged is None or not isinstance(judged[1], Entry):
                return run
            run.append(judged[1])
        return run
