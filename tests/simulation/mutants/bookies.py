"""Bugs of the storage node: what it promises, what it forgets, what it denies."""

from dataclasses import replace
from typing import Any

from bookie_server import add as adder
from bookie_server import bookie
from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.journal import writer as journal
from bookie_server.ledgers import registry as ledger_handles
from bookie_server.ledgers.registry import FirstContactFailed
from bookie_server.start import replay
from bookie_server.start.applier import RecordApplier
from bookie_server.storage import storage as ledger_storage
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.store import NoNode, StoreError
from tests.simulation.mutants.mutant import Mutant

CRASHING = {
    "quorum": (3, 3, 2),
    "bookies": 3,
    "faults": ("power", "kill"),
    "between_s": 0.6,
    "writers": 2,
    "recoverers": 2,
    "tailers": 0,
}
SLOW_SYNC = {**CRASHING, "faults": ("power", "slow disk")}
RACING = {
    **CRASHING,
    "faults": ("slow store",),
    "chaos_s": 14.0,
    "between_s": 0.5,
    "recoverers": 3,
    "entries": (10, 30),
}
QUIET = {
    **CRASHING,
    "bookies": 8,
    "chaos_s": 18.0,
    "between_s": 0.5,
    "writers": 1,
    "recoverers": 3,
    "entries": (1, 2),
}
"""Each bookie meets few ledgers, so that it flushes a fence and nothing else."""
REPLACED = {**CRASHING, "bookies": 4, "faults": ("blank", "pause", "partition")}
ROTTEN = {**CRASHING, "faults": ("bit rot", "kill")}
AGAIN = {**CRASHING, "faults": ("zombie", "loss", "slow network"), "slow": 0.1}
FORGED = {**CRASHING, "faults": ("forgery", "kill")}
GUARDED = {**CRASHING, "faults": ("wrong token",), "password": True}
BEHIND = {**CRASHING, "faults": ("lagging store",), "streams": 2}
TAILED = {**CRASHING, "faults": ("slow network",), "tailers": 2, "recoverers": 0}


def ack_before_sync(append: Any) -> Any:
    def appended(self: Any, *what: Any) -> Any:
        append(self, *what)
        done = self.task.get_loop().create_future()
        done.set_result(None)
        return done

    return appended


def forgets_fences(apply: Any) -> Any:
    async def applied(self: Any, records: Any) -> None:
        await apply(self, [each for each in records if each.kind is not replay.RecordKind.FENCE])

    return applied


def forgets_entries(apply: Any) -> Any:
    async def applied(self: Any, records: Any) -> None:
        await apply(self, [each for each in records if each.kind is not replay.RecordKind.ENTRY])

    return applied


def replies_before_fence_is_durable(fence: Any) -> Any:
    async def fenced(self: Any, handle: Any) -> None:
        if not handle.state.fenced:
            state = self.storage.set_state(replace(handle.state, fenced=True))
            handle.end_waiting()
            self.storage.append(
                [bookie.Record(bookie.RecordKind.FENCE, state.ledger_id, -1, b"", 0)]
            )

    return fenced


def takes_adds_when_fenced(refusal: Any) -> Any:
    def never_fenced(self: Any, token: bytes, recovery: bool) -> Any:
        return refusal(self, token, True)

    return never_fenced


def fence_of_empty_ledgers_only(refusal: Any) -> Any:
    """A ledger that has entries here is known already: its fence is not looked at again."""

    def seen(self: Any, token: bytes, recovery: bool) -> Any:
        return refusal(self, token, recovery or self.last_entry >= 0)

    return seen


def one_handle_for_each_request(meet: Any) -> Any:
    """Whoever comes before the first handle is made gets one of its own, of what it read then."""

    async def meet_alone(self: Any, ledger_id: int) -> Any:
        handle = self._handles.get(ledger_id)
        if handle is None:
            before = self._storage.state(ledger_id)
            handle = await self._meet(ledger_id)
            stale = before or replace(handle.state, fenced=False)
            handle._state_of = lambda _: stale
        return handle

    return meet_alone


def any_token_will_do(allows: Any) -> Any:
    """There is one token, for whatever use."""

    def allowed(self: Any, use: str, token: bytes) -> Any:
        return any(allows(self, each, token) for each in ("read", "add", "recover"))

    return allowed


def leaves_waiters(wait_beyond: Any) -> Any:
    async def left(self: Any, previous_lac: int, wait_s: float) -> None:
        await wait_beyond(self, previous_lac, wait_s)
        if wait_s > 0 and self.last_add_confirmed <= previous_lac and not self.state.fenced:
            self.waiter_count += 1

    return left


