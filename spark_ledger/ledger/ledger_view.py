"""What a reader has learned of its ledger: the record, and how far entries are confirmed
(`LedgerView`); and how it learns of further entries of an open ledger (`NewsListener`):

    a LAC above the known LAC (an add, or an explicit LAC)  -> the reader reads on
    a fence, a changed record                               -> it reads the record again
    the record is CLOSED, every entry was returned          -> the read ends

Always true of `LedgerView`: record and LAC (last add confirmed) never go back, however old a
response is. The known LAC is a lower bound of what is confirmed: -1 (NO_ENTRY) does not mean that
the ledger is empty. Only a CLOSED record gives the ledger's end. A record that closes the ledger
below the known LAC shows that entries are lost: the reader raises RowsLost and never adopts it.

Always true of `NewsListener`:
- all members of the last fragment are asked at once, because the bookies of one write set do not
  learn of an add to another write set. A bookie without news is asked again at once, a bookie that
  does not respond after a pause;
- the record is watched. As a watch can be missed, the record is also read again now and then, and
  when a bookie responds early without news. Only a CLOSED record ends a stream, never a LAC;
- if entries arrive while the record is being read, that read is cancelled and done later;
- while bookies respond, a metadata store that does not respond is no error;
- when the wait ends, every open request is cancelled. The bookie drops the request at once or, if
  the cancellation is lost, when `wait_ms` is over.
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
from spark_ledger.ledger.cluster import Cluster, responses_on_arrival, status_text
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
        """The last entry that any bookie had when it was asked, confirmed or not."""

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

    def note_lac(self, lac: int) -> None:
        """Note that entries up to `lac` are confirmed, by a bookie's response."""
        self._lac = max(self._lac, lac)

    # -- asking -------------------------------------------------------------------------------

    async def reread(self, *, fresh: bool = False, watch: Watcher | None = None) -> None:
        """Read the record again; with `fresh` after a sync, so that it is no older than this call.

        Raises NoSuchLedger (only after a sync), Unavailable, RowsLost.
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
        """Read the record and, if the ledger is open, ask the bookies. Returns whether the metadata
        store responded within `read_timeout_s`; if it takes longer than `speculative_read_delay_s`,
        the bookies are asked meanwhile.

        Raises NoSuchLedger, RowsLost, DataUnavailable when no bookie responds, Unauthorized.
        """
        if self.record.closed:
            return True
        loop, config = asyncio.get_running_loop(), self.cluster.config
        began, look_task = loop.time(), loop.create_task(self._look())
        try:
            responded = await _outcome_by(began + config.speculative_read_delay_s, look_task)
            if responded is None:
                responded = await self._ask_beside(look_task, began + config.read_timeout_s)
            elif not self.record.closed:
                await self.ask_lac()
            return bool(responded)
        finally:
            if not look_task.cancel() and not look_task.cancelled():
                look_task.exception()  # so that asyncio does not report it as never retrieved

    async def _ask_beside(self, look_task: "asyncio.Task[bool]", deadline: float) -> bool | None:
        """Ask the bookies of the known record while the store does not respond. If the store's
        record then names other bookies, ask these too. Returns the result of `look_task`; None if
        it has none by the deadline."""
        asked, failure = self.record.last_fragment, None
        try:
            await self.ask_lac()
        except LedgerError as error:
            failure = error
        responded = await _outcome_by(deadline, look_task)
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
        """Ask the bookies of the last fragment until the responses cover the ensemble
        (`Quorum.covers_ensemble`). Then the LAC is at least the highest LAC that an entry's header
        carried before this call, and `last_taken` is at least the highest entry that was
        acknowledged before this call.

        After any bookie has responded, the call does not wait for suspects. Raises DataUnavailable
        when no bookie responds, Unauthorized.
        """
        ensemble = self.record.last_fragment.ensemble
        suspects = self.cluster.bookies.quarantine.suspects()
        doubtful = sum(1 << slot for slot, bookie in enumerate(ensemble) if bookie in suspects)
        requests = [
            self.cluster.bookies.read_lac(bookie, self.ledger_id, token=self.token)
            for bookie in ensemble
        ]
        silent, refusals = (1 << len(ensemble)) - 1, {}
        async with aclosing(responses_on_arrival(requests)) as responses:
            async for slot, response in responses:
                if meaning(response.status) is Meaning.UNKNOWN:
                    refusals[ensemble[slot]] = response
                    doubtful |= 1 << slot
                else:
                    silent &= ~(1 << slot)
                    self.note_lac(response.last_add_confirmed)
                    self.last_taken = max(self.last_taken, response.taken - 1)
                any_responded = silent.bit_count() < len(ensemble)
                if self.quorum.covers_ensemble(silent) or (
                    any_responded and not silent & ~doubtful
                ):
                    return
        raise self.no_lac_error(refusals)

    def no_lac_error(self, refusals: dict[str, ReadLacResponse]) -> LedgerError:
        """The error when no bookie responds with a LAC: Unauthorized only if an ack quorum of
        bookies refuses the token, because a few may refuse it for damage of their own."""
        why = self.cluster.reasons_text(
            {bookie: status_text(refusals[bookie]) for bookie in sorted(refusals)}
        )
        refusing = [response.status for response in refusals.values()].count(Status.UNAUTHORIZED)
        if refusing >= self.quorum.ack_quorum:
            text = f"wrong password for ledger {self.ledger_id}: {why}"
            return Unauthorized(text, ledger_id=self.ledger_id)
        text = f"no bookie responds with the last entry of ledger {self.ledger_id}: {why}"
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


async def _outcome_by(deadline: float, look_task: "asyncio.Task[bool]") -> bool | None:
    """The result of `look_task`; None if the task is still under way at the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(look_task)
    except TimeoutError:
        return None


