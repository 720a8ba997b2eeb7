"""Observers: they see every exchange, every metadata write, every ack; they feed the ghost and
judge the invariants that the event can break.

A Violation raised here is kept in `violations` (the code under test must not meet it) and ends
the run at the next look.
"""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import NO_ENTRY, BadEntry, Buffer, unpack_header
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import LedgerRecord, LedgerState
from tests.simulation import invariants
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants import Violation
from tests.simulation.network import Exchange
from tests.simulation.store import Change, Commit
from tests.simulation.trace import Trace

_LEDGERS = paths.LEDGERS + "/"


class Observers:
    """Attach with `network.taps.append(o.exchange)` and `store.listeners.append(o.committed)`."""

    def __init__(self, ghost: Ghost, trace: Trace) -> None:
        self.ghost = ghost
        self.trace = trace
        self.violations: list[Violation] = []

    # -- the network -------------------------------------------------------------------------

    def exchange(self, exchange: Exchange) -> None:
        """Every answer of a bookie, as it leaves the bookie."""
        crc = zlib.crc32(exchange.answer)
        request = codec.decode_request(exchange.method, exchange.request)
        response = codec.decode_response(exchange.method, exchange.answer)
        told = f"{exchange.method} from {exchange.caller}: {_told(request, response)}"
        self.trace.note(exchange.address, f"{told} {crc:08x}")
        try:
            if isinstance(request, m.AddRequest):
                assert isinstance(response, m.AddResponse)
                self._adds(exchange, request, response)
            elif isinstance(request, m.ReadRequest):
                assert isinstance(response, m.ReadResponse)
                self._read(exchange, request, response)
            elif isinstance(request, m.ReadLacRequest):
                assert isinstance(response, m.ReadLacResponse)
                self._read_lac(exchange, request, response)
        except Violation as violation:
            self.violated(violation)

    def _adds(self, exchange: Exchange, request: m.AddRequest, response: m.AddResponse) -> None:
        for add, result in zip(request.adds, response.results, strict=False):
            if result.status is Status.OK:
                self._added(exchange, request.bookie_id, add)

    def _added(self, exchange: Exchange, bookie_id: str, add: m.Add) -> None:
        header = unpack_header(_head(add.entry))
        ledger = self.ghost.ledgers.get(header.ledger_id)
        if ledger is None:
            return
        ghost, entry_id = self.ghost, header.entry_id
        bookie = ghost.bookie(bookie_id)
        where = f"stored by {bookie_id}"
        invariants.one_content_for_one_entry(ghost, ledger, entry_id, header.identity, where)
        if add.recovery:
            invariants.recovery_stays_in_the_last_fragment(ghost, ledger, entry_id, "wrote")
        else:
            key = (header.ledger_id, entry_id)
            if key not in bookie.stored:  # an equal add again may be answered OK at any time
                invariants.a_fenced_negative_is_final(ghost, bookie, *key)
                invariants.no_normal_add_begins_after_a_fence_reply(
                    ghost, bookie, header.ledger_id, exchange.begun
                )
        bookie.stored[header.ledger_id, entry_id] = None
        ledger.stored.setdefault(entry_id, {})[bookie_id] = None
        while len(ledger.stored.get(ledger.durable_prefix + 1, ())) >= ledger.ack_quorum:
            ledger.durable_prefix += 1
        lac, said = header.last_add_confirmed, f"in a header stored by {bookie_id}"
        invariants.a_confirmed_position_was_durable_when_it_was_said(ghost, ledger, lac, said)

    def _read(self, exchange: Exchange, request: m.ReadRequest, response: m.ReadResponse) -> None:
        ledger = self.ghost.ledgers.get(request.ledger_id)
        if ledger is None:
            return
        bookie = self.ghost.bookie(request.bookie_id)
        if request.fence and meaning(response.status) is not Meaning.UNKNOWN:
            bookie.fence_replied.setdefault(request.ledger_id, exchange.ended)
            invariants.recovery_stays_in_the_last_fragment(
                self.ghost, ledger, request.first_entry, "read"
            )
        self._lac_said(ledger, response.last_add_confirmed, request.bookie_id)
        for place, result in enumerate(_results(request, response)):
            entry_id = request.first_entry + place
            if result.status is Status.OK:
                identity = unpack_header(result.entry).identity
                where = f"served by {request.bookie_id}"
                invariants.one_content_for_one_entry(self.ghost, ledger, entry_id, identity, where)
            elif request.fence and meaning(result.status) is Meaning.NEGATIVE:
                key = (request.ledger_id, entry_id)
                bookie.fenced_negatives.setdefault(key, exchange.ended)

    def _read_lac(
        self, exchange: Exchange, request: m.ReadLacRequest, response: m.ReadLacResponse
    ) -> None:
        ledger = self.ghost.ledgers.get(request.ledger_id)
        if ledger is None:
            return
        if request.fence and meaning(response.status) is not Meaning.UNKNOWN:
            bookie = self.ghost.bookie(request.bookie_id)
            bookie.fence_replied.setdefault(request.ledger_id, exchange.ended)
        self._lac_said(ledger, response.last_add_confirmed, request.bookie_id)

    def _lac_said(self, ledger: LedgerGhost, lac: int, bookie_id: str) -> None:
        if lac > NO_ENTRY:
            where = f"in a reply of {bookie_id}"
            invariants.a_confirmed_position_was_durable_when_it_was_said(
                self.ghost, ledger, lac, where
            )

    # -- the metadata store --------------------------------------------------------------------

    def committed(self, commit: Commit) -> None:
        """Every accepted metadata write."""
        told = ", ".join(_changed(change) for change in commit.changes)
        self.trace.note("store", f"{commit.zxid} by {commit.session or 'itself'}: {told}")
        for change in commit.changes:
            if change.path.startswith(_LEDGERS):
                try:
                    self._ledger_changed(change)
                except Violation as violation:
                    self.violated(violation)

    def _ledger_changed(self, change: Change) -> None:
        before, after = _record(change.before), _record(change.after)
        if before is None and after is None:
            return  # a node between the root and a record
        ghost = self.ghost
        invariants.every_move_is_a_row_of_the_table(ghost, before, after)
        if after is None:
            assert before is not None
            ghost.meet("ledger deleted")
            ghost.ledgers[before.ledger_id].deleted = True
            return
        ledger = ghost.ledgers.get(after.ledger_id)
        if ledger is None or before is None:
            ghost.ledgers[after.ledger_id] = LedgerGhost(
                after.ledger_id, after.ack_quorum, after.write_quorum, after
            )
            return
        invariants.closed_never_changes(ghost, before, after)
        invariants.members_stand_still_in_recovery(ghost, before, after)
        invariants.fragments_rise_within_what_is_confirmed(ghost, ledger, before, after)
        self._note_situation(before, after)
        ledger.record = after
        if after.closed and not before.closed:
            self._closed(ledger, before, after)

    def _closed(self, ledger: LedgerGhost, before: LedgerRecord, after: LedgerRecord) -> None:
        invariants.closed_last_entry_covers_every_ack(self.ghost, ledger)
        invariants.nothing_returned_lies_beyond_the_end(self.ghost, ledger)
        invariants.the_closed_tail_is_on_an_ack_quorum(self.ghost, ledger, before, after)
        invariants.the_length_is_the_sum_of_the_payloads(self.ghost, ledger, after)

    def _note_situation(self, before: LedgerRecord, after: LedgerRecord) -> None:
        meet = self.ghost.meet
        if before.state is after.state is LedgerState.OPEN:
            same = before.last_fragment.first_entry == after.last_fragment.first_entry
            meet("fragment replaced at the same key" if same else "ensemble changed")
        elif before.state is LedgerState.IN_RECOVERY:
            meet("recovered")
            if before.fragments != after.fragments:
                meet("ensemble changed in recovery")
            if after.last_entry is not None and after.last_entry < after.last_fragment.first_entry:
                meet("closed with an empty last fragment")
        elif after.closed:
            meet("closed by its writer")

    # -- writers -------------------------------------------------------------------------------

    def submitted(self, ledger_id: int, payload: Sequence[Buffer] | Buffer, rows: int) -> None:
        single = isinstance(payload, (bytes, bytearray, memoryview))
        ledger = self.ghost.ledgers[ledger_id]
        ledger.submitted.append(bytes(payload) if single else b"".join(payload))  # type: ignore[arg-type]
        ledger.submitted_rows.append(rows)

    def appended(self, ledger_id: int, entry_id: int, done: "asyncio.Future[Any]") -> None:
        """An append ended: acked, failed or cancelled."""
        ledger, ghost = self.ghost.ledgers[ledger_id], self.ghost
        ok = not done.cancelled() and done.exception() is None
        self.trace.note(f"ledger {ledger_id}", f"entry {entry_id} {'acked' if ok else 'failed'}")
        try:
            if ok and done.result() != entry_id:
                raise Violation("7", f"append {entry_id} answered {done.result()}")
            invariants.acks_come_in_order_and_never_after_a_failure(ghost, ledger, entry_id, ok)
            if not ok:
                return
            ledger.acked = entry_id
            invariants.no_ack_after_delete(ghost, ledger, entry_id)
            invariants.closed_last_entry_covers_every_ack(ghost, ledger)
            invariants.an_acked_entry_is_on_an_ack_quorum_of_the_published_ensemble(
                ghost, ledger, entry_id
            )
        except Violation as violation:
            self.violated(violation)

    def violated(self, violation: Violation) -> None:
        self.trace.note("VIOLATION", str(violation))
        self.violations.append(violation)


