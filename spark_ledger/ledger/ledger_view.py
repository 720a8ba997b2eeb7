"""A reader's knowledge of its ledger: the record, and how far entries are confirmed (`LedgerView`);
and how the reader learns of more while the ledger is being written (`News`):

    a LAC above the known one (an add, or an explicit LAC)  -> read on
    a fence, a changed record                               -> read the record again
    CLOSED, and every entry returned                        -> the end

Always true of what is known: record and LAC only move forward, however old the responses are. The
known LAC is a lower bound of what is confirmed: -1 (NO_ENTRY) does not mean that nothing was
written, and only a CLOSED record gives the ledger's end. A closed ledger that ends before an entry
that was confirmed has lost entries: its record is never adopted, the reader raises RowsLost.

Always true of the waiting:
- all members of the last fragment are asked at once (one write set alone may not hear of an add to
  another); each is asked again when it has nothing new, and after a pause when it does not respond;
- the record is watched. It is also read again when a bookie responds early without news, and now
  and then (a watch can be missed): only a CLOSED record ends a stream, never a last add confirmed,
  -1 or other;
- a reason to look at the record stays until a look has ended: entries that arrive first cancel the
  look;
- while bookies respond, a metadata store that does not respond is no error;
- when the waiting ends, for whatever reason, every request still open is cancelled, and the
  bookie forgets it: at once, or when its `wait_ms` is over if the cancellation is lost.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from bookie_server.api.entry import NO_ENTRY, Entry
from bookie_server.api.messages import ReadLacResponse
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.async_tasks import cancel
from spark_ledger.errors import (
    DataUnavailable,
    LedgerError,
    NoSuchLedger,
    RowsLost,
    Unauthorized,
    Unavailable,
)
from spark_ledger.ledger.cluster import Cluster, as_responded, say
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from spark_ledger.metadata.store import Watcher


class LedgerView:
    """One ledger as one reader sees it; shared by the parts of that reader."""

    def __init__(self, cluster: Cluster, versioned: VersionedRecord, token: bytes) -> None:
        record = versioned.record
        self.ledger_id = record.ledger_id
        self.token = token
        self.quorum = Quorum.of(record)
        self.cluster = cluster
        self._versioned = versioned
        self._lac = NO_ENTRY
        self.last_taken = NO_ENTRY
        """The last entry that a bookie had taken when it was asked, confirmed or not."""

    @property
    def record(self) -> LedgerRecord:
        return self._versioned.record

    @property
    def version(self) -> int:
        return self._versioned.version

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be confirmed; of a closed ledger, its last entry."""
        end = self.record.last_entry
        return self._lac if end is None else end

    def heard(self, lac: int) -> None:
        """Note a bookie's response that entries up to `lac` are confirmed."""
        self._lac = max(self._lac, lac)

    # -- asking -------------------------------------------------------------------------------

    async def reread(self, *, fresh: bool = False, watch: Watcher | None = None) -> None:
        """Read the record again; with `fresh` after a sync, so that it is no older than this call.

        Raises NoSuchLedger (after a sync always), Unavailable, RowsLost.
        """
        records = self.cluster.records
        try:
            versioned = await records.read(self.ledger_id, fresh=fresh, watch=watch)
        except NoSuchLedger:
            if fresh:
                raise
            versioned = await records.read(self.ledger_id, fresh=True, watch=watch)
        self._adopt(versioned)

    async def refresh(self) -> bool:
        """Read the record and, of an open ledger, ask the bookies; whether the store responded.

        The reader asks the bookies also if the metadata store does not respond: beside it, when the
        store takes longer than `speculative_read_delay_s`. It waits for the store no longer than
        `read_timeout_s`. Raises NoSuchLedger, RowsLost, DataUnavailable when no bookie responds,
        Unauthorized.
        """
        if self.record.closed:
            return True
        loop, config = asyncio.get_running_loop(), self.cluster.config
        began, looking = loop.time(), loop.create_task(self._look())
        try:
            responded = await _outcome_by(began + config.speculative_read_delay_s, looking)
            if responded is None:
                responded = await self._ask_beside(looking, began + config.read_timeout_s)
            elif not self.record.closed:
                await self.ask_lac()
            return bool(responded)
        finally:
            if not looking.cancel() and not looking.cancelled():
                looking.exception()  # retrieved, also if this call was cancelled in the same moment

    async def _ask_beside(self, looking: "asyncio.Task[bool]", deadline: float) -> bool | None:
        """Ask the bookies while the store does not respond, by a record that may turn out old;
        whether the store has responded, None if it has not by the deadline."""
        asked, failure = self.record.last_fragment, None
        try:
            await self.ask_lac()
        except LedgerError as unheard:
            failure = unheard
        responded = await _outcome_by(deadline, looking)
        if not self.record.closed and self.record.last_fragment != asked:
            await self.ask_lac()
        elif not self.record.closed and failure is not None:
            raise failure
        return responded

    async def _look(self) -> bool:
        """Read the record again; False when the store does not respond."""
        try:
            await self.reread()
        except Unavailable:
            return False
        return True

    async def ask_lac(self) -> None:
        """Ask the bookies of the last fragment until those that responded cover it. Then the LAC is
        not below any LAC that an entry's header carried before this call, and `last_taken` is not
        below any entry that was acknowledged before it.

        Once other bookies have responded, the call does not wait for those that lately did not.
        Raises DataUnavailable when no bookie responds, Unauthorized.
        """
        ensemble = self.record.last_fragment.ensemble
        suspects = self.cluster.bookies.quarantine.suspects()
        hopeless = sum(1 << slot for slot, bookie in enumerate(ensemble) if bookie in suspects)
        requests = [
            self.cluster.bookies.read_lac(bookie, self.ledger_id, token=self.token)
            for bookie in ensemble
        ]
        silent, refused = (1 << len(ensemble)) - 1, {}
        async with aclosing(as_responded(requests)) as responses:
            async for slot, response in responses:
                if meaning(response.status) is Meaning.UNKNOWN:
                    refused[ensemble[slot]] = response
                    hopeless |= 1 << slot
                else:
                    silent &= ~(1 << slot)
                    self.heard(response.last_add_confirmed)
                    self.last_taken = max(self.last_taken, response.taken - 1)
                heard_some = silent.bit_count() < len(ensemble)
                if self.quorum.covered(silent) or (heard_some and not silent & ~hopeless):
                    return
        raise self.no_lac(refused)

    def no_lac(self, refused: dict[str, ReadLacResponse]) -> LedgerError:
        """The error when no bookie responds with a LAC. Unauthorized if so many bookies refuse the
        token that damage of a few is not the cause."""
        why = self.cluster.explained({bookie: say(refused[bookie]) for bookie in sorted(refused)})
        refusing = [response.status for response in refused.values()].count(Status.UNAUTHORIZED)
        if refusing >= self.quorum.ack_quorum:
            text = f"the password of ledger {self.ledger_id} is another: {why}"
            return Unauthorized(text, ledger_id=self.ledger_id)
        text = f"no bookie answers with the last entry of ledger {self.ledger_id}: {why}"
        return DataUnavailable(text, ledger_id=self.ledger_id)

    def _adopt(self, versioned: VersionedRecord) -> None:
        if versioned.version < self.version:
            return
        end = versioned.record.last_entry
        if end is not None and end < self._lac:
            raise RowsLost(
                f"ledger {self.ledger_id} is closed at entry {end}, but entries up to"
                f" {self._lac} were confirmed",
                "Restore the disks of its bookies; entries after its end are gone until then.",
                ledger_id=self.ledger_id,
                last_entry=end,
                last_add_confirmed=self._lac,
            )
        self._versioned = versioned


