"""Observers: they see every exchange, every metadata write, every ack; they feed the ghost and
judge the invariants that the event can break. A Violation is kept in `violations`, unmet by the
code under test, and ends the run soon."""

import asyncio
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import wraps
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import NO_ENTRY, Buffer, EntryHeader, unpack_header
from bookie_server.api.status import Meaning, Status, meaning, recovery_meaning
from bookie_server.serve.handler import Credit, receive_credit, serve_stream
from spark_ledger.errors import TimedOut
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from tests.kit.handling import handle_bytes
from tests.simulation import contents, invariants
from tests.simulation.ghost import BookieGhost, Ghost, LedgerGhost, RecoveryGhost, is_named
from tests.simulation.invariants import Violation
from tests.simulation.invariants.repair import Swap, is_of_repair, swaps_of
from tests.simulation.loop import current, current_process
from tests.simulation.network import Exchange
from tests.simulation.sometimes import Situations
from tests.simulation.store import Change, Commit
from tests.simulation.streams import StreamHandler
from tests.simulation.trace import Trace

_AVAILABLE = paths.BOOKIES_AVAILABLE + "/"
_REGISTERED = (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY)
HEALTHY_S = 25.0
"""An add may time out as a whole so long after everything was well again, but no later."""


def kept(observe: Callable[..., None]) -> Callable[..., None]:
    """A Violation that is raised is kept, not raised: the observed code must not meet it."""

    @wraps(observe)
    def observed(self: "Observers", *args: Any) -> None:
        try:
            observe(self, *args)
        except Violation as violation:
            self.violated(violation)

    return observed