def _head(parts: Sequence[Buffer]) -> Buffer:
    """The entry's first bytes, header included."""
    return parts[0] if len(parts[0]) >= 64 else b"".join(parts)


def _results(request: m.ReadRequest, response: m.ReadResponse) -> Sequence[m.EntryResult]:
    """The results of a read; a negative for the whole request speaks of its first entry."""
    if response.results or meaning(response.status) is Meaning.POSITIVE:
        return response.results
    return [m.EntryResult(response.status)]


def _record(node: Any) -> LedgerRecord | None:
    return ledger_record.decode(node.value) if node is not None and node.value else None


def _changed(change: Change) -> str:
    if change.after is None:
        return f"-{change.path}"
    version = change.after.version
    crc = zlib.crc32(change.after.value)
    told = f"{'+' if change.before is None else ''}{change.path} v{version} {crc:08x}"
    record = _record(change.after) if change.path.startswith(_LEDGERS) else None
    if record is not None:
        last = record.last_fragment
        told += f" {record.state.value} end {record.last_entry} from {last.first_entry}"
        told += f" on {' '.join(last.ensemble)}"
    return told


def _told(request: m.Request, response: m.Response) -> str:
    if isinstance(request, m.AddRequest) and isinstance(response, m.AddResponse):
        parts = []
        for add, result in zip(request.adds, response.results, strict=False):
            try:
                header = unpack_header(_head(add.entry))
                entry = f"{header.ledger_id}:{header.entry_id}"
            except BadEntry:
                entry = "?"
            recovery = " recovery" if add.recovery else ""
            parts.append(f"{entry}{recovery} {result.status.name}")
        return ", ".join(parts)
    if isinstance(request, m.ReadRequest) and isinstance(response, m.ReadResponse):
        fence = " fence" if request.fence else ""
        found = [result.status.name for result in response.results]
        span = f"{request.ledger_id}:{request.first_entry}-{request.last_entry}{fence}"
        return f"{span} {response.status.name} {found} lac {response.last_add_confirmed}"
    if isinstance(request, m.ReadLacRequest) and isinstance(response, m.ReadLacResponse):
        fence = " fence" if request.fence else ""
        return f"{request.ledger_id}{fence} {response.status.name} {response.last_add_confirmed}"
    return type(request).__name__
