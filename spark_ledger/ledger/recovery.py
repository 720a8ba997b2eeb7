"""Recovery: fence a ledger, find its end, make the end durable, close it.

    mark IN_RECOVERY -> fence the bookies of the last fragment, which respond with their LACs
    -> read on from there, fencing, and write back the entries found -> CLOSED

Always true:
- nothing is decided before fewer than Qa members of every write set are silent;
- reads go to the last fragment as the store had it when recovery began, writes to the present
  ensemble; ensemble changes stay in memory until the one closing compare-and-set;
- an entry is recovered on one positive response; the end is found on Qw - Qa + 1 negatives, or when
  the whole write set has responded and each member that did not deny the entry lacks it after a
  torn tail; if neither happens, recovery is given up and the ledger stays IN_RECOVERY;
- an entry that is written back carries the LAC as it was when recovery began; the length and the
  rows of the closed ledger come from the header of its last entry itself;
- a password that the record does not verify changes nothing, not even the record's state;
- a bookie that is declared gone for good acknowledges no further add, so it counts as fenced; its
  silence counts as the absence that a torn bookie reports, a proof only together with the whole
  write set;
- an attempt that could not be decided is followed by another, from the record as it is by then
  (another recoverer may have closed it), until the time is over.
Any number of recoverers may run, crash and overlap: the rest adopt the first close.
"""

import asyncio
from collections.abc import Mapping, Set
from contextlib import aclosing

from bookie_server.api.codec import encode_add
from bookie_server.api.entry import NO_ENTRY, Buffer, Entry, pack_header
from bookie_server.api.messages import Add, ReadResponse
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.errors import (
    DataUnavailable,
    LedgerError,
    NotEnoughBookies,
    TimedOut,
    Unauthorized,
)
from spark_ledger.ledger import transitions
from spark_ledger.ledger.add_pipeline import AddPipeline
from spark_ledger.ledger.cluster import (
    Cluster,
    DeliveryFailure,
    judge_response,
    responses_on_arrival,
)
from spark_ledger.ledger.ensemble_change import EnsembleChange
from spark_ledger.ledger.quorum import PendingAdd, Quorum, Verdict, recovery_verdict
from spark_ledger.ledger.records import MoveRefused, VersionedRecord
from spark_ledger.ledger.transitions import LastEntry
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens, allows

WINDOW_FIRST, WINDOW_MAX = 16, 512
LATE_POSITIVE_S = 1.0  # with enough negatives: the wait for a positive among late responses
LAST_RESPONSES_S = 1.0  # the longest wait of a recovery for the responses to confirmed adds
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 3.0  # between attempts
ENTRY_ID_MAX = 2**63 - 1
IF_GONE = (
    "Start the bookies named, or repair what they lost. If one will never come back:"
    " `spark-ledger ledger recover {} --gone BOOKIE_ID` (docs/protocol.md, Limbo)."
)
NO_ANSWER = DeliveryFailure(None, "no answer yet")
CUT_SHORT = DeliveryFailure(None, "the answer stops before it")


# Statuses that a second request does not change: if only these are in the way, waiting is no use.
_LASTING = (
    Status.UNAUTHORIZED,
    Status.LIMBO,
    Status.LIMBO_TORN,
    Status.BAD_DIGEST,
    Status.NO_SUCH_ENTRY,
    Status.NO_SUCH_LEDGER,
)


async def recover(
    cluster: Cluster, ledger_id: int, tokens: Tokens, gone: Set[str] = frozenset()
) -> VersionedRecord:
    """Close the ledger at its true end, whatever its writer does; returns the CLOSED record.

    `gone`: ids of bookies that, an operator declares, will never respond again: entries at the end
    that only these bookies have are given up if nothing could be decided otherwise.

    While bookies do not respond it tries again, with pauses, for recovery_timeout_s. Then it raises
    the error of the last attempt: DataUnavailable when the end cannot be decided (the ledger stays
    IN_RECOVERY, nothing is lost, try again), NotEnoughBookies. Raises Unauthorized (nothing was
    changed), NoSuchLedger, Unavailable at once.
    """
    timeout_s = cluster.config.recovery_timeout_s
    met: LedgerError = DataUnavailable(
        f"the recovery of ledger {ledger_id} did not end within {timeout_s:g} s; it stays"
        " IN_RECOVERY",
        ledger_id=ledger_id,
    )
    pause_s = PAUSE_MIN_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _attempt(cluster, ledger_id, tokens, gone)
                except (DataUnavailable, NotEnoughBookies) as failure:
                    if failure.facts.get("lasting"):
                        raise
                    met = failure
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
    except TimeoutError:
        raise met from None