def checkpoint_skips_states(begin_flush: Any) -> Any:
    def without_states(self: Any) -> None:
        if not self.cache.active.bytes and self._has_journals:
            self._states._changed_ids = {}  # nothing cached, so nothing to flush
        begin_flush(self)

    return without_states


def checkpoint_at_its_end(move: Any) -> Any:
    async def as_of_now(self: Any, flush: Any) -> None:
        await move(self, flush._replace(marks=self._journals.synced()))

    return as_of_now


def damage_is_absence(read_response: Any) -> Any:
    def without_damaged(self: Any, request: Any, ids: Any, handle: Any, found: Any) -> Any:
        answer = read_response(self, request, ids, handle, found)
        absent = m.EntryResult(Status.NO_SUCH_ENTRY)
        results = [absent if r.status is Status.IO_ERROR else r for r in answer.results]
        return answer._replace(results=results)

    return without_damaged


def limbo_is_absence(absence: Any) -> Any:
    return lambda limbo: Status.NO_SUCH_ENTRY


def any_identity(handle: Any) -> Any:
    async def whoever(self: Any, request: Any) -> Any:
        return await handle(self, request._replace(bookie_id=self.bookie_id))

    return whoever


def takes_other_bytes(compare: Any) -> Any:
    def same_id(self: Any, header: Any, stored: Any, recovery: bool) -> Any:
        status = compare(self, header, stored, recovery)
        return Status.OK if status is Status.CONFLICTING_ENTRY else status

    return same_id


def lac_in_the_identity(compare: Any) -> Any:
    def with_lac(self: Any, header: Any, stored: Any, recovery: bool) -> Any:
        cached = self._storage.cache.get(header.ledger_id, header.entry_id)
        known = stored.get((header.ledger_id, header.entry_id))
        if cached is not None:
            known = adder.unpack_header(cached)
        if isinstance(known, adder.EntryHeader) and known != header:
            return Status.CONFLICTING_ENTRY
        return compare(self, header, stored, recovery)

    return with_lac


def looks_without_a_sync(record: Any) -> Any:
    """A replica that lags has no record yet of a ledger that was made just now."""

    async def looked(self: Any, ledger_id: int) -> Any:
        try:
            return ledger_record.decode((await self._metadata.get(paths.ledger(ledger_id))).value)
        except NoNode as error:
            raise FirstContactFailed(Status.LEDGER_DELETED, "the ledger has no record") from error
        except StoreError as error:
            raise FirstContactFailed(Status.METADATA_UNAVAILABLE, str(error)) from error

    return looked


S, H = ledger_storage.LedgerStorage, ledger_handles.LedgerHandle
B, D = bookie.Bookie, ledger_handles.LedgerHandles
MUTANTS = (
    Mutant(
        "fence forgotten at replay", "BP-46, 1", RecordApplier, "apply", forgets_fences, CRASHING
    ),
    Mutant(
        "entries forgotten at replay", "BP-46, 2", RecordApplier, "apply", forgets_entries, CRASHING
    ),
    Mutant("ack before sync", "BP-46 (15)", journal.Journal, "append", ack_before_sync, SLOW_SYNC),
    Mutant("reply before the fence", "D1", B, "_fence", replies_before_fence_is_durable, SLOW_SYNC),
    Mutant("adds taken when fenced", "1.8", H, "refusal_of_add", takes_adds_when_fenced),
    Mutant(
        "fence unchecked once entries are known",
        "1.8",
        H,
        "refusal_of_add",
        fence_of_empty_ledgers_only,
    ),
    Mutant("two handles for one ledger", "BK#4701", D, "meet", one_handle_for_each_request, RACING),
    Mutant(
        "checkpoint without fences", "BK#4843", S, "begin_flush", checkpoint_skips_states, QUIET
    ),
    Mutant(
        "checkpoint mark too far", "BK#4740", S, "_move_checkpoint", checkpoint_at_its_end, CRASHING
    ),
    Mutant("damage answered as absence", "BK#2908", B, "_read_response", damage_is_absence, ROTTEN),
    Mutant("limbo answered as absence", "BP-46", bookie, "absence", limbo_is_absence, ROTTEN),
    Mutant("record looked up unsynced", "1.8 (29)", D, "_record", looks_without_a_sync, BEHIND),
    Mutant("any identity at an address", "BK#4812", B, "handle", any_identity, REPLACED),
    Mutant(
        "other bytes under the same id",
        "BK#1066",
        adder.Adder,
        "_compare",
        takes_other_bytes,
        FORGED,
    ),
    Mutant(
        "LAC part of the identity", "hazard 41", adder.Adder, "_compare", lac_in_the_identity, AGAIN
    ),
    Mutant("any token opens every door", "hazard 42", H, "allows", any_token_will_do, GUARDED),
    Mutant("waiters of long polls kept", "BK#2051", H, "wait_beyond", leaves_waiters, TAILED),
)
