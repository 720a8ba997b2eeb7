"""Fetch entries of one fragment from its bookies: replica after replica (`RangeFetch`), or a long
range as one stream from one of them, with no request between two responses (`LongRead`).

Always true of what is fetched replica after replica:
- an entry is requested of one replica at a time. Only for a chunk that a reader waits for (`hurry`)
  the next replica is asked too, once the last one asked has kept the reader waiting for
  `speculative_read_delay_s`, and so on down the write set; the first response that has the entry
  wins, and the other requests are given up;
- after any response without the entry (damaged, denied, not known, not allowed) the next replica is
  asked; no such response ends the fetch;
- after `fill` each entry is there, or a response stopped before it (ask again from there), or every
  member of its write set was asked and has refused (`Refusals` has the reasons);
- what one set of requests may bring is limited to the chunk's `bytes_max` in all. (Where Qw does
  not divide E a range does not leave out the few entries that two of its bookies hold: they come
  twice, within that limit. Of entries apart, each bookie is asked only for those that it keeps.)

Always true of a stream:
- entries are returned checked and in order; the caller has made sure that the whole range is
  confirmed. At anything but the next entry (damage, denial, BUSY, silence) the stream ends, and its
  caller goes on in the usual way, replica after replica;
- what is under way stays within `ahead_bytes`: the bookie has credit for one response less, because
  the last response may exceed its credit, and gets more only as entries are taken.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from bookie_server.api.entry import Entry
from bookie_server.api.messages import EntryIds, ReadResponse, has, neat, spans_of
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import ReadStream, Silent, Unreachable
from spark_ledger.bookies.local_reads import Locations
from spark_ledger.ledger.cluster import Undelivered, judge
from spark_ledger.ledger.ledger_view import LedgerView
from spark_ledger.ledger.quorum import Quorum


@dataclass(slots=True, eq=False)
class SlotRequest:
    """A request for entries to the bookie of one slot; `open` until its response. A response after
    `due_at` (seconds of the loop's clock) keeps the reader waiting for too long."""

    slot: int
    ids: EntryIds
    due_at: float
    open: bool = True


@dataclass(frozen=True, slots=True)
class Ask:
    """Entries to request of one slot."""

    slot: int
    ids: EntryIds


def preference(
    quorum: Quorum, turn: int, suspects: Iterable[int], near: Iterable[int] = ()
) -> list[int]:
    """All slots in the order in which to ask them. `turn` is any number; with the next number
    another slot comes first. `suspects` are the slots to ask last, `near` those to ask first unless
    they are suspects."""
    size = quorum.ensemble_size
    cover = quorum.cover(turn % size)
    others = [slot for step in range(size) if (slot := (turn + step) % size) not in cover]
    last, first = sum(1 << slot for slot in suspects), sum(1 << slot for slot in near)
    return sorted((*cover, *others), key=lambda slot: (last >> slot & 1, ~first >> slot & 1))


def first_asks(quorum: Quorum, ids: EntryIds, order: Sequence[int]) -> list[Ask]:
    """The first requests for these entries: each entry of one slot."""
    size = quorum.ensemble_size
    apart = not isinstance(ids, range)
    if apart or len(ids) <= 2 * size:
        return next_asks(quorum, ids, [], None, order, apart=apart)
    # Each slot's first and last entries are among these, however long the range is.
    edges = (*ids[:size], *ids[-size:])
    return next_asks(quorum, edges, [], None, order)


def next_asks(
    quorum: Quorum,
    missing: Iterable[int],
    asked: Sequence[SlotRequest],
    now: float | None,
    order: Sequence[int],
    *,
    apart: bool = False,
) -> list[Ask]:
    """The next requests for the entries that are missing, after the requests `asked` before.

    No request is made for an entry while another one for it is open and not overdue at `now` (None:
    no request is ever overdue), nor once every member of its write set was asked. A slot is asked
    for a range, which may hold entries that are not needed of it; with `apart`, for the needed
    entries only.
    """
    masks, size = quorum.write_masks(), quorum.ensemble_size
    askable = {}
    for entry_id in missing:
        left = _may_be_asked(masks[entry_id % size], entry_id, asked, now)
        if left:
            askable[entry_id] = left
    asks = []
    for slot in order:
        own = [entry_id for entry_id, left in askable.items() if left >> slot & 1]
        if own:
            asks.append(Ask(slot, neat(own) if apart else range(own[0], own[-1] + 1)))
            for entry_id in own:
                del askable[entry_id]
    return asks


def _may_be_asked(
    holders: int, entry_id: int, asked: Sequence[SlotRequest], now: float | None
) -> int:
    """The mask of slots that may be asked for one entry now."""
    for request in asked:
        if has(request.ids, entry_id) and holders >> request.slot & 1:
            holders &= ~(1 << request.slot)
            if request.open and (now is None or request.due_at > now):
                return 0
    return holders


@dataclass(slots=True)
class ReadChunk:
    """Entries to fetch, and those that are there. `version` is the version of the record that names
    the ensemble; `addresses` are the addresses of its bookies at that time. `reached`: no response
    stopped before an entry up to this one. `block`: if files of bookies are read here, one replica
    serves all chunks with this number; `later` are the entries of the block's later chunks."""

    ids: EntryIds
    ensemble: tuple[str, ...]
    version: int
    bytes_max: int
    addresses: tuple[str | None, ...] = ()
    block: int | None = None
    later: EntryIds = ()
    entries: dict[int, Entry] = field(default_factory=dict)
    reached: int = -1
    hurried: bool = False
    on_hurry: Callable[[], None] | None = None

    @property
    def last(self) -> int:
        return self.ids[-1]

    def cut_short(self, entry_id: int) -> bool:
        """Whether the entry is missing only because responses stopped before it."""
        return self.reached < entry_id <= self.last

    def take(self, ids: EntryIds) -> list[Entry]:
        """Take out these entries, up to the first that is missing."""
        run = []
        for entry_id in ids:
            if (entry := self.entries.pop(entry_id, None)) is None:
                break
            run.append(entry)
        return run

    def hurry(self) -> None:
        """A reader waits for the chunk now."""
        self.hurried = True
        if self.on_hurry is not None:
            self.on_hurry()


class Refusals:
    """Why replicas did not deliver. Kept by request, because one reason often covers all of it."""

    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        self._reasons: list[tuple[int, str, EntryIds, Undelivered]] = []

    def add(self, slot: int, bookie: str, ids: EntryIds, why: Undelivered) -> None:
        self._reasons.append((slot, bookie, ids, why))

    def of(self, entry_id: int) -> dict[str, Undelivered]:
        """Bookie -> why it did not deliver the entry."""
        write_set = self._quorum.write_set(entry_id)
        return {
            bookie: why
            for slot, bookie, ids, why in self._reasons
            if slot in write_set and has(ids, entry_id)
        }


class RangeFetch:
    """Fills chunks of one ledger; gives its view every last add confirmed that responses carry."""

    def __init__(self, view: LedgerView) -> None:
        self.quorum = view.quorum
        self.cluster = view.cluster
        self._view = view
        self._turn = self._ledger_id = view.ledger_id
        self._locations: dict[str, Locations] = {}  # by bookie
        self.avoided = ""
        """A bookie to ask last for now, as those in doubt."""

    async def fill(self, chunk: ReadChunk, ids: EntryIds | None = None) -> Refusals:
        """Fetch the missing entries of the chunk, or those of `ids`, its last entries."""
        filling = Filling(self, chunk, chunk.ids if ids is None else ids)
        try:
            return await filling.run()
        finally:
            filling.give_up()

    # -- what a filling needs -----------------------------------------------------------------

    def order(self, ensemble: tuple[str, ...], block: int | None = None) -> list[int]:
        """The slots in the order in which to ask them this time. If files of bookies are read here,
        all chunks of a block get the same order."""
        self._turn += 1
        near = self.near(ensemble)
        turn = self._turn if block is None or not near else self._ledger_id + block
        suspects = [*self.cluster.bookies.quarantine.suspects(), self.avoided]
        doubtful = [slot for slot, bookie in enumerate(ensemble) if bookie in suspects]
        return preference(self.quorum, turn, doubtful, near)

    def near(self, ensemble: tuple[str, ...]) -> list[int]:
        """The slots whose bookies' files may be read here."""
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

    def kept_in(self, slot: int, ids: EntryIds) -> EntryIds:
        """Those of the entries that the slot's bookie keeps."""
        if self.quorum.write_quorum == self.quorum.ensemble_size:
            return ids
        masks, size = self.quorum.write_masks(), self.quorum.ensemble_size
        return neat([entry_id for entry_id in ids if masks[entry_id % size] >> slot & 1])

    def sort_in(
        self, chunk: ReadChunk, request: SlotRequest, response: ReadResponse, refusals: Refusals
    ) -> None:
        """Take from a response the missing entries, and the reasons why others did not come."""
        slot, bookie = request.slot, chunk.ensemble[request.slot]
        if response.status is not Status.OK:
            refusals.add(slot, bookie, request.ids, Undelivered.of(response))
            return
        self._view.heard(response.last_add_confirmed)
        for at, entry_id in self._missing_of(chunk, request):
            judged = judge(response, self._ledger_id, at, entry_id)
            if judged is None and at > 0:
                chunk.reached = min(chunk.reached, entry_id - 1)
                return
            if judged is None:
                why = Undelivered(None, "an empty answer")
                refusals.add(slot, bookie, request.ids[:1], why)
            elif isinstance(judged[1], Entry):
                chunk.entries[entry_id] = judged[1]
            else:
                refusals.add(slot, bookie, request.ids[at : at + 1], judged[1])

    def _missing_of(self, chunk: ReadChunk, request: SlotRequest) -> Iterator[tuple[int, int]]:
        """The entries of the request that its bookie keeps and that are not there yet, each after
        its position in the response."""
        size, bit = self.quorum.ensemble_size, 1 << request.slot
        held = [bool(mask & bit) for mask in self.quorum.write_masks()]
        for at, entry_id in enumerate(request.ids):
            if held[entry_id % size] and entry_id not in chunk.entries:
                yield at, entry_id


class Filling:
    """One fill of one chunk: its requests, with and without a response."""

    def __init__(self, fetch: RangeFetch, chunk: ReadChunk, ids: EntryIds) -> None:
        self._fetch = fetch
        self._quorum = fetch.quorum
        self._chunk = chunk
        self._ids = ids
        self._order = fetch.order(chunk.ensemble, chunk.block)
        self._requests: dict[SlotRequest, asyncio.Task[ReadResponse]] = {}
        self._arrived: asyncio.Queue[SlotRequest | None] = asyncio.Queue()  # None: look again
        self._loop = asyncio.get_running_loop()

    async def run(self) -> Refusals:
        """Ask until no entry is missing that a bookie may deliver."""
        chunk, refusals = self._chunk, Refusals(self._quorum)
        chunk.reached = chunk.last
        chunk.on_hurry = lambda: self._arrived.put_nowait(None)
        self._ask(first_asks(self._quorum, self._ids, self._order))
        while True:
            responded = await self._next_response()
            if responded is not None:
                responded.open = False
                response = self._requests[responded].result()
                self._fetch.sort_in(chunk, responded, response, refusals)
            missing = [e for e in self._ids if e not in chunk.entries and e <= chunk.reached]
            if not missing:
                self._note_overtaken()
                return refusals
            now = self._loop.time() if chunk.hurried else None
            asked, apart = list(self._requests), not isinstance(self._ids, range)
            self._ask(next_asks(self._quorum, missing, asked, now, self._order, apart=apart))
            if not any(request.open for request in self._requests):
                return refusals

    def give_up(self) -> None:
        """Cancel the requests that are still open."""
        self._chunk.on_hurry = None
        for task in self._requests.values():
            task.cancel()

    # -- asking -------------------------------------------------------------------------------

    def _ask(self, asks: list[Ask]) -> None:
        """Send these requests at once; all their responses together may bring the chunk's bytes."""
        for ask in asks:
            due_at = self._loop.time() + self._fetch.cluster.config.speculative_read_delay_s
            request = SlotRequest(ask.slot, ask.ids, due_at)
            bookie = self._chunk.ensemble[ask.slot]
            bytes_max = max(1, self._chunk.bytes_max // len(asks))
            later = self._fetch.kept_in(ask.slot, self._chunk.later)
            task = self._loop.create_task(self._fetch.ask(bookie, ask.ids, bytes_max, later))
            task.add_done_callback(partial(self._ended, request))
            self._requests[request] = task

    def _ended(self, request: SlotRequest, _: "asyncio.Task[ReadResponse]") -> None:
        self._arrived.put_nowait(request)  # it stays open until `run` looks at its response

    # -- waiting ------------------------------------------------------------------------------

    async def _next_response(self) -> SlotRequest | None:
        """The request whose response is next; None when a request became overdue or a reader
        hurries."""
        try:
            async with asyncio.timeout_at(self._overdue_at()):
                return await self._arrived.get()
        except TimeoutError:
            return None

    def _overdue_at(self) -> float | None:
        """When the next open request will be overdue; None if no reader waits for the chunk."""
        if not self._chunk.hurried:
            return None
        now = self._loop.time()
        due = [request.due_at for request in self._requests if request.open]
        return min((at for at in due if at > now), default=None)

    def _note_overtaken(self) -> None:
        now = self._loop.time()
        for request in self._requests:
            if request.open and request.due_at <= now:
                bookie = self._chunk.ensemble[request.slot]
                self._fetch.cluster.bookies.quarantine.overtaken(bookie)


class LongRead:
    """Entries first..last from one bookie. Used by one task; `give_up` when done, always."""

    def __init__(self, view: LedgerView, bookie_id: str, first: int, last: int) -> None:
        self.bookie_id = bookie_id
        self.silent = False
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
            self.silent = isinstance(failure, Silent)
            return []
        run = self._entries(response)
        self._next = self._next + len(run) if len(run) == len(response.results) else self.last + 1
        return run

    def give_up(self) -> None:
        """End the stream; later responses are dropped."""
        if self._stream is not None:
            self._stream.give_up()

    def _entries(self, response: ReadResponse) -> list[Entry]:
        """The entries that the response brings, up to the first that it does not bring."""
        run: list[Entry] = []
        if response.status is not Status.OK:
            return run
        self._view.heard(response.last_add_confirmed)
        for entry_id in range(self._next, self.last + 1):
            judged = judge(response, self._view.ledger_id, len(run), entry_id)
            if judged is None or not isinstance(judged[1], Entry):
                return run
            run.append(judged[1])
        return run