async def _outcome_by(deadline: float, looking: "asyncio.Task[bool]") -> bool | None:
    """The result of `looking`; None if it has not returned by the deadline, and goes on."""
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(looking)
    except TimeoutError:
        return None


Entries = AsyncGenerator[tuple[int, Entry], None]


class EntryStream:
    """(entry id, checked entry) in order; made by AsyncLedgerReader.read and tail, iterated
    once."""

    def __init__(self, first: int, begin: Callable[[int], Entries]) -> None:
        """`begin` gives the entries from an id on: called for the first entry, and again after a
        call that failed."""
        self.next_entry = first
        """The first entry that was not returned yet."""
        self._begin = begin
        self._entries: Entries | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Entry]:
        """The next entry. Raises what the method that made the stream raises."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        try:
            numbered = await anext(self._entries)
        except StopAsyncIteration:
            raise
        except BaseException:
            self._entries = None  # it is over, which would look like the end of the ledger
            raise
        self.next_entry = numbered[0] + 1
        return numbered

    async def aclose(self) -> None:
        """End the stream before its last entry and give up its requests; no entry comes after
        it."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        await self._entries.aclose()


PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 1.0  # between requests to a bookie that does not respond
WAIT_S_MAX = 60.0  # the longest that a bookie lets a request wait


@dataclass(slots=True)
class LacResponses:
    """Which bookies responded while one caller waited, and which did not."""

    responded: bool = False
    refused: dict[str, ReadLacResponse] = field(default_factory=dict)


