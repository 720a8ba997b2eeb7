"""Fetch a range of entries of one fragment from its bookies, replica after replica.

Always true:
- an entry is expected of one replica at a time. Only for a chunk that somebody waits for (`hurry`)
  the next replica is asked too, once the last one asked has kept it waiting for
  `speculative_read_delay_s`, and so on down the write set; the first answer that has the entry
  wins, what is left over is given up;
- whatever a replica says that is not the entry (it is damaged, denied, not known, not allowed) is
  a reason to ask the next one, and none to end;
- after `fill` either the entry is there, or an answer stopped before it (ask again from there), or
  every member of its write set was asked and has refused (`Refusals` says why);
- what one set of questions may bring is limited to the chunk's `bytes_max` in all. (Where Qw does
  not divide E a range cannot leave out the few entries that two of its bookies hold: they come
  twice, within that limit.)
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from bookie_server.api.entry import Entry
from bookie_server.api.messages import ReadResponse
from bookie_server.api.status import Status
from spark_ledger.ledger.answers import judge, say
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.read_order import Ask, Question, first_asks, next_asks, preference


@dataclass(slots=True)
class Chunk:
    """A range to fetch, and what of it is there. `version` is that of the record which names the
    ensemble, `addresses` is where its bookies were then; `reached` the last entry that was asked
    for with every answer going that far."""

    first: int
    last: int
    ensemble: tuple[str, ...]
    version: int
    bytes_max: int
    addresses: tuple[str | None, ...] = ()
    entries: dict[int, Entry] = field(default_factory=dict)
    reached: int = -1
    hurried: bool = False
    on_hurry: Callable[[], None] | None = None

    def cut_short(self, entry_id: int) -> bool:
        """Whether the entry is missing only because answers stopped before it."""
        return self.reached < entry_id <= self.last

    def take_from(self, entry_id: int) -> list[Entry]:
        """Take out what is there from `entry_id` on, up to the first that is missing."""
        run = []
        while (entry := self.entries.pop(entry_id, None)) is not None:
            run.append(entry)
            entry_id += 1
        return run

    def hurry(self) -> None:
        """Somebody waits for the chunk now."""
        self.hurried = True
        if self.on_hurry is not None:
            self.on_hurry()


class Refusals:
    """Why replicas did not deliver. Kept by range, for often it is one reason for all entries."""

    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        self._said: list[tuple[int, str, int, int, str]] = []

    def add(self, slot: int, bookie: str, first: int, last: int, why: str) -> None:
        self._said.append((slot, bookie, first, last, why))

    def of(self, entry_id: int) -> dict[str, str]:
        """Bookie -> why it did not deliver the entry."""
        write_set = self._quorum.write_set(entry_id)
        return {
            bookie: why
            for slot, bookie, first, last, why in self._said
            if first <= entry_id <= last and slot in write_set
        }


class RangeFetch:
    """Fills chunks of one ledger; `heard` takes every last add confirmed that answers carry."""

    def __init__(
        self,
        cluster: Cluster,
        quorum: Quorum,
        ledger_id: int,
        token: bytes,
        heard: Callable[[int], None],
    ) -> None:
        self.quorum = quorum
        self._cluster = cluster
        self._ledger_id = ledger_id
        self._token = token
        self._heard = heard
        self._turn = ledger_id
        self.avoided = ""
        """A bookie that is asked last for now, besides those in doubt."""

    async def fill(self, chunk: Chunk, first: int | None = None) -> Refusals:
        """Fetch what is missing of the chunk, from `first` on (None: its beginning)."""
        filling = Filling(self, chunk, chunk.first if first is None else first)
        try:
            return await filling.run()
        finally:
            filling.give_up()

    # -- what a filling needs -----------------------------------------------------------------

    @property
    def delay_s(self) -> float:
        return self._cluster.config.speculative_read_delay_s

    def order(self, ensemble: tuple[str, ...]) -> list[int]:
        """The slots in the order in which they are to be asked this time."""
        self._turn += 1
        suspects = [*self._cluster.bookies.quarantine.suspects(), self.avoided]
        doubtful = [slot for slot, bookie in enumerate(ensemble) if bookie in suspects]
        return preference(self.quorum, self._turn, doubtful)

    def overtaken(self, bookie_id: str) -> None:
        """Another replica, asked later, was sooner."""
        self._cluster.bookies.quarantine.overtaken(bookie_id)

    async def ask(self, bookie_id: str, first: int, last: int, bytes_max: int) -> ReadResponse:
        return await self._cluster.bookies.read(
            *(bookie_id, self._ledger_id, first, last), max_bytes=bytes_max, token=self._token
        )

    def sort_in(
        self, chunk: Chunk, question: Question, response: ReadResponse, refusals: Refusals
    ) -> None:
        """Take from an answer the entries that are missing, and the reasons for others."""
        slot, bookie = question.slot, chunk.ensemble[question.slot]
        if response.status is not Status.OK:
            refusals.add(slot, bookie, question.first, question.last, say(response))
            return
        self._heard(response.last_add_confirmed)
        for entry_id in self._missing_of(chunk, question):
            said = judge(response, self._ledger_id, question.first, entry_id)
            if said is None and entry_id > question.first:
                chunk.reached = min(chunk.reached, entry_id - 1)
                return
            if said is None:
                refusals.add(slot, bookie, entry_id, entry_id, "an empty answer")
            elif isinstance(said[1], Entry):
                chunk.entries[entry_id] = said[1]
            else:
                refusals.add(slot, bookie, entry_id, entry_id, said[1])

    def _missing_of(self, chunk: Chunk, question: Question) -> Iterator[int]:
        """The entries of the question that its bookie keeps and that are not there yet."""
        size, bit = self.quorum.ensemble_size, 1 << question.slot
        held = [bool(mask & bit) for mask in self.quorum.write_masks()]
        for entry_id in range(question.first, question.last + 1):
            if held[entry_id % size] and entry_id not in chunk.entries:
                yield entry_id


class Filling:
    """One fill of one chunk: its questions, open and answered."""

    def __init__(self, fetch: RangeFetch, chunk: Chunk, begin: int) -> None:
        self._fetch = fetch
        self._chunk = chunk
        self._begin = begin
        self._order = fetch.order(chunk.ensemble)
        self._questions: dict[Question, asyncio.Task[ReadResponse]] = {}
        self._arrived: asyncio.Queue[Question | None] = asyncio.Queue()  # None: look again
        self._loop = asyncio.get_running_loop()

    async def run(self) -> Refusals:
        """Ask until nothing is missing that somebody may deliver."""
        chunk, refusals = self._chunk, Refusals(self._fetch.quorum)
        chunk.reached = chunk.last
        chunk.on_hurry = lambda: self._arrived.put_nowait(None)
        self._ask(first_asks(self._fetch.quorum, self._begin, chunk.last, self._order))
        while True:
            answered = await self._next_answer()
            if answered is not None:
                answered.open = False
                response = self._questions[answered].result()
                self._fetch.sort_in(chunk, answered, response, refusals)
            missing = self._missing()
            if not missing:
                self._note_overtaken()
                return refusals
            self._ask(self._next_asks(missing))
            if not any(question.open for question in self._questions):
                return refusals

    def give_up(self) -> None:
        """Cancel what is still open."""
        self._chunk.on_hurry = None
        for task in self._questions.values():
            task.cancel()

    # -- asking -------------------------------------------------------------------------------

    def _ask(self, asks: list[Ask]) -> None:
        """Ask these at once; between them they may bring the chunk's bytes."""
        for ask in asks:
            due_at = self._loop.time() + self._fetch.delay_s
            question = Question(ask.slot, ask.first, ask.last, due_at)
            bookie = self._chunk.ensemble[ask.slot]
            bytes_max = max(1, self._chunk.bytes_max // len(asks))
            task = self._loop.create_task(self._fetch.ask(bookie, ask.first, ask.last, bytes_max))
            task.add_done_callback(partial(self._ended, question))
            self._questions[question] = task

    def _ended(self, question: Question, _: "asyncio.Task[ReadResponse]") -> None:
        self._arrived.put_nowait(question)  # it is open until its answer is looked at

    def _next_asks(self, missing: list[int]) -> list[Ask]:
        now = self._loop.time() if self._chunk.hurried else None
        asked = list(self._questions)
        return next_asks(self._fetch.quorum, missing, asked, now, self._order)

    def _missing(self) -> list[int]:
        chunk = self._chunk
        return [e for e in range(self._begin, chunk.reached + 1) if e not in chunk.entries]

    # -- waiting ------------------------------------------------------------------------------

    async def _next_answer(self) -> Question | None:
        """The question answered next; None when a question became overdue or somebody hurries."""
        try:
            async with asyncio.timeout_at(self._overdue_at()):
                return await self._arrived.get()
        except TimeoutError:
            return None

    def _overdue_at(self) -> float | None:
        """When the next open question will have been open for too long, if anybody minds."""
        if not self._chunk.hurried:
            return None
        now = self._loop.time()
        due = [question.due_at for question in self._questions if question.open]
        return min((at for at in due if at > now), default=None)

    def _note_overtaken(self) -> None:
        now = self._loop.time()
        for question in self._questions:
            if question.open and question.due_at <= now:
                self._fetch.overtaken(self._chunk.ensemble[question.slot])
