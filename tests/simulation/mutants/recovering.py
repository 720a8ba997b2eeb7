"""Bugs of recovery: fencing, what negatives prove, the tail, the close."""

from itertools import takewhile
from typing import Any

from bookie_server import bookie
from bookie_server.api.codec import encode_add
from bookie_server.api.entry import pack_header
from bookie_server.api.messages import Add
from bookie_server.api.status import Status
from spark_ledger.bookies import bookie_client
from spark_ledger.errors import DataUnavailable
from spark_ledger.ledger import client, quorum, recovery, transitions
from spark_ledger.ledger.quorum import PendingAdd
from spark_ledger.ledger.transitions import MoveRefusal, Write, with_replacements
from spark_ledger.metadata.ledger_record import RecordState
from tests.simulation.mutants.mutant import Mutant

SLOW = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("slow network",),
    "slow": 0.3,
    "writers": 2,
    "recoverers": 2,
}
CHANGING = {
    "quorum": (3, 3, 2),
    "bookies": 5,
    "faults": ("slow network", "kill", "client killed"),
    "slow": 0.1,
    "between_s": 0.6,
    "writers": 2,
    "recoverers": 2,
}
WRONG_TOKENS = {
    **SLOW,
    "faults": ("wrong token", "slow network"),
    "slow": 0.05,
    "between_s": 0.4,
    "password": True,
}
SHARED = {**SLOW, "faults": ("kill", "client killed", "slow network"), "recoverers": 3}
SILENT = {**SLOW, "faults": ("slow network", "kill", "loss"), "between_s": 0.6}


def never_fences(read: Any) -> Any:
    async def unfenced(self: Any, *args: Any, **options: Any) -> Any:
        options["fence"] = False
        return await read(self, *args, **options)

    return unfenced


def one_negative_is_enough(needed: Any) -> Any:
    return property(lambda self: 1)


def one_answer_covers(covered: Any) -> Any:
    return lambda self, silent: silent != (1 << self.ensemble_size) - 1


def silence_is_negative(ask: Any) -> Any:
    async def asked(self: Any, *args: Any, **options: Any) -> Any:
        answer = await ask(self, *args, **options)
        if answer.status is Status.IO_ERROR and "no answer" in answer.reason:
            return type(answer)(Status.NO_SUCH_LEDGER)
        return answer

    return asked


def refusal_is_negative(ask: Any) -> Any:
    async def asked(self: Any, *args: Any, **options: Any) -> Any:
        answer = await ask(self, *args, **options)
        if answer.status is Status.UNAUTHORIZED:
            return type(answer)(Status.NO_SUCH_LEDGER)
        return answer

    return asked


def closes_at_what_was_heard(write_back_tail: Any) -> Any:
    async def nothing(self: Any, pipeline: Any, lac: int, tail: Any, whole: int) -> None:
        return

    return nothing


def starts_at_what_was_heard(begin: Any) -> Any:
    """Not in the last fragment: what was heard may lie before it, or be nothing at all."""

    async def run(self: Any) -> Any:
        self._first, first = 0, self._first
        start, _ = await self._fence()
        self._first = first
        tail = await self._read_window(start + 1, recovery.WINDOW_FIRST)
        pipeline = self._begin_writing_back(start)
        await self._write_back_tail(pipeline, start, tail, 0)
        last = pipeline.pending.last_add_confirmed
        end = transitions.LastEntry(last, pipeline.confirmed_bytes, pipeline.confirmed_rows)
        if last == start:
            end = await self._read_counts_of(start)
        return await self._close(pipeline.record, end)

    return run


def publishes_its_changes(change_in_memory: Any) -> Any:
    async def published(self: Any, failed: Any, replacements: Any, first_entry: int) -> Any:
        def move(record: Any) -> Any:
            if record.state is not RecordState.IN_RECOVERY:
                return MoveRefusal(f"the ledger is {record.state.value}")
            return Write(with_replacements(record, replacements, first_entry))

        self._versioned = await self._cluster.records.move(self._versioned, move)
        return self._versioned.record

    return published