class News:
    """Waits for news of one ledger, for any number of callers; keeps one watch on its record."""

    def __init__(self, view: LedgerView) -> None:
        self._cluster = view.cluster
        self._view = view
        self._must_look = asyncio.Event()  # there is a reason to look at the record
        self._doubted = False  # a bookie knows of a change that is not in our record
        self._looked_at = float("-inf")

    async def wait_beyond(self, after: int, timeout_s: float) -> None:
        """Return when more than entry `after` is confirmed or the ledger is closed, or after
        `timeout_s`.

        Raises NoSuchLedger, RowsLost, Unauthorized; DataUnavailable when in all that time every
        bookie that was asked failed to respond.
        """
        loop = asyncio.get_running_loop()
        deadline, heard = loop.time() + timeout_s, LacResponses()
        while not self._view.record.closed and self._view.last_add_confirmed <= after:
            if loop.time() >= deadline:
                members = self._view.record.last_fragment.ensemble
                if not heard.responded and all(bookie in heard.refused for bookie in members):
                    raise self._view.no_lac(heard.refused)
                return
            await self._listen_to_all(after, deadline, heard)

    async def _listen_to_all(self, after: int, deadline: float, heard: LacResponses) -> None:
        """Return at the first news: of entries, or of a new version of the record."""
        members = self._view.record.last_fragment.ensemble
        listening = [self._listen(bookie, after, deadline, heard) for bookie in members]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await first_of([*listening, self._follow_record()])

    # -- the bookies ----------------------------------------------------------------------------

    async def _listen(self, bookie: str, after: int, deadline: float, heard: LacResponses) -> None:
        """Ask one bookie until entries beyond `after` are known to be confirmed."""
        view, loop, pause_s = self._view, asyncio.get_running_loop(), PAUSE_MIN_S
        while (lac := view.last_add_confirmed) <= after:
            began = loop.time()
            wait_s = min(self._cluster.config.long_poll_s, WAIT_S_MAX, deadline - began)
            response = await self._cluster.bookies.read_lac(
                *(bookie, view.ledger_id),
                token=view.token,
                previous_lac=lac,
                wait_ms=max(1, int(wait_s * 1000)),
            )
            if response.status is not Status.OK:
                self._refused(bookie, response, heard)
            else:
                heard.responded = True
                view.heard(response.last_add_confirmed)
                if response.last_add_confirmed > lac or loop.time() - began >= wait_s / 2:
                    pause_s = PAUSE_MIN_S
                    continue
                self._doubt()  # the bookie responded early, and has nothing new
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _refused(self, bookie: str, response: ReadLacResponse, heard: LacResponses) -> None:
        heard.refused[bookie] = response
        statuses = [refusal.status for refusal in heard.refused.values()]
        if statuses.count(Status.UNAUTHORIZED) >= self._view.quorum.ack_quorum:
            raise self._view.no_lac(heard.refused)
        if response.status is Status.LEDGER_DELETED:
            self._doubt()

    def _doubt(self) -> None:
        """A bookie responded early without news, most likely after a fence: if our record is OPEN,
        it may be old."""
        if self._view.record.state is RecordState.OPEN:
            self._doubted = True
            self._must_look.set()

    # -- the record -----------------------------------------------------------------------------

    async def _follow_record(self) -> None:
        """Look at the record whenever there is a reason, until its version changes."""
        version = self._view.version
        while self._view.version == version:
            await self._reason()
            await self._look()
        self._must_look.set()  # other waiting calls look, too

    async def _reason(self) -> None:
        """Return when there is a reason to look, or the time for the next look has come; the first
        time at once, to set the watch."""
        period_s = self._cluster.config.long_poll_s
        if self._view.record.state is RecordState.IN_RECOVERY:
            period_s = min(period_s, PAUSE_MAX_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._looked_at + period_s):
                await self._must_look.wait()

    async def _look(self) -> None:
        """Read the record; after a sync if an old record would mislead: it is about to change."""
        doubted, must_look = self._doubted, self._must_look.is_set()
        fresh = doubted or self._view.record.state is RecordState.IN_RECOVERY
        self._doubted = False
        self._must_look.clear()
        self._looked_at = asyncio.get_running_loop().time()
        try:
            with suppress(Unavailable):
                await self._view.reread(fresh=fresh, watch=self._must_look.set)
        except asyncio.CancelledError:  # entries came first: the reason to look still holds
            self._doubted = self._doubted or doubted
            if must_look:
                self._must_look.set()
            raise


async def first_of(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run all until one ends, and cancel the rest; if that one failed, raise its error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for ended in asyncio.as_completed(tasks):
            return await ended
    finally:
        await cancel(*tasks)
