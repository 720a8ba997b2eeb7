"""Recovery: fence a ledger, find its end, make the end durable, close it.

    mark IN_RECOVERY -> fence the bookies of the last fragment, which respond with their LACs
    -> read the entries above the highest LAC, write those back that not all members have -> CLOSED

Always true:
- recovery decides nothing until the fenced bookies cover the ensemble: fewer than Qa members of
  every write set are silent;
- reads go to the last fragment as the store had it when recovery began, and fence as well; writes
  go to the present ensemble. Ensemble changes stay in memory until the one compare-and-set that
  closes the ledger;
- one positive response recovers an entry. The ledger ends before an entry if Qw - Qa + 1 members of
  its write set are negative (they never acknowledged it), or if the whole write set has responded
  and each member is negative or torn (it lacks the entry after an unclean end). If the responses
  prove neither, the attempt fails and the ledger stays IN_RECOVERY;
- an entry is not written back if every member of its write set has responded with it, as a bookie
  sends an entry in response to a fence only once the entry is durable there;
- an entry that is written back carries the LAC as it was when recovery began; the length and the
  rows of the closed ledger come from the header of its last entry;
- a password that the record does not verify changes nothing, not even the record's state;
- a bookie that an operator declared gone counts as fenced, because it acknowledges no further add;
  for an entry, its silence counts as the response of a torn bookie;
- an attempt that cannot decide the end is followed by another attempt, which reads the record again
  (another recoverer may have closed the ledger), until `recovery_timeout_s` is over.
Any number of recoverers may run, crash and overlap: the first recoverer that closes the ledger
decides its end, and the others adopt that.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence, Set
from contextlib import aclosing
from typing import Any, NamedTuple

from bookie_server.api.codec import encode_add
from bookie_server.api.entry import NO_ENTRY, Buffer, Entry, pack_header
from bookie_server.api.messages import Add, ReadLacResponse, ReadResponse
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
TAIL_ENTRIES, TAIL_BYTES = 8, 16 * 1024
"""The last entries that are read with the fence of a ledger with small entries."""
LATE_POSITIVE_S = 1.0  # after enough negatives, the wait for a positive among the other responses
LAST_RESPONSES_S = 1.0  # the longest wait of a recovery for the responses to confirmed adds
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 3.0  # between attempts
ENTRY_ID_MAX = 2**63 - 1
REMEDY_IF_GONE = (
    "Start the bookies named, or repair what they lost. If one will never come back:"
    " `spark-ledger ledger recover {} --gone BOOKIE_ID` (docs/protocol.md, Limbo)."
)
NO_RESPONSE = DeliveryFailure(None, "no response yet")
CUT_SHORT = DeliveryFailure(None, "the response stops before it")


# Statuses that a second request would get again: with no others an attempt is not repeated.
_LASTING_STATUSES = (
    Status.UNAUTHORIZED,
    Status.LIMBO,
    Status.LIMBO_TORN,
    Status.BAD_DIGEST,
    Status.NO_SUCH_ENTRY,
    Status.NO_SUCH_LEDGER,
)


class Recovered(NamedTuple):
    """The CLOSED record, and entries of the ledger that the recovery has read, by id."""

    versioned: VersionedRecord
    entries: Mapping[int, Entry] = {}


async def recover(
    cluster: Cluster,
    ledger_id: int,
    tokens: Tokens,
    gone: Set[str] = frozenset(),
    *,
    small: bool = False,
) -> Recovered:
    """Close the ledger at its true end, whatever its writer does.

    `gone`: ids of the bookies that an operator declared gone. If the end cannot be decided
    otherwise, entries at the end that only these bookies have are given up. `small`: the ledger's
    entries are small, so the last of them are read with the fence.

    While bookies do not respond, it repeats the attempt, with pauses, for recovery_timeout_s. Then
    it raises the error of the last attempt: DataUnavailable if the end cannot be decided (nothing
    is lost, the ledger stays IN_RECOVERY: try again), or NotEnoughBookies. It raises Unauthorized
    (nothing was changed), NoSuchLedger and Unavailable at once.
    """
    timeout_s = cluster.config.recovery_timeout_s
    last_failure: LedgerError = DataUnavailable(
        f"the recovery of ledger {ledger_id} did not end within {timeout_s:g} s; it stays"
        " IN_RECOVERY",
        ledger_id=ledger_id,
    )
    pause_s = PAUSE_MIN_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _attempt(cluster, ledger_id, tokens, gone, small)
                except (DataUnavailable, NotEnoughBookies) as failure:
                    if failure.facts.get("lasting"):
                        raise
                    last_failure = failure
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
    except TimeoutError:
        raise last_failure from None


async def _attempt(
    cluster: Cluster, ledger_id: int, tokens: Tokens, gone: Set[str], small: bool
) -> Recovered:
    """One attempt, from the record as it is now."""
    versioned = await cluster.records.read(ledger_id, fresh=True)
    if not tokens.repair and not allows(versioned.record.verifiers, "recover", tokens.recover):
        raise Unauthorized(f"wrong password for ledger {ledger_id}", ledger_id=ledger_id)
    versioned = await cluster.records.move(versioned, transitions.mark_in_recovery)
    if versioned.record.closed:
        return Recovered(versioned)
    recovery = Recovery(cluster, versioned, tokens, gone, small)
    try:
        return Recovered(await recovery.run(), recovery.entries)
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
        small: bool = False,
    ) -> None:
        self._cluster = cluster
        self._versioned = versioned
        self._record = versioned.record
        self._ledger_id = versioned.record.ledger_id
        self._token = tokens.recover
        self._ensemble = versioned.record.last_fragment.ensemble  # frozen: reads go there
        self._gone = {slot for slot, bookie in enumerate(self._ensemble) if bookie in gone}
        self._quorum = Quorum.of(versioned.record)
        self._first = versioned.record.last_fragment.first_entry
        self._small = small
        self._read_first: dict[int, ReadResponse] = {}
        """By slot the entries that came with the responses to the fence."""
        self.entries: dict[int, Entry] = {}  # up to the end, those that were read
        self._pipeline: AddPipeline | None = None
        self._change: EnsembleChange | None = None

    async def run(self) -> VersionedRecord:
        lac, tail = await self._fence()
        if not tail.entries and not tail.is_end_after and lac < ENTRY_ID_MAX:
            tail = await self._read_window(lac + 1, WINDOW_FIRST)
        record, whole = self._record, tail.count_whole()
        last, end = lac + whole, None
        if whole:
            self._keep(tail.entries[whole - 1])
        if whole < len(tail.entries) or not tail.is_end_after:
            pipeline = self._begin_writing_back(last)
            await self._write_back_tail(pipeline, lac, tail, whole)
            record = pipeline.record
            if pipeline.pending.last_add_confirmed > last:
                last = pipeline.pending.last_add_confirmed
                end = LastEntry(last, pipeline.confirmed_bytes, pipeline.confirmed_rows)
        self._keep_first(last)
        return await self._close(record, end or await self._read_counts_of(last))

    async def stop(self) -> None:
        """End the adds and the ensemble change, whether or not `run` succeeded."""
        self._cluster.at_close.pop(self, None)
        if self._pipeline is not None:
            self._pipeline.fail(LedgerError(f"the recovery of ledger {self._ledger_id} is over"))
        if self._change is not None:
            await self._change.stop()

    # -- fencing ------------------------------------------------------------------------------

    async def _fence(self) -> tuple[int, "TailWindow"]:
        """Fence bookies of the last fragment until the fenced bookies cover its ensemble. Returns
        the highest LAC among their responses, or the entry before the fragment if that is higher;
        and what the entries that came with the responses decide about the entries after it.

        Raises as soon as so many bookies have failed to respond that this is impossible.
        """
        silent, lac = (1 << len(self._ensemble)) - 1, self._first - 1
        unknown, reasons = 0, dict[int, DeliveryFailure]()
        async with aclosing(responses_on_arrival(self._fences())) as responses:
            async for slot, response in responses:
                if isinstance(response, ReadResponse):
                    self._read_first[slot] = response
                if meaning(response.status) is Meaning.UNKNOWN and slot not in self._gone:
                    reasons[slot] = DeliveryFailure.of(response)
                    unknown |= 1 << slot
                    if self._quorum.covers_ensemble(unknown):
                        continue
                    break
                silent &= ~(1 << slot)
                lac = max(lac, response.last_add_confirmed)
                if self._quorum.covers_ensemble(silent):
                    window = min(TAIL_ENTRIES, ENTRY_ID_MAX - lac) if self._small else 0
                    tail = self._tail(lac + 1, window, asked_from=self._first)
                    for read in self._read_first.items():
                        tail.take_response(*read)
                    await _await_decision(tail, responses)
                    return lac, tail
        raise self._undecidable_error("it cannot be fenced", reasons)

    def _fences(self) -> Sequence[Coroutine[Any, Any, ReadResponse | ReadLacResponse]]:
        if self._small:
            last = min(self._first + WINDOW_FIRST - 1, ENTRY_ID_MAX)  # for older bookies
            return self._fencing_reads(self._first, last, TAIL_BYTES, TAIL_ENTRIES)
        return [
            self._cluster.bookies.read_lac(bookie, self._ledger_id, fence=True, token=self._token)
            for bookie in self._ensemble
        ]

    def _fencing_reads(
        self, first: int, last: int, bytes_max: int, tail_entries: int = 0
    ) -> list[Coroutine[Any, Any, ReadResponse]]:
        """A read for each member of the ensemble."""
        return [
            self._cluster.bookies.read(
                *(bookie, self._ledger_id, first, last),
                max_bytes=bytes_max,
                fence=True,
                token=self._token,
                tail_entries=tail_entries,
            )
            for bookie in self._ensemble
        ]

    def _tail(self, first: int, window: int, asked_from: int) -> "TailWindow":
        return TailWindow(self._quorum, self._ledger_id, first, window, self._gone, asked_from)

    # -- the tail -----------------------------------------------------------------------------

    def _begin_writing_back(self, start: int) -> AddPipeline:
        self._pipeline = AddPipeline(self._cluster, self._record, start, recovery=True)
        self._cluster.at_close[self] = self._pipeline.fail
        self._change = EnsembleChange(self._pipeline, self._change_in_memory, self._token)
        return self._pipeline

    async def _change_in_memory(
        self, failed: Mapping[int, str], replacements: Mapping[int, str], first_entry: int
    ) -> LedgerRecord:
        """The record with the change. It is not written before the close: other recoverers would
        read from the replacements, which lack the ledger's last entries."""
        assert self._pipeline is not None
        return transitions.with_replacements(self._pipeline.record, replacements, first_entry)

    async def _write_back_tail(
        self, pipeline: AddPipeline, lac: int, tail: "TailWindow", whole: int
    ) -> None:
        """Write back the entries after `lac + whole`, up to the end of the ledger, until all are
        confirmed. `tail`: what is decided already about the entries after `lac`; the other entries
        are read."""
        next_entry, window = lac + 1, WINDOW_FIRST
        while True:
            for entry in tail.entries[whole:]:
                if pipeline.failure is None:
                    pipeline.push(self._write_back(entry, lac))
            next_entry, whole = next_entry + len(tail.entries), 0
            await pipeline.room()
            self._raise_failure_of(pipeline)
            if tail.is_end_after or next_entry > ENTRY_ID_MAX:
                break
            tail = await self._read_window(next_entry, window)
            window = min(2 * window, WINDOW_MAX)
        await pipeline.wait_until_drained()
        self._raise_failure_of(pipeline)
        await pipeline.wait_for_responses(LAST_RESPONSES_S)

    def _write_back(self, entry: Entry, frozen_lac: int) -> PendingAdd:
        """The add that writes the entry back, with this LAC in its header."""
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

    def _raise_failure_of(self, pipeline: AddPipeline) -> None:
        failure = pipeline.failure
        if isinstance(failure, TimedOut):  # its text is for the caller of an append
            raise DataUnavailable(
                f"ledger {self._ledger_id} stays IN_RECOVERY: its tail cannot be written back;"
                f" {failure.what}",
                ledger_id=self._ledger_id,
            )
        if failure is not None:
            raise failure

    async def _read_window(self, first: int, window: int) -> "TailWindow":
        """What bookies respond about the entries from `first` on. Raises DataUnavailable if no
        entry and no end can be decided."""
        bytes_max = self._cluster.config.read_request_bytes
        window = min(window, ENTRY_ID_MAX - first + 1)
        requests = self._fencing_reads(first, first + window - 1, bytes_max)
        tail = self._tail(first, window, asked_from=first)
        async with aclosing(responses_on_arrival(requests)) as responses:
            await _await_decision(tail, responses)
        if not tail.entries and not tail.is_end_after:
            raise self._undecidable_error(f"entry {first} cannot be decided", tail.reasons())
        return tail

    # -- closing ------------------------------------------------------------------------------

    async def _read_counts_of(self, last: int) -> LastEntry:
        """The end of the ledger at `last`, with the counts from that entry's header; used if no
        entry was written back."""
        if last == NO_ENTRY:
            return LastEntry(NO_ENTRY, 0, 0)
        if last in self.entries:
            return _end_at(self.entries[last])
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
                    self._keep(delivered)
                    return _end_at(delivered)
                reasons[slots[index]] = delivered
        raise self._undecidable_error(f"its last entry {last} cannot be read", reasons, ensemble)

    def _keep(self, entry: Entry) -> None:
        self.entries[entry.header.entry_id] = entry

    def _keep_first(self, last: int) -> None:
        """Keep the entries up to `last` that came with the responses to the fence."""
        begin = min((response.skipped for response in self._read_first.values()), default=0)
        first = max(self._first + begin, last - WINDOW_FIRST + 1)
        for entry_id in range(first, last + 1 if self._read_first else first):
            for slot in self._quorum.write_set(entry_id):
                response = self._read_first.get(slot)
                at = entry_id - self._first
                judged = response and judge_response(response, self._ledger_id, at, entry_id)
                if judged and isinstance(judged[1], Entry):
                    self._keep(judged[1])
                    break

    async def _close(self, record: LedgerRecord, end: LastEntry) -> VersionedRecord:
        """Close the ledger with the last fragments of `record`."""
        began = self._record.last_fragment
        tail = record.fragments[len(self._record.fragments) - 1 :]
        try:
            return await self._cluster.records.move(
                self._versioned,
                lambda record: transitions.close_recovered(record, began, tail, end),
            )
        except MoveRefused as refused:
            raise LedgerError(
                f"ledger {self._ledger_id} cannot be closed after recovery: {refused.why}"
            ) from refused

    def _undecidable_error(
        self,
        what: str,
        reasons: Mapping[int, DeliveryFailure],
        ensemble: tuple[str, ...] | None = None,
    ) -> LedgerError:
        """The error when this attempt cannot decide: Unauthorized if an ack quorum refuses the
        password (a few may refuse it for damage of their own), else DataUnavailable. Its `lasting`
        is True if every status is lasting, so that no further attempt can succeed."""
        members = ensemble or self._ensemble
        why = {members[slot]: reasons[slot].text for slot in sorted(reasons)}
        text = (
            f"ledger {self._ledger_id} stays IN_RECOVERY: {what}; {self._cluster.reasons_text(why)}"
        )
        statuses = [reason.status for reason in reasons.values()]
        if statuses.count(Status.UNAUTHORIZED) >= self._quorum.ack_quorum:
            return Unauthorized(text, ledger_id=self._ledger_id)
        lasting = bool(statuses) and all(status in _LASTING_STATUSES for status in statuses)
        remedy = REMEDY_IF_GONE.format(self._ledger_id) if Status.LIMBO_TORN in statuses else None
        return DataUnavailable(text, remedy, ledger_id=self._ledger_id, lasting=lasting)


