"""What a reader knows of its ledger, the record and how far entries are confirmed (`LedgerView`);
and how it hears of more while the ledger is being written (`News`):

    LAC > what is known (an add, or the writer's explicit LAC)  -> read on
    a fence, a changed record                                   -> read the record again
    CLOSED, and everything returned                             -> the end

Always true of what is known: record and LAC only move forward, however old what is heard is. What
is known to be confirmed is a lower bound of what is: -1 (NO_ENTRY) does not mean that nothing was
written, and only a CLOSED record says where the ledger ends. A closed ledger that ends before an
entry that was confirmed has lost entries; that is said loudly, never adopted.

Always true of the waiting:
- all members of the last fragment are asked at once (one write set alone may not hear of an add to
  another); each is asked again when it has nothing new, and after a pause when it does not respond;
- the record is watched, and read again when a bookie wakes us without news, and now and then (a
  watch can be missed): only a CLOSED record ends a stream, never a last add confirmed, -1 or other;
- a reason to look at the record stays until a look has ended: entries that come first end it early;
- while bookies respond, a metadata store that does not is no error;
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
from spark_ledger.metadata.ledger_record import LedgerRecord, LedgerState
from spark_ledger.metadata.store import Watcher


class LedgerView:
    """One ledger as one reader sees it; shared by the parts of that reader."""

    def __init__(self, cluster: Cluster, known: VersionedRecord, token: bytes) -> None:
        record = known.record
        self.ledger_id = record.ledger_id
        self.token = token
        self.quorum = Quorum.of(record)
        self.cluster = cluster
        self._known = known
        self._lac = NO_ENTRY
        self.last_taken = NO_ENTRY
        """The last entry that a bookie said it took when it was asked, confirmed or not."""

    @property
    def record(self) -> LedgerRecord:
        return self._known.record

    @property
    def version(self) -> int:
        return self._known.version

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be confirmed; of a closed ledger, its last entry."""
        end = self.record.last_entry
        return self._lac if end is None else end

    def heard(self, lac: int) -> None:
        """A bookie says that entries up to `lac` are confirmed."""
        self._lac = max(self._lac, lac)

    # -- asking -------------------------------------------------------------------------------

    async def reread(self, *, fresh: bool = False, watch: Watcher | None = None) -> None:
        """Read the record again; with `fresh` after a sync, so that it is no older than this call.

        Raises NoSuchLedger (after a sync always), Unavailable, RowsLost.
        """
        records = self.cluster.records
        try:
            found = await records.read(self.ledger_id, fresh=fresh, watch=watch)
        except NoSuchLedger:
            if fresh:
                raise
            found = await records.read(self.ledger_id, fresh=True, watch=watch)
        self._adopt(found)

    async def refresh(self) -> bool:
        """Ask the record and, of an open ledger, the bookies; whether the store responded.

        A metadata store that does not respond keeps nobody from hearing the bookies: they are
        asked at its side when it takes longer than `speculative_read_delay_s`, and it is waited
        for no longer than `read_timeout_s`. Raises NoSuchLedger, RowsLost, DataUnavailable when
        no bookie responds, Unauthorized.
        """
        if self.record.closed:
            return True
        loop, config = asyncio.get_running_loop(), self.cluster.config
        began, looking = loop.time(), loop.create_task(self._look())
        try:
            told = await _told_by(began + config.speculative_read_delay_s, looking)
            if told is None:
                told = await self._ask_beside(looking, began + config.read_timeout_s)
            elif not self.record.closed:
                await self.ask_lac()
            return bool(told)
        finally:
            if not looking.cancel() and not looking.cancelled():
                looking.exception()  # met, also when we were cancelled in the same moment

    async def _ask_beside(self, looking: "asyncio.Task[bool]", deadline: float) -> bool | None:
        """Ask the bookies while the store does not respond, for what may turn out an old record."""
        asked, failure = self.record.last_fragment, None
        try:
            await self.ask_lac()
        except LedgerError as unheard:
            failure = unheard
        told = await _told_by(deadline, looking)
        if not self.record.closed and self.record.last_fragment != asked:
            await self.ask_lac()
        elif not self.record.closed and failure is not None:
            raise failure
        return told

    async def _look(self) -> bool:
        """Read the record again; False when the store does not respond."""
        try:
            await self.reread()
        except Unavailable:
            return False
        return True

    async def ask_lac(self) -> None:
        """Hear the bookies of the last fragment until they cover it: then nothing that was
        confirmed before this call by a later entry's header is missed, and `last_taken` is not
        below any entry that was acknowledged before it.

        Bookies that lately did not respond are not waited for, once others have. Raises
        DataUnavailable when no bookie responds, Unauthorized.
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
        raise self.nobody_tells(refused)

    def nobody_tells(self, refused: dict[str, ReadLacResponse]) -> LedgerError:
        """The error when no bookie says how far the ledger goes. Unauthorized if so many refuse
        the token that it cannot be the damage of a few."""
        said = self.cluster.told({bookie: say(refused[bookie]) for bookie in sorted(refused)})
        refusing = [response.status for response in refused.values()].count(Status.UNAUTHORIZED)
        if refusing >= self.quorum.ack_quorum:
            text = f"the password of ledger {self.ledger_id} is another: {said}"
            return Unauthorized(text, ledger_id=self.ledger_id)
        text = f"no bookie tells how far ledger {self.ledger_id} goes: {said}"
        return DataUnavailable(text, ledger_id=self.ledger_id)

    def _adopt(self, found: VersionedRecord) -> None:
        if found.version < self.version:
            return
        end = found.record.last_entry
        if end is not None and end < self._lac:
            raise RowsLost(
                f"ledger {self.ledger_id} is closed at entry {end}, but entries up to"
                f" {self._lac} were confirmed",
                "Restore the disks of its bookies; entries after its end are gone until then.",
                ledger_id=self.ledger_id,
                last_entry=end,
                last_add_confirmed=self._lac,
            )
        self._known = found


async def _told_by(deadline: float, looking: "asyncio.Task[bool]") -> bool | None:
    """What `looking` returns; None when it has not by the deadline, and goes on."""
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
        """`begin` gives the entries from one on: called at first, and after a call that failed."""
        self.next_entry = first
        """The first entry that was not returned."""
        self._begin = begin
        self._entries: Entries | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Entry]:
        """The next entry. Raises what the method says that made the stream."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        try:
            found = await anext(self._entries)
        except StopAsyncIteration:
            raise
        except BaseException:
            self._entries = None  # it is over, which would look like the end of the ledger
            raise
        self.next_entry = found[0] + 1
        return found

    async def aclose(self) -> None:
        """Give up what is under way, without reading to the end; nothing comes after it."""
        if self._entries is None:
            self._entries = self._begin(self.next_entry)
        await self._entries.aclose()


PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 1.0  # between requests to a bookie that does not respond
WAIT_S_MAX = 60.0  # the longest that a bookie lets a request wait


@dataclass(slots=True)
class Heard:
    """Which bookies responded while one caller waited, and which did not."""

    responded: bool = False
    refused: dict[str, ReadLacResponse] = field(default_factory=dict)


class News:
    """Waits for news of one ledger, for any number of callers; keeps one watch on its record."""

    def __init__(self, view: LedgerView) -> None:
        self._cluster = view.cluster
        self._view = view
        self._told = asyncio.Event()  # there is a reason to look at the record
        self._doubted = False  # a bookie knows of something that our record does not tell
        self._looked_at = float("-inf")

    async def wait_beyond(self, after: int, timeout_s: float) -> None:
        """Return when more than entry `after` is confirmed or the ledger is closed, or after
        `timeout_s`.

        Raises NoSuchLedger, RowsLost, Unauthorized; DataUnavailable when in all that time every
        bookie that was asked failed to respond.
        """
        loop = asyncio.get_running_loop()
        deadline, heard = loop.time() + timeout_s, Heard()
        while not self._view.record.closed and self._view.last_add_confirmed <= after:
            if loop.time() >= deadline:
                members = self._view.record.last_fragment.ensemble
                if not heard.responded and all(bookie in heard.refused for bookie in members):
                    raise self._view.nobody_tells(heard.refused)
                return
            await self._listen_to_all(after, deadline, heard)

    async def _listen_to_all(self, after: int, deadline: float, heard: Heard) -> None:
        """Return at the first news: of entries, or of a new version of the record."""
        members = self._view.record.last_fragment.ensemble
        listening = [self._listen(bookie, after, deadline, heard) for bookie in members]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await first_of([*listening, self._follow_record()])

    # -- the bookies ----------------------------------------------------------------------------

    async def _listen(self, bookie: str, after: int, deadline: float, heard: Heard) -> None:
        """Ask one bookie until entries beyond `after` are known to be confirmed."""
        view, loop, pause_s = self._view, asyncio.get_running_loop(), PAUSE_MIN_S
        while (known := view.last_add_confirmed) <= after:
            began = loop.time()
            wait_s = min(self._cluster.config.long_poll_s, WAIT_S_MAX, deadline - began)
            response = await self._cluster.bookies.read_lac(
                *(bookie, view.ledger_id),
                token=view.token,
                previous_lac=known,
                wait_ms=max(1, int(wait_s * 1000)),
            )
            if response.status is not Status.OK:
                self._refused(bookie, response, heard)
            else:
                heard.responded = True
                view.heard(response.last_add_confirmed)
                if response.last_add_confirmed > known or loop.time() - began >= wait_s / 2:
                    pause_s = PAUSE_MIN_S
                    continue
                self._doubt()  # it did not make us wait, and has nothing new
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _refused(self, bookie: str, response: ReadLacResponse, heard: Heard) -> None:
        heard.refused[bookie] = response
        said = [refusal.status for refusal in heard.refused.values()]
        if said.count(Status.UNAUTHORIZED) >= self._view.quorum.ack_quorum:
            raise self._view.nobody_tells(heard.refused)
        if response.status is Status.LEDGER_DELETED:
            self._doubt()

    def _doubt(self) -> None:
        """Woken without news: by a fence, most likely. An open record may be an old one."""
        if self._view.record.state is LedgerState.OPEN:
            self._doubted = True
            self._told.set()

    # -- the record -----------------------------------------------------------------------------

    async def _follow_record(self) -> None:
        """Look at the record whenever there is a reason, until it is another one."""
        version = self._view.version
        while self._view.version == version:
            await self._reason()
            await self._look()
        self._told.set()  # other waiting calls look, too

    async def _reason(self) -> None:
        """Return when we are told of a reason to look, or it is time to; the first time at once,
        to set the watch."""
        period_s = self._cluster.config.long_poll_s
        if self._view.record.state is LedgerState.IN_RECOVERY:
            period_s = min(period_s, PAUSE_MAX_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._looked_at + period_s):
                await self._told.wait()

    async def _look(self) -> None:
        """Read the record; after a sync where an old one would mislead: it is about to change."""
        doubted, told = self._doubted, self._told.is_set()
        fresh = doubted or self._view.record.state is LedgerState.IN_RECOVERY
        self._doubted = False
        self._told.clear()
        self._looked_at = asyncio.get_running_loop().time()
        try:
            with suppress(Unavailable):
                await self._view.reread(fresh=fresh, watch=self._on_change)
        except asyncio.CancelledError:  # entries came first: the reason to look is there still
            self._doubted = self._doubted or doubted
            if told:
                self._told.set()
            raise

    def _on_change(self) -> None:
        self._told.set()


async def first_of(work: list[Coroutine[Any, Any, None]]) -> None:
    """Run all until one ends, or fails: then raise its error. The rest are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for ended in asyncio.as_completed(tasks):
            return await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
