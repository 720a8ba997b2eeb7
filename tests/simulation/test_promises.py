"""What a restarted bookie is judged by, and what of its answers decides nothing."""

import asyncio
from types import SimpleNamespace

import pytest

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from tests.simulation import invariants, promises
from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants import Violation


def judged(answer: m.ReadLacResponse) -> None:
    """A bookie that once replied to the fence of ledger 1 answers so after its restart."""
    ghost = Ghost()
    record = LedgerRecord(1, 1, 1, 1, (Fragment(0, ("a",)),))
    ghost.ledgers[1] = LedgerGhost(1, 1, 1, record)
    ghost.bookie("a").fence_replied[1] = 7

    async def handle(request):
        return answer

    def judge(invariant, *args):
        invariant(ghost, ghost.bookie("a"), *args)

    every = SimpleNamespace(every_ledger_state=lambda: SimpleNamespace(limbo=""))
    bookie = SimpleNamespace(handle=handle, ledgers=every)
    world = SimpleNamespace(ghost=ghost, store=SimpleNamespace(peek=lambda path: b"its record"))
    node = SimpleNamespace(bookie_id="a", world=world, judge=judge)
    asyncio.run(promises.check(node, bookie))


def test_a_bookie_that_answers_without_its_fence_has_forgotten_it():
    judged(m.ReadLacResponse(Status.OK, -1, True))
    with pytest.raises(Violation, match="invariant 13"):
        judged(m.ReadLacResponse(Status.OK, -1, False))


def test_an_error_of_the_node_does_not_say_that_it_forgot_its_fence():
    judged(m.ReadLacResponse(Status.IO_ERROR, reason="its journal failed just now"))


def test_a_copy_shown_to_repair_is_a_promise_after_a_fence_or_once_limbo_is_cleared():
    """Without either it may be in memory alone: its add waits for a slow disk, and a crash takes
    it; the bookie has acknowledged nothing then."""
    record = LedgerRecord(1, 1, 1, 1, (Fragment(0, ("a",)),))

    def denied(*, fenced: bool, cleared: bool) -> None:
        ghost, ledger = Ghost(), LedgerGhost(1, 1, 1, record)
        bookie = ghost.bookie("a")
        ledger.shows_copy(bookie, 5, 7, fenced=fenced)
        if cleared:
            ledger.cleared_at(bookie, 8)
        invariants.what_was_acknowledged_is_never_denied(ghost, bookie, ledger, 5, 9)

    denied(fenced=False, cleared=False)
    for fenced, cleared in ((True, False), (False, True)):
        with pytest.raises(Violation, match="invariant 16"):
            denied(fenced=fenced, cleared=cleared)