class Observers:
    """Attach with `network.taps.append(o.exchange)`, `network.deliveries.append(o.delivered)` and
    `store.listeners.append(o.committed)`; watching.py observes clients."""

    def __init__(self, ghost: Ghost, trace: Trace) -> None:
        self.ghost = ghost
        self.trace = trace
        self.violations: list[Violation] = []
        self.situations = Situations(ghost)
        self.swaps: list[Callable[[Swap], None]] = []
        """Called of each slot that was given away."""
        self.well_since: float | None = None
        """When every fault had ended; None before."""
        self.heard: tuple[m.Request, m.Response] | None = None
        """The messages of the answer that leaves a bookie just now."""
        self._registrations: dict[str, dict[str, None]] = {}
        self._writers: dict[int, Any] = {}
        self._comparing: dict[int, tuple[m.ReadRequest, m.ReadResponse]] = {}
        """By moment of the answer: what repair learns of the copies that a bookie has."""
        self._fencing: dict[int, tuple[m.Request, m.Response]] = {}
        """By moment of the answer: fencing exchanges that may still reach their caller."""

    def violated(self, violation: Violation) -> None:
        self.trace.note("VIOLATION", str(violation))
        self.violations.append(violation)

    def listening(self, bookie: Any) -> Callable[[str, bytes], Awaitable[bytes]]:
        """handle_bytes of the bookie; the tap, which is called before anything else runs, is given
        the messages and need not decode them once more."""

        async def answer(method: str, request: bytes) -> bytes:
            listening = _Listening(bookie, self.ghost)
            told = await handle_bytes(listening, method, request)  # type: ignore[arg-type]
            self.heard = listening.messages  # None when it was no request at all
            return told

        return answer

    def streaming(self, bookie: Any) -> StreamHandler:
        """serve_stream of the bookie, each message with the read that it answers."""

        async def answer(
            _method: str, messages: AsyncIterator[bytes]
        ) -> AsyncGenerator[tuple[bytes, bytes], None]:
            credit = Credit()
            hearing = asyncio.ensure_future(receive_credit(messages, credit))
            try:
                async with aclosing(serve_stream(bookie, credit)) as replies:
                    async for request, reply in replies:
                        try:
                            yield codec.encode(request), reply.data
                        finally:
                            reply.sent()
            finally:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)

        return answer

    # -- the network: as an answer leaves its bookie -------------------------------------------

    @kept
    def exchange(self, exchange: Exchange) -> None:
        """Every answer of a bookie, as it leaves the bookie."""
        request, response = self.heard or contents.decoded(exchange)
        self.heard = None
        headers = contents.headers(request)
        told = (
            f"{exchange.method} from {exchange.caller}: {contents.told(request, response, headers)}"
        )
        self.trace.note(exchange.address, f"{told} {zlib.crc32(exchange.answer):08x}")
        if isinstance(request, m.InfoRequest):
            return
        self._judge_identity(exchange.address, request.bookie_id, response)
        if isinstance(request, m.AddRequest):
            assert isinstance(response, m.AddResponse)
            for add, header, result in zip(request.adds, headers, response.results, strict=False):
                if header is not None:
                    self._add(exchange, request.bookie_id, add, header, result.status)
            return
        ledger = self.ghost.ledgers.get(request.ledger_id)
        if ledger is None:
            return
        if isinstance(request, m.ReadRequest):
            assert isinstance(response, m.ReadResponse)
            self._read(exchange, ledger, request, response)
        elif isinstance(request, m.ReadLacRequest):
            assert isinstance(response, m.ReadLacResponse)
            self._read_lac(exchange, ledger, request, response)
        elif isinstance(request, m.ClearLimboRequest):
            if request.clear and response.status is Status.OK:
                bookie = self.ghost.bookie(request.bookie_id)
                ledger.cleared_at(bookie, exchange.ended)
                self.ghost.meet("limbo cleared by repair")
        elif isinstance(request, m.WriteLacRequest):
            assert isinstance(response, m.WriteLacResponse)
            self._write_lac(exchange, ledger, request, response)
        else:  # between bookies: which copies may go for it is judged where they go
            assert isinstance(request, m.StoredRequest)

    def _judge_identity(self, address: str, bookie_id: str, response: m.Response) -> None:
        ghost = self.ghost
        if ghost.serving.get(address, bookie_id) != bookie_id or ghost.bookie(bookie_id).wiped:
            invariants.an_identity_is_answered_for_by_its_own_disk_only(
                ghost, address, bookie_id, contents.statuses(response)
            )

    def _add(
        self, exchange: Exchange, bookie_id: str, add: m.Add, header: EntryHeader, status: Status
    ) -> None:
        ledger = self.ghost.ledgers.get(header.ledger_id)
        if ledger is None:
            return
        ghost, entry_id = self.ghost, header.entry_id
        self.situations.add(ledger, bookie_id, add.recovery, header, status, exchange)
        invariants.equal_entries_are_taken_and_others_refused(
            ghost, ledger, entry_id, header.identity, status, bookie_id
        )
        if not contents.entitled(ledger, exchange.caller, status):
            return
        copied = (exchange.caller, bookie_id, entry_id) in ledger.copied
        if add.recovery and not copied:
            invariants.recovery_stays_in_the_last_fragment(ghost, ledger, entry_id, "wrote")
            self._judge_fences(ledger, ledger.recovery(exchange.caller))
        else:
            invariants.a_copy_goes_to_its_write_set(ghost, ledger, entry_id, bookie_id)
        if status is Status.BUSY and not add.recovery:
            ledger.busy_since.setdefault(bookie_id, current().now)
        if status is Status.OK:
            ledger.busy_since.pop(bookie_id, None)
            self._added(exchange, ledger, ghost.bookie(bookie_id), add.recovery, header)
        lac = header.last_add_confirmed
        if lac > NO_ENTRY:
            said = f"in a header that came to {bookie_id}"
            invariants.a_confirmed_position_was_durable_when_it_was_said(ghost, ledger, lac, said)

    def _added(
        self,
        exchange: Exchange,
        ledger: LedgerGhost,
        bookie: BookieGhost,
        recovery: bool,
        header: EntryHeader,
    ) -> None:
        ghost, key = self.ghost, (header.ledger_id, header.entry_id)
        where = f"stored by {bookie.bookie_id}"
        invariants.one_content_for_one_entry(ghost, ledger, key[1], header.identity, where)
        if key not in bookie.stored:  # an equal add again may be answered OK at any time
            if not recovery:
                invariants.a_fenced_negative_is_final(ghost, bookie, *key, exchange.begun)
                invariants.no_normal_add_begins_after_a_fence_reply(
                    ghost, bookie, key[0], exchange.begun
                )
            bookie.stored[key] = exchange.ended
        if recovery:
            bookie.synced[key] = None
        ledger.stored.setdefault(key[1], {})[bookie.bookie_id] = None
        while len(ledger.stored.get(ledger.durable_prefix + 1, ())) >= ledger.ack_quorum:
            ledger.durable_prefix += 1

    def _read(
        self,
        exchange: Exchange,
        ledger: LedgerGhost,
        request: m.ReadRequest,
        response: m.ReadResponse,
    ) -> None:
        ghost, bookie = self.ghost, self.ghost.bookie(request.bookie_id)
        self.situations.read(ledger, request, response, bookie)
        if request.fence:
            self._fencing[exchange.ended] = (request, response)
            if not contents.is_of_repair(ledger, request):
                self._recovery_reads(ledger, request.first_entry)
            if meaning(response.status) is not Meaning.UNKNOWN:
                bookie.fence_replied.setdefault(ledger.ledger_id, exchange.ended)
        self._lac_said(ledger, response.last_add_confirmed, request.bookie_id)
        by_repair = contents.is_of_repair(ledger, request)
        if by_repair and request.fence:  # those without are for a source of copies, perhaps itself
            self._comparing[exchange.ended] = (request, response)
        for entry_id, result in contents.results(request, response, len(ledger.submitted)):
            said = meaning(result.status)
            counts = by_repair or request.fence  # a recovery writes back no entry that all have
            if counts and said is Meaning.POSITIVE and ledger.names(request.bookie_id):
                ledger.shows_copy(bookie, entry_id, exchange.ended, fenced=request.fence)
            if said is Meaning.POSITIVE and result.location is None:  # or see `looked`
                identity = unpack_header(result.entry).identity
                where = f"served by {request.bookie_id}"
                invariants.one_content_for_one_entry(ghost, ledger, entry_id, identity, where)
            elif said is Meaning.NEGATIVE:
                invariants.what_was_acknowledged_is_never_denied(
                    ghost, bookie, ledger, entry_id, exchange.begun
                )
                if request.fence:
                    key = (ledger.ledger_id, entry_id)
                    bookie.fenced_negatives.setdefault(key, exchange.ended)
                    bookie.denied.setdefault(ledger.ledger_id, exchange.ended)

    def _recovery_reads(self, ledger: LedgerGhost, entry_id: int) -> None:
        if ledger.recovered_from is None:
            raise Violation("18", f"ledger {ledger.ledger_id} is read as IN_RECOVERY, but is not")
        invariants.recovery_stays_in_the_last_fragment(self.ghost, ledger, entry_id, "read")

    def _read_lac(
        self,
        exchange: Exchange,
        ledger: LedgerGhost,
        request: m.ReadLacRequest,
        response: m.ReadLacResponse,
    ) -> None:
        self.situations.read_lac(ledger, request, response, exchange)
        if request.fence:
            self._fencing[exchange.ended] = (request, response)
            if meaning(response.status) is not Meaning.UNKNOWN:
                bookie = self.ghost.bookie(request.bookie_id)
                bookie.fence_replied.setdefault(request.ledger_id, exchange.ended)
        self._lac_said(ledger, response.last_add_confirmed, request.bookie_id)

    def _write_lac(
        self,
        exchange: Exchange,
        ledger: LedgerGhost,
        request: m.WriteLacRequest,
        response: m.WriteLacResponse,
    ) -> None:
        lac, bookie_id = request.last_add_confirmed, request.bookie_id
        self.situations.write_lac(ledger, request, response, exchange)
        if not contents.entitled(ledger, exchange.caller, response.status):
            return
        invariants.a_copy_goes_to_its_write_set(self.ghost, ledger, lac, bookie_id)
        self._lac_said(ledger, lac, f"an explicit LAC to {bookie_id}")

    def _lac_said(self, ledger: LedgerGhost, lac: int, who: str) -> None:
        if lac > NO_ENTRY:
            invariants.a_confirmed_position_was_durable_when_it_was_said(
                self.ghost, ledger, lac, f"in a message of {who}"
            )

    # -- the network: as an answer reaches its caller ------------------------------------------

    @kept
    def delivered(self, exchange: Exchange) -> None:
        """An answer was taken by its caller: what a recoverer may decide by."""
        compared = self._comparing.pop(exchange.ended, None)
        if compared is not None:
            self._compared(exchange.caller, *compared)
        found = self._fencing.pop(exchange.ended, None)
        if found is None:
            return
        request, response = found
        assert isinstance(request, m.ReadRequest | m.ReadLacRequest)
        assert isinstance(response, m.ReadResponse | m.ReadLacResponse)
        ledger = self.ghost.ledgers[request.ledger_id]
        recovery, bookie_id = ledger.recovery(exchange.caller), request.bookie_id
        if response.status is Status.UNAUTHORIZED:
            recovery.refused[bookie_id] = None
        if meaning(response.status) is not Meaning.UNKNOWN:
            lac = response.last_add_confirmed
            recovery.fenced[bookie_id] = max(lac, recovery.fenced.get(bookie_id, lac))
        if isinstance(response, m.ReadLacResponse):
            return
        assert isinstance(request, m.ReadRequest)
        for entry_id, result in contents.results(request, response, len(ledger.submitted)):
            recovery.hear(entry_id, bookie_id, recovery_meaning(result.status))

    def _compared(self, client: str, request: m.ReadRequest, response: m.ReadResponse) -> None:
        ledger = self.ghost.ledgers[request.ledger_id]
        for entry_id, result in contents.results(request, response, len(ledger.submitted)):
            what = (client, request.bookie_id, entry_id)
            if meaning(result.status) is Meaning.POSITIVE:
                ledger.shown[what] = None
            else:
                ledger.shown.pop(what, None)

    @kept
    def looked(
        self, request: m.ReadRequest, response: m.ReadResponse | None, unasked: bool = False
    ) -> None:
        """A client looked at the locations that the bookie gave; None: in vain. With `unasked` it
        had them from an earlier answer."""
        self.situations.looked(response is not None, unasked)
        ledger, where = self.ghost.ledgers[request.ledger_id], f"in files of {request.bookie_id}"
        for result in response.results if response is not None else ():
            if result.checked is not None:
                entry_id, identity = result.checked.header.entry_id, result.checked.header.identity
                invariants.one_content_for_one_entry(self.ghost, ledger, entry_id, identity, where)

    # -- repair --------------------------------------------------------------------------------

    def copies(self, client: str, bookie_id: str, add: m.Add) -> None:
        """The client gives the bookie a copy that it lost. On its way it looks like what a recovery
        writes back, which the same client may send too, to members that were never published."""
        [header] = contents.headers(m.AddRequest(bookie_id, [add]))
        ledger = self.ghost.ledgers.get(header.ledger_id) if header is not None else None
        if header is not None and ledger is not None:
            ledger.copied[client, bookie_id, header.entry_id] = None
            self._judge_copy(ledger, client, bookie_id, header.entry_id)

    @kept
    def _judge_copy(self, ledger: LedgerGhost, *what: Any) -> None:
        invariants.nothing_is_copied_that_is_not_missing(self.ghost, ledger, *what)

    # -- the metadata store --------------------------------------------------------------------

    def committed(self, commit: Commit) -> None:
        """Every accepted metadata write."""
        told = ", ".join(contents.changed(change) for change in commit.changes)
        self.trace.note("store", f"{commit.zxid} by {commit.session or 'itself'}: {told}")
        for change in commit.changes:
            if change.path.startswith(contents.LEDGERS):
                self._ledger_changed(change, commit)
            elif change.path.startswith(_AVAILABLE):
                bookie_id = change.path.removeprefix(_AVAILABLE)
                self.situations.registered(bookie_id, change.after is not None)
            self._registered(change)

    def _registered(self, change: Change) -> None:
        folder, _, bookie_id = change.path.rpartition("/")
        if folder not in _REGISTERED:
            return
        here = self._registrations.setdefault(bookie_id, {})
        if change.after is not None:
            here[folder] = None
            self.ghost.registered_s.setdefault(bookie_id, current().now)
        else:
            here.pop(folder, None)
            if not here:
                self.ghost.unregistered(bookie_id, current().now)

    @kept
    def _ledger_changed(self, change: Change, commit: Commit) -> None:
        if not contents.is_record(change.path):
            named = contents.named_deleted(change)
            invariants.what_is_named_as_deleted_stays_named(self.ghost, *named)
            return
        before, after = contents.record(change.before), contents.record(change.after)
        author, ghost = commit.session, self.ghost
        ledger = ghost.ledgers.get((before or after).ledger_id)  # type: ignore[union-attr]
        known = ledger  # None: it is made now
        if ledger is None:
            assert after is not None
            quorums = (after.ack_quorum, after.write_quorum)
            ledger = ghost.ledgers[after.ledger_id] = LedgerGhost(
                after.ledger_id, *quorums, after, author
            )
        if before is not None:
            self.situations.moved(ledger, before, after, author)
        if before is not None and after is not None:
            for one in after.joining:
                if before.closed and not is_named(before, one.bookie_id):
                    ledger.forget_copies_of(ghost.bookie(one.bookie_id))
        ledger.adopt(after)  # first of all: what is judged next must not depend on what fails now
        self._writer_says(ledger)
        invariants.every_move_is_a_row_of_the_table(ghost, known, before, after, author)
        if after is not None:
            invariants.members_are_where_they_may_be(ghost, after)
        else:
            named = contents.named_in(commit)
            invariants.who_deletes_a_record_names_the_ledger(ghost, ledger, named)
        if before is None or after is None:
            return
        if after.state is RecordState.IN_RECOVERY and author.startswith("healer"):
            invariants.a_ledger_that_moves_is_left_alone(ghost, ledger, current().now)
        ledger.moves_s.append(current().now)
        invariants.closed_never_changes(ghost, before, after)
        invariants.members_stand_still_in_recovery(ghost, before, after)
        invariants.fragments_rise_within_what_is_confirmed(ghost, ledger, before, after)
        invariants.what_a_change_moves_is_on_an_ack_quorum(ghost, ledger, before, after)
        if is_of_repair(before, after):
            self._given_away(ledger, before, after)
            return
        invariants.overload_changes_no_ensemble(ghost, ledger, before, after, current().now)
        if after.closed and not before.closed:
            self._closed(ledger, before, after)
            if before.state is RecordState.IN_RECOVERY:
                self._recovered(ledger, after, author)

    def _given_away(self, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord) -> None:
        ghost = self.ghost
        invariants.nobody_joins_for_who_is_there(ghost, before, after, current().now)
        for swap in swaps_of(before, after):
            bookie = ghost.bookie(swap.new)
            ledger.took[swap.new, swap.fragment.first_entry] = None
            for told in self.swaps:
                told(swap)
            invariants.a_slot_goes_to_who_has_every_entry(ghost, ledger, bookie, swap)
            invariants.a_swap_takes_no_copy_away(ghost, ledger, swap)

    def _closed(self, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord) -> None:
        ghost, returned, heard = self.ghost, ledger.returned, ledger.lac_heard
        invariants.closed_last_entry_covers_every_ack(ghost, ledger)
        invariants.nothing_returned_lies_beyond_the_end(ghost, ledger, returned, returned)
        invariants.a_confirmed_position_was_durable_when_it_was_said(
            ghost, ledger, heard, "was said before"
        )
        invariants.the_closed_tail_is_on_an_ack_quorum(ghost, ledger, before, after)
        invariants.the_length_is_the_sum_of_the_payloads(ghost, ledger, after)

    def _recovered(self, ledger: LedgerGhost, after: LedgerRecord, author: str) -> None:
        """A recoverer closed it: was that right by the answers that it had?"""
        assert after.last_entry is not None
        assert ledger.recovered_from is not None
        ghost, told, end = self.ghost, ledger.recovery(author), after.last_entry + 1
        denied = invariants.who_counts_as_lacking(ledger, end, told)
        if any(denied[bookie] is Meaning.TORN for bookie in denied):
            ghost.meet("recovery decided by a torn limbo")
        self._judge_fences(ledger, told)
        self._judge_refusals(ledger, told, denied, [end])
        invariants.recovery_decides_by_every_ack_quorum(ghost, ledger, end, denied)
        invariants.recovery_ends_before_the_first_that_nobody_has(
            ghost, ledger, after.last_entry, told
        )

    def _judge_fences(self, ledger: LedgerGhost, recovery: RecoveryGhost) -> None:
        """Enough bookies had answered a fence before the recoverer decided something."""
        if ledger.recovered_from is None:
            return
        if recovery.refused:
            slots = range(ledger.record.ensemble_size)
            self._judge_refusals(ledger, recovery, recovery.fenced, slots)
        invariants.recovery_decides_by_every_ack_quorum(self.ghost, ledger, None, recovery.fenced)

    def _judge_refusals(
        self,
        ledger: LedgerGhost,
        told: RecoveryGhost,
        heard: Mapping[str, object],
        entries: Iterable[int],
    ) -> None:
        """In the write sets of these entries, refusals were not taken for what was heard."""
        assert ledger.recovered_from is not None
        needed = ledger.write_quorum - ledger.ack_quorum + 1
        for entry_id in entries:
            ensemble = ledger.recovered_from.ensemble
            members = invariants.write_set(ledger.record, entry_id, ensemble)
            answers = [bookie for bookie in members if bookie in heard]
            refusals = [b for b in members if b in told.refused and b not in heard]
            invariants.a_refused_token_decides_nothing(
                self.ghost, ledger, entry_id, len(answers), len(refusals), needed
            )

    # -- writers -------------------------------------------------------------------------------

    def writes(self, ledger_id: int, writer: Any) -> None:
        """The handle of the ledger's writer."""
        self._writers[ledger_id] = writer

    def submitted(self, ledger_id: int, payload: Sequence[Buffer] | Buffer, rows: int) -> None:
        single = isinstance(payload, (bytes, bytearray, memoryview))
        ledger = self.ghost.ledgers[ledger_id]
        ledger.submitted.append(bytes(payload) if single else b"".join(payload))  # type: ignore[arg-type]
        ledger.submitted_rows.append(rows)

    @kept
    def appended(self, ledger_id: int, entry_id: int, done: "asyncio.Future[Any]") -> None:
        """An append ended: acked, failed or cancelled."""
        ledger, ghost = self.ghost.ledgers[ledger_id], self.ghost
        error = None if done.cancelled() else done.exception()
        ok = not done.cancelled() and error is None
        self.trace.note(f"ledger {ledger_id}", f"entry {entry_id} {'acked' if ok else 'failed'}")
        told = done.result() if ok else entry_id
        invariants.acks_come_in_order_and_never_after_a_failure(ghost, ledger, told, ok)
        invariants.a_writer_is_told_of_a_deletion_that_is_one(ghost, ledger, error)
        process = current_process()  # a dead one's timers still fire, and have no effect
        alive = process is None or process.alive
        if isinstance(error, TimedOut) and self.well_since is not None and alive:
            well_s = current().now - self.well_since
            invariants.a_healthy_cluster_takes_what_is_pending(
                ghost, ledger_id, entry_id, well_s, HEALTHY_S
            )
        if not ok:
            return
        ledger.was_acked(entry_id, current().now)
        self.situations.acked(ledger, entry_id)
        invariants.no_ack_after_delete(ghost, ledger, entry_id)
        invariants.closed_last_entry_covers_every_ack(ghost, ledger)
        invariants.an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble(
            ghost, ledger, entry_id
        )
        self._writer_says(ledger)

    def _writer_says(self, ledger: LedgerGhost) -> None:
        """What the writer's handle takes for confirmed (9): at each ack and each move."""
        writer = self._writers.get(ledger.ledger_id)
        if writer is not None:
            lac, who = writer.last_add_confirmed, f"at its writer {ledger.author}"
            invariants.a_handle_never_goes_back(
                self.ghost, ledger.ledger_id, ledger.confirmed, lac, who
            )
            ledger.confirmed = lac
            invariants.a_confirmed_position_was_durable_when_it_was_said(
                self.ghost, ledger, lac, who
            )

    # -- readers -------------------------------------------------------------------------------

    @kept
    def reader_says(self, ledger_id: int, before: int, lac: int, who: str) -> None:
        """A reader's handle takes `lac` for confirmed; before, it was `before`."""
        ledger = self.ghost.ledgers[ledger_id]
        invariants.a_handle_never_goes_back(self.ghost, ledger_id, before, lac, who)
        if lac > before:
            where = f"at {who}"
            invariants.a_confirmed_position_was_durable_when_it_was_said(
                self.ghost, ledger, lac, where
            )

    @kept
    def returned(self, ledger_id: int, entry_id: int, payload: Buffer, confirmed: int) -> None:
        """A reader returned an entry as confirmed; it, or its caller, knew `confirmed`."""
        ledger = self.ghost.ledgers[ledger_id]
        invariants.nothing_returned_lies_beyond_the_end(self.ghost, ledger, entry_id, confirmed)
        invariants.entries_come_whole_and_in_the_order_submitted(
            self.ghost, ledger, entry_id, {entry_id: payload}
        )


class _Listening:
    """A Bookie to handle_bytes; it keeps the messages of the one request it is given."""

    __slots__ = ("_bookie", "_ghost", "messages")

    def __init__(self, bookie: Any, ghost: Ghost) -> None:
        self._bookie = bookie
        self._ghost = ghost
        self.messages: tuple[m.Request, m.Response] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bookie, name)

    async def handle(self, request: m.Request) -> m.Response:
        if isinstance(request, m.ClearLimboRequest) and request.clear:
            self._ghost.bookie(request.bookie_id).told_to_clear[request.ledger_id] = None
        response: m.Response = await self._bookie.handle(request)
        self.messages = (request, response)
        return response