NumberedEntries = AsyncGenerator[tuple[int, Entry], None]


class EntryStream:
    """(entry id, checked entry) in order; made by AsyncLedgerReader.read and tail, iterated
    once."""

    def __init__(self, first: int, begin: Callable[[int], NumberedEntries]) -> None:
        """`begin(entry_id)` gives the entries from that id on. It is called for the first entry,
        and again after a failure."""
        self.next_entry = first
        """The first entry that was not returned yet."""
        self._begin = begin
        self._entries: NumberedEntries | None = None

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
            self._entries = None  # a generator that raised is at its end, but the ledger is not
            raise
        self.next_entry = numbered[0] + 1
        return numbered

    async def aclose(self) -> None:
        """End the stream and give up its requests."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        await self._entries.aclose()


PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 1.0  # between requests to a bookie that does not respond
WAIT_S_MAX = 60.0  # the longest that a bookie lets a request wait


@dataclass(slots=True)
class LacResponses:
    """Whether a bookie responded with a LAC while one caller waited, and, by bookie id, the
    responses that had none."""

    has_response: bool = False
    refusals: dict[str, ReadLacResponse] = field(default_factory=dict)


class NewsListener:
    """Waits for news of one ledger (a LAC, a changed record), for any number of callers; keeps one
    watch on the record."""

    def __init__(self, view: LedgerView) -> None:
        self._cluster = view.cluster
        self._view = view
        self._must_look = asyncio.Event()  # there is a reason to read the record
        self._is_record_doubted = False  # a bookie's response suggests that the record changed
        self._looked_at = float("-inf")

    async def wait_beyond(self, after: int, timeout_s: float) -> None:
        """Return when an entry after `after` is confirmed or the ledger is closed, or after
        `timeout_s`.

        Raises NoSuchLedger, RowsLost, Unauthorized; DataUnavailable if no bookie responds with a
        LAC in that time.
        """
        loop = asyncio.get_running_loop()
        deadline, lac_responses = loop.time() + timeout_s, LacResponses()
        while not self._view.record.closed and self._view.last_add_confirmed <= after:
            if loop.time() >= deadline:
                members = self._view.record.last_fragment.ensemble
                if not lac_responses.has_response and all(
                    bookie in lac_responses.refusals for bookie in members
                ):
                    raise self._view.no_lac_error(lac_responses.refusals)
                return
            await self._listen_to_all(after, deadline, lac_responses)

    async def _listen_to_all(
        self, after: int, deadline: float, lac_responses: LacResponses
    ) -> None:
        """Return when an entry after `after` is confirmed or the record has a new version."""
        members = self._view.record.last_fragment.ensemble
        listening = [self._listen(bookie, after, deadline, lac_responses) for bookie in members]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await run_until_one_ends([*listening, self._follow_record()])

    # -- the bookies ----------------------------------------------------------------------------

    async def _listen(
        self, bookie: str, after: int, deadline: float, lac_responses: LacResponses
    ) -> None:
        """Ask one bookie until an entry after `after` is known to be confirmed."""
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
                self._note_refusal(bookie, response, lac_responses)
            else:
                lac_responses.has_response = True
                view.note_lac(response.last_add_confirmed)
                if response.last_add_confirmed > lac or loop.time() - began >= wait_s / 2:
                    pause_s = PAUSE_MIN_S
                    continue
                self._doubt_record()  # the bookie responded early, and has nothing new
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _note_refusal(
        self, bookie: str, response: ReadLacResponse, lac_responses: LacResponses
    ) -> None:
        lac_responses.refusals[bookie] = response
        statuses = [refusal.status for refusal in lac_responses.refusals.values()]
        if statuses.count(Status.UNAUTHORIZED) >= self._view.quorum.ack_quorum:
            raise self._view.no_lac_error(lac_responses.refusals)
        if response.status is Status.LEDGER_DELETED:
            self._doubt_record()

    def _doubt_record(self) -> None:
        """Read the record again if it is OPEN: a bookie responded early without news, most likely
        because a recovery fenced the ledger."""
        if self._view.record.state is RecordState.OPEN:
            self._is_record_doubted = True
            self._must_look.set()

    # -- the record -----------------------------------------------------------------------------

    async def _follow_record(self) -> None:
        """Read the record whenever there is a reason, until its version changes."""
        version = self._view.version
        while self._view.version == version:
            await self._wait_for_reason()
            await self._look()
        self._must_look.set()  # other waiting calls look, too

    async def _wait_for_reason(self) -> None:
        """Return when there is a reason to read the record, or the last read is a period ago. The
        first call returns at once, because the first read sets the watch."""
        period_s = self._cluster.config.long_poll_s
        if self._view.record.state is RecordState.IN_RECOVERY:
            period_s = min(period_s, PAUSE_MAX_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._looked_at + period_s):
                await self._must_look.wait()

    async def _look(self) -> None:
        """Read the record; after a sync if the record is about to change or may have changed."""
        doubted, must_look = self._is_record_doubted, self._must_look.is_set()
        fresh = doubted or self._view.record.state is RecordState.IN_RECOVERY
        self._is_record_doubted = False
        self._must_look.clear()
        self._looked_at = asyncio.get_running_loop().time()
        try:
            with suppress(Unavailable):
                await self._view.reread(fresh=fresh, watch=self._must_look.set)
        except asyncio.CancelledError:  # entries arrived first: read the record later
            self._is_record_doubted = self._is_record_doubted or doubted
            if must_look:
                self._must_look.set()
            raise


async def run_until_one_ends(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines until the first one ends, then cancel the others. Raises the error of the
    first one."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for ended in asyncio.as_completed(tasks):
            return await ended
    finally:
        await cancel(*tasks)