def advancing_lac_in_write_backs(write_back: Any) -> Any:
    def advancing(self: Any, entry: Any, frozen_lac: int) -> Any:
        return write_back(self, entry, entry.header.entry_id - 1)

    return advancing


def plain_write_backs(write_back: Any) -> Any:
    def plain(self: Any, entry: Any, frozen_lac: int) -> Any:
        pending = write_back(self, entry, frozen_lac)
        header = entry.header._replace(last_add_confirmed=frozen_lac)
        packed = encode_add(Add([pack_header(header), entry.payload], False, self._token))
        counts = pending.cumulative_bytes, pending.cumulative_rows
        return PendingAdd(pending.entry_id, packed, pending.size, *counts, pending.appended_at)

    return plain


def length_of_what_was_heard(end_at: Any) -> Any:
    async def nothing_counted(self: Any, last: int) -> Any:
        return recovery.LastEntry(last, 0, 0)

    return nothing_counted


def one_copy_is_enough(count_whole: Any) -> Any:
    return lambda self: len(self.entries)


def folds_at_a_gap(read_response: Any) -> Any:
    """What follows the first entry that the bookie lacks is left out, as if it had none of it."""

    def respond(self: Any, request: Any, ids: Any, handle: Any, outcome: Any) -> Any:
        if request.tail_entries:
            kept = takewhile(outcome.entries.__contains__, ids)
            outcome = outcome._replace(entries={id_: outcome.entries[id_] for id_ in kept})
        return read_response(self, request, ids, handle, outcome)

    return respond


def never_joins(recover: Any) -> Any:
    async def alone(cluster: Any, ledger_id: int, *more: Any, **options: Any) -> Any:
        known = await cluster.records.read(ledger_id, fresh=True)
        if known.record.state is RecordState.IN_RECOVERY:
            raise DataUnavailable(f"somebody else recovers ledger {ledger_id}")
        return await recover(cluster, ledger_id, *more, **options)

    return alone


B, R, Q = bookie_client.BookieClient, recovery.Recovery, quorum.Quorum
MUTANTS = (
    Mutant("recovery reads do not fence", "BK#2614", B, "read", never_fences, SLOW),
    Mutant(
        "recovery begins below the last fragment",
        "BK#2615",
        R,
        "run",
        starts_at_what_was_heard,
        CHANGING,
    ),
    Mutant(
        "changes of recovery published early",
        "1.7 (19)",
        R,
        "_change_in_memory",
        publishes_its_changes,
        CHANGING,
    ),
    Mutant("write-backs advance the LAC", "D5", R, "_write_back", advancing_lac_in_write_backs),
    Mutant("write-backs without their flag", "BK#4163", R, "_write_back", plain_write_backs, SLOW),
    Mutant("length not of the last entry", "D3", R, "_read_counts_of", length_of_what_was_heard),
    Mutant("recovery closes at the LAC", "1.7", R, "_write_back_tail", closes_at_what_was_heard),
    Mutant(
        "a copy at one bookie is enough",
        "1.7",
        recovery.TailWindow,
        "count_whole",
        one_copy_is_enough,
    ),
    Mutant(
        "the rest is absent after a gap", "1.2", bookie.Bookie, "_read_response", folds_at_a_gap
    ),
    Mutant("one negative is enough", "1.2", Q, "negatives_needed", one_negative_is_enough, SLOW),
    Mutant("one answer covers the ensemble", "1.2", Q, "covers_ensemble", one_answer_covers, SLOW),
    Mutant(
        "silence counted as negative", "1.1", B, "_repeat_while_busy", silence_is_negative, SILENT
    ),
    Mutant(
        "refused token counted as negative",
        "hazard 42",
        B,
        "_repeat_while_busy",
        refusal_is_negative,
        WRONG_TOKENS,
    ),
    Mutant("a recovery begun is left alone", "BK#3405", client, "recover", never_joins, SHARED),
)
