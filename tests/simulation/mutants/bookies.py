"""Bugs of the storage node: what it promises, what it forgets, what it denies."""

from typing import Any

from bookie_server import bookie, journal, ledger_handle, replay
from tests.simulation.mutants.mutant import Mutant


def ack_before_sync(append: Any) -> Any:
    def appended(self: Any, records: Any) -> Any:
        append(self, records)
        done = self.task.get_loop().create_future()
        done.set_result(None)
        return done

    return appended


def forgets_fences(apply: Any) -> Any:
    async def applied(record: Any, storage: Any) -> None:
        if record.kind is not replay.Kind.FENCE:
            await apply(record, storage)

    return applied


def replies_before_fence_is_durable(fence: Any) -> Any:
    async def fenced(self: Any, handle: Any) -> None:
        if not handle.state.fenced:
            state = handle.fence()
            self._storage.set_state(state)
            self._journal.append([bookie.Record(bookie.Kind.FENCE, state.ledger_id, -1, b"", 0)])

    return fenced


def takes_adds_when_fenced(refusal: Any) -> Any:
    def never_fenced(self: Any, token: bytes, recovery: bool) -> Any:
        return refusal(self, token, True)

    return never_fenced


MUTANTS = (
    Mutant("ack before sync", "BP-46 (15)", journal.Journal, "append", ack_before_sync),
    Mutant("fence forgotten at replay", "BP-46 (12)", replay, "_apply", forgets_fences),
    Mutant(
        "reply before the fence", "D1", bookie.Bookie, "_fence", replies_before_fence_is_durable
    ),
    Mutant(
        "adds taken when fenced",
        "1.8 (14)",
        ledger_handle.LedgerHandle,
        "refusal_of_add",
        takes_adds_when_fenced,
    ),
)