async def _attempt(
    cluster: Cluster, ledger_id: int, tokens: Tokens, gone: Set[str]
) -> VersionedRecord:
    """One attempt, from the record as it is now; the closed ledger's record."""
    versioned = await cluster.records.read(ledger_id, fresh=True)
    if not tokens.repair and not allows(versioned.record.verifiers, "recover", tokens.recover):
        raise Unauthorized(f"the password of ledger {ledger_id} is another", ledger_id=ledger_id)
    versioned = await cluster.records.move(versioned, transitions.mark_in_recovery)
    if versioned.record.closed:
        return versioned
    recovery = Recovery(cluster, versioned, tokens, gone)
    try:
        return await recovery.run()
    finally:
        await recovery.stop()


class Recovery:
    """One attempt to recover one ledger that is IN_RECOVERY."""

    def __init__(
        self,
        cluster: Cluster,
        versioned: VersionedRecord,
        tokens: Tokens,
        gone: Set[str] = frozenset(),
    ) -> None:
        self._cluster = cluster
        self._versioned = versioned
        self._record = versioned.record
        self._ledger_id = versioned.record.ledger_id
        self._token = tokens.recover
        self._ensemble = versioned.record.last_fragment.ensemble  # frozen: reads go there
        self._gone = {slot for slot, bookie in enumerate(self._ensemble) if bookie in gone}
        self._quorum = Quorum.of(versioned.record)
        self._pipeline: AddPipeline | None = None
        self._change: EnsembleChange | None = None

    async def run(self) -> VersionedRecord:
        lac = await self._fence()
        start = max(lac, self._record.last_fragment.first_entry - 1)
        pipeline = self._begin_writing_back(start)
        await self._write_back_tail(pipeline, start)
        last = pipeline.pending.last_add_confirmed
        end = LastEntry(last, pipeline.confirmed_bytes, pipeline.confirmed_rows)
        if last == start:
            end = await self._end_at(start)
        return await self._close(pipeline, end)

    async def stop(self) -> None:
        """Leave nothing behind, however `run` ended."""
        self._cluster.at_close.pop(self, None)
        if self._pipeline is not None:
            self._pipeline.fail(LedgerError(f"the recovery of ledger {self._ledger_id} is over"))
        if self._change is not None:
            await self._change.stop()

    # -- fencing ------------------------------------------------------------------------------

    async def _fence(self) -> int:
        """Fence bookies of the last fragment until those that responded cover it; returns the
        highest LAC among their responses.

        Raises once the bookies that are left cannot cover it.
        """
        requests = [
            self._cluster.bookies.read_lac(bookie, self._ledger_id, fence=True, token=self._token)
            for bookie in self._ensemble
        ]
        silent, lac = (1 << len(requests)) - 1, NO_ENTRY
        lost, reasons = 0, dict[int, DeliveryFailure]()
        async with aclosing(responses_on_arrival(requests)) as responses:
            async for slot, response in responses:
                if meaning(response.status) is Meaning.UNKNOWN and slot not in self._gone:
                    reasons[slot] = DeliveryFailure.of(response)
                    lost |= 1 << slot
                    if self._quorum.covers_ensemble(lost):
                        continue
                    break
                silent &= ~(1 << slot)
                lac = max(lac, response.last_add_confirmed)
                if self._quorum.covers_ensemble(silent):
                    return lac
        raise self._undecidable("it cannot be fenced", reasons)

    # -- the tail -----------------------------------------------------------------------------

    def _begin_writing_back(self, start: int) -> AddPipeline:
        self._pipeline = AddPipeline(self._cluster, self._record, start, recovery=True)
        self._cluster.at_close[self] = self._pipeline.fail
        self._change = EnsembleChange(self._pipeline, self._change_in_memory, self._token)
        return self._pipeline

    async def _change_in_memory(
        self, failed: Mapping[int, str], replacements: Mapping[int, str], first_entry: int
    ) -> LedgerRecord:
        """The record with the change, which is not written now: other recoverers would then read
        from bookies that lack the tail."""
        assert self._pipeline is not None
        return transitions.with_replacements(self._pipeline.record, replacements, first_entry)

    async def _write_back_tail(self, pipeline: AddPipeline, start: int) -> None:
        """Read on from `start` until the end is found, and write back; on return every entry that
        was written back is confirmed."""
        next_entry, window, ended = start + 1, WINDOW_FIRST, False
        while not ended and next_entry <= ENTRY_ID_MAX:
            left = ENTRY_ID_MAX - next_entry + 1
            entries, ended = await self._read_window(next_entry, min(window, left))
            for entry in entries:
                if pipeline.failure is None:
                    pipeline.push(self._write_back(entry, start))
            next_entry += len(entries)
            window = min(2 * window, WINDOW_MAX)
            await pipeline.room()
            self._check(pipeline)
        await pipeline.drained()
        self._check(pipeline)
        await pipeline.wait_for_responses(LAST_RESPONSES_S)

    def _write_back(self, entry: Entry, frozen_lac: int) -> PendingAdd:
        header = entry.header._replace(last_add_confirmed=frozen_lac)
        parts: list[Buffer] = [pack_header(header), entry.payload]
        return PendingAdd(
            header.entry_id,
            encode_add(Add(parts, True, self._token)),
            sum(map(len, parts)),
            header.cumulative_bytes,
            header.cumulative_rows,
            asyncio.get_running_loop().time(),
        )

    def _check(self, pipeline: AddPipeline) -> None:
        failure = pipeline.failure
        if isinstance(failure, TimedOut):  # its text is for the caller of an append
            raise DataUnavailable(
                f"ledger {self._ledger_id} stays IN_RECOVERY: its tail cannot be written back;"
                f" {failure.what}",
                ledger_id=self._ledger_id,
            )
        if failure is not None:
            raise failure

    async def _read_window(self, first: int, window: int) -> tuple[list[Entry], bool]:
        """Entries from `first` on that are to be recovered, and whether the end comes after them.

        At least one entry, or the end; raises DataUnavailable if neither can be decided.
        """
        requests = [
            self._cluster.bookies.read(
                *(bookie, self._ledger_id, first, first + window - 1),
                max_bytes=self._cluster.config.read_request_bytes,
                fence=True,
                token=self._token,
            )
            for bookie in self._ensemble
        ]
        tail = TailWindow(self._quorum, self._ledger_id, first, window, self._gone)
        late: float | None = None  # until when a positive may still come
        async with aclosing(responses_on_arrival(requests)) as responses:
            while True:
                if tail.ended and late is None:
                    late = asyncio.get_running_loop().time() + LATE_POSITIVE_S
                try:
                    async with asyncio.timeout_at(late if tail.ended else None):
                        slot, response = await anext(responses)
                except (StopAsyncIteration, TimeoutError):
                    break
                tail.heard(slot, response)
                if tail.decided:
                    break
        if not tail.found and not tail.ended:
            raise self._undecidable(f"entry {first} cannot be decided", tail.reasons())
        return tail.found, tail.ended

    # -- closing ------------------------------------------------------------------------------

    async def _end_at(self, last: int) -> LastEntry:
        """The end of the ledger when `last` was confirmed already: its header has the counts."""
        if last == NO_ENTRY:
            return LastEntry(NO_ENTRY, 0, 0)
        ensemble = self._record.fragment_of(last).ensemble
        slots = self._quorum.write_set(last)
        requests = [
            self._cluster.bookies.read(
                *(ensemble[slot], self._ledger_id, last, last),
                max_bytes=self._cluster.config.read_request_bytes,
                token=self._token,
            )
            for slot in slots
        ]
        reasons: dict[int, DeliveryFailure] = {}
        async with aclosing(responses_on_arrival(requests)) as responses:
            async for index, response in responses:
                judged = judge_response(response, self._ledger_id, 0, last)
                delivered = CUT_SHORT if judged is None else judged[1]
                if isinstance(delivered, Entry):
                    header = delivered.header
                    return LastEntry(last, header.cumulative_bytes, header.cumulative_rows)
                reasons[slots[index]] = delivered
        raise self._undecidable(f"its last entry {last} cannot be read", reasons, ensemble)

    async def _close(self, pipeline: AddPipeline, end: LastEntry) -> VersionedRecord:
        began = self._record.last_fragment
        tail = pipeline.record.fragments[len(self._record.fragments) - 1 :]
        try:
            return await self._cluster.records.move(
                self._versioned,
                lambda record: transitions.close_recovered(record, began, tail, end),
            )
        except MoveRefused as refused:
            raise LedgerError(
                f"ledger {self._ledger_id} cannot be closed after recovery: {refused.why}"
            ) from refused

    def _undecidable(
        self,
        what: str,
        reasons: Mapping[int, DeliveryFailure],
        ensemble: tuple[str, ...] | None = None,
    ) -> LedgerError:
        """The error when recovery cannot go on. It is `lasting`, not worth another attempt, if each
        bookie in the way would respond in the same way again. Unauthorized if so many bookies
        refuse the password, which the record verified, that damage of a few is not the cause.
        """
        members = ensemble or self._ensemble
        why = {members[slot]: reasons[slot].text for slot in sorted(reasons)}
        text = (
            f"ledger {self._ledger_id} stays IN_RECOVERY: {what}; {self._cluster.reasons_text(why)}"
        )
        statuses = [reason.status for reason in reasons.values()]
        if statuses.count(Status.UNAUTHORIZED) >= self._quorum.ack_quorum:
            return Unauthorized(text, ledger_id=self._ledger_id)
        lasting = bool(statuses) and all(status in _LASTING for status in statuses)
        remedy = IF_GONE.format(self._ledger_id) if Status.LIMBO_TORN in statuses else None
        return DataUnavailable(text, remedy, ledger_id=self._ledger_id, lasting=lasting)