def _end_at(entry: Entry) -> LastEntry:
    header = entry.header
    return LastEntry(header.entry_id, header.cumulative_bytes, header.cumulative_rows)


async def _await_decision(
    tail: "TailWindow", responses: AsyncIterator[tuple[int, ReadResponse | ReadLacResponse]]
) -> None:
    """Take responses until they decide, or no further response comes. If the ledger ends, waits a
    moment for another response: it may have an entry."""
    late: float | None = None  # when to stop the wait for a late positive
    while not tail.is_decided:
        if tail.is_end_after and late is None:
            late = asyncio.get_running_loop().time() + LATE_POSITIVE_S
        try:
            async with asyncio.timeout_at(late if tail.is_end_after else None):
                slot, response = await anext(responses)
        except (StopAsyncIteration, TimeoutError):
            return
        if isinstance(response, ReadResponse):
            tail.take_response(slot, response)


class TailWindow:
    """Judges the responses to one recovery read, entry by entry in order: `window` entries from
    `first` on, of a read from `asked_from` on. `entries`: the entries to recover. `is_end_after`:
    the ledger ends after them. `is_decided`: no further response is needed."""

    def __init__(
        self,
        quorum: Quorum,
        ledger_id: int,
        first: int,
        window: int,
        gone: Set[int] = frozenset(),
        asked_from: int | None = None,
    ) -> None:
        self.entries: list[Entry] = []
        self.is_end_after = False
        self.is_decided = window <= 0
        self._quorum = quorum
        self._ledger_id = ledger_id
        self._first = first
        self._window = window
        self._asked_from = first if asked_from is None else asked_from
        self._gone = gone
        self._responses: dict[int, ReadResponse] = {}

    def take_response(self, slot: int, response: ReadResponse) -> None:
        """Add the response of the bookie in `slot`, and decide as many entries as possible."""
        self._responses[slot] = response
        self.is_end_after = False
        while len(self.entries) < self._window:
            if not self._decide(self._first + len(self.entries)):
                return
        self.is_decided = True

    def _decide(self, entry_id: int) -> bool:
        """Decide one entry; True if it is to be recovered, so that the next can be decided."""
        judged = [self._judge_member(slot, entry_id) for slot in self._quorum.write_set(entry_id)]
        positives = [entry for _, entry in judged if isinstance(entry, Entry)]
        verdict = recovery_verdict(self._quorum, [response for response, _ in judged])
        if verdict is Verdict.RECOVER:
            self.entries.append(positives[0])
            return True
        cut_small = any(why is CUT_SHORT for _, why in judged)
        self.is_end_after = verdict is Verdict.ABSENT
        # Responses that stop before the entry decide nothing: the next window begins with it.
        self.is_decided = all(response is not None for response, _ in judged) or (
            bool(self.entries) and cut_small and not self.is_end_after
        )
        return False

    def _judge_member(
        self, slot: int, entry_id: int
    ) -> tuple[Meaning | None, Entry | DeliveryFailure]:
        response = self._responses.get(slot)
        if response is None:
            return None, NO_RESPONSE
        judged = judge_response(response, self._ledger_id, entry_id - self._asked_from, entry_id)
        if judged is None:
            return Meaning.UNKNOWN, CUT_SHORT
        if judged[0] is Meaning.UNKNOWN and slot in self._gone:
            return Meaning.TORN, judged[1]
        return judged

    def count_whole(self) -> int:
        """How many of `entries`, from the first on, every member of their write set has."""
        for count, entry in enumerate(self.entries):
            entry_id = entry.header.entry_id
            for slot in self._quorum.write_set(entry_id):
                if self._judge_member(slot, entry_id)[0] is not Meaning.POSITIVE:
                    return count
        return len(self.entries)

    def reasons(self) -> dict[int, DeliveryFailure]:
        """By slot, why members of the first entry's write set did not deliver that entry."""
        reasons = {}
        for slot in self._quorum.write_set(self._first):
            why = self._judge_member(slot, self._first)[1]
            if not isinstance(why, Entry):
                reasons[slot] = why
        return reasons