class TailWindow:
    """Judges, entry by entry and in order, the responses to one ranged recovery read.

    `found`: the entries to recover. `ended`: the ledger ends after them. `decided`: further
    responses would change nothing that matters.
    """

    def __init__(
        self,
        quorum: Quorum,
        ledger_id: int,
        first: int,
        window: int,
        gone: Set[int] = frozenset(),
    ) -> None:
        self.found: list[Entry] = []
        self.ended = False
        self.decided = False
        self._quorum = quorum
        self._ledger_id = ledger_id
        self._first = first
        self._window = window
        self._gone = gone
        self._responses: dict[int, ReadResponse] = {}

    def heard(self, slot: int, response: ReadResponse) -> None:
        """Take the response of the bookie in `slot`, and decide as many entries as possible."""
        self._responses[slot] = response
        self.ended = False
        while len(self.found) < self._window:
            if not self._decide(self._first + len(self.found)):
                return
        self.decided = True

    def _decide(self, entry_id: int) -> bool:
        """Decide one entry; whether the next may be looked at."""
        judged = [self._judged(slot, entry_id) for slot in self._quorum.write_set(entry_id)]
        positives = [entry for _, entry in judged if isinstance(entry, Entry)]
        verdict = recovery_verdict(self._quorum, [response for response, _ in judged])
        if verdict is Verdict.RECOVER:
            self.found.append(positives[0])
            return True
        cut_short = any(why is CUT_SHORT for _, why in judged)
        self.ended = verdict is Verdict.ABSENT
        self.decided = all(response is not None for response, _ in judged) or (
            bool(self.found) and cut_short and not self.ended
        )
        return False

    def _judged(self, slot: int, entry_id: int) -> tuple[Meaning | None, Entry | DeliveryFailure]:
        response = self._responses.get(slot)
        if response is None:
            return None, NO_ANSWER
        judged = judge_response(response, self._ledger_id, entry_id - self._first, entry_id)
        if judged is None:
            return Meaning.UNKNOWN, CUT_SHORT
        if judged[0] is Meaning.UNKNOWN and slot in self._gone:
            return Meaning.TORN, judged[1]
        return judged

    def reasons(self) -> dict[int, DeliveryFailure]:
        """Why each member of the first entry's write set did not deliver that entry, by slot."""
        reasons = {}
        for slot in self._quorum.write_set(self._first):
            why = self._judged(slot, self._first)[1]
            if not isinstance(why, Entry):
                reasons[slot] = why
        return reasons
