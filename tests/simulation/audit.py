"""The end of a run: everything is healed, and every ledger is opened, read and compared.

Always true: within the budget of losses every ledger can be recovered (but where a lost disk and
torn tails together may have been an ack quorum) and every acked entry read,
through a new reader and through one opened long ago; beyond it a ledger may be unavailable, with an
error that says so, but what is read is right and nothing ends early; in the end nobody waits and
nothing is pending any more.
"""

import asyncio
from typing import Any

from spark_ledger.errors import LedgerError
from tests.kit.history import History
from tests.simulation import invariants
from tests.simulation.ghost import LedgerGhost
from tests.simulation.invariants import Violation
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.undecided import RECOVERED_S, Undecided
from tests.simulation.world import Client, World

RECOVERED_OVER_BUDGET_S = 12.0
"""The same beyond the budget, where giving up is allowed."""
AGAIN_S = 5.0
"""A recovery that could not be decided is tried again after so long."""
AT_REST_S = 60.0
"""Simulated seconds in which what is left over must be gone."""


class Audit:
    """Of one run."""

    def __init__(self, world: World, work: LedgerWork, auditor: Client) -> None:
        self._world = world
        self._work = work
        self._auditor = auditor
        self._undecided = Undecided(world)

    async def every_ledger(self) -> None:
        """Recover and read every ledger that is there, and compare with what was acknowledged."""
        for ledger_id, ledger in list(self._world.ghost.ledgers.items()):
            if not ledger.deleted:
                await self._auditor.run(self._ledger(ledger), f"audits {ledger_id}")
        for ledger_id, (client, reader) in self._work.old_readers.items():
            ledger = self._world.ghost.ledgers[ledger_id]
            if client.process.alive and ledger.closed and not ledger.deleted:
                await client.run(self._old_reader(client, reader, ledger), "reads again")
        history = self._history()
        invariants.what_was_promised_of_ledgers_is_read(self._world.ghost, history)

    def _history(self) -> History:
        """Of every ledger: what was acked and when, and what was read of it in the run and now."""
        history = History()
        for ledger_id, ledger in self._world.ghost.ledgers.items():
            log = f"ledger {ledger_id}"
            for entry_id, acked_s in enumerate(ledger.acked_s):
                history.promised(log, entry_id, at=acked_s, place=(0, entry_id))
            history.attempted(log, range(len(ledger.acked_s), len(ledger.submitted)))
            for read in ledger.reads:
                rows = [((0, entry_id), which) for entry_id, which in read.entries.items()]
                history.read(log, rows, begun=read.begun_s, whole=read.whole, start=0)
        return history

    async def _ledger(self, ledger: LedgerGhost) -> None:
        ghost = self._world.ghost
        patience_s = RECOVERED_OVER_BUDGET_S if ghost.over_budget else RECOVERED_S
        deadline = self._world.loop.now + patience_s
        while True:
            begun_s = self._world.loop.now
            try:
                async with asyncio.timeout(deadline - begun_s):
                    reader = await self._auditor.ledgers.open(
                        ledger.ledger_id,
                        recover=True,
                        password=self._work.password_of(ledger.ledger_id),
                    )
                    last = reader.last_add_confirmed
                    read = await self._work.read(
                        self._auditor, reader, 0, last, recovered_s=begun_s
                    )
                break
            except (LedgerError, TimeoutError) as error:
                if self._world.loop.now > deadline - AGAIN_S:
                    if self._give_up(ledger, error):
                        return
                    await self._undecided.recover_without_the_lost(self._auditor, ledger)
                    ghost.meet("audit: closed with a bookie declared gone")
                    deadline = self._world.loop.now + patience_s
                await asyncio.sleep(AGAIN_S)
        invariants.every_ledger_can_be_closed(ghost, ledger, None, patience_s)
        if any(told.aborted for told in ledger.recoveries.values()):
            invariants.crashed_recoveries_change_nothing(ghost, ledger, last, read)
        invariants.all_opens_end_at_the_same_entry(ghost, ledger, last)
        custom = self._work.custom.get(ledger.ledger_id)
        if custom is not None and custom != reader.record.custom:
            raise Violation("3", f"ledger {ledger.ledger_id} has custom {reader.record.custom}")
        if ghost.over_budget and len(read) <= last:
            ghost.meet("audit: an entry is unavailable, over budget")
            return
        wanted = range(last + 1)
        invariants.a_confirmed_read_ends_in_bytes(ghost, ledger, wanted, len(read))
        invariants.an_acked_entry_is_readable_byte_for_byte(ghost, ledger, read)

    def _give_up(self, ledger: LedgerGhost, error: BaseException) -> bool:
        """Whether nothing more can be done; if so, that was allowed."""
        ghost = self._world.ghost
        if not ghost.over_budget and self._undecided.is_undecidable(ledger):
            ghost.meet("audit: a torn tail beside a lost disk leaves the end undecided")
            return False
        invariants.every_ledger_can_be_closed(ghost, ledger, error, RECOVERED_S)
        self._world.ghost.meet("audit: a ledger is unavailable, over budget")
        return True

    async def _old_reader(self, client: Client, reader: Any, ledger: LedgerGhost) -> None:
        """What a reader delivers that was opened before the ensembles changed."""
        last = ledger.record.last_entry
        assert last is not None
        stale = len(reader.record.fragments) < len(ledger.record.fragments)
        read = await self._work.read(client, reader, 0, last, known_confirmed=last)
        self._world.ghost.meet("old reader with an old record" if stale else "old reader")
        if not self._world.ghost.over_budget:
            wanted = range(last + 1)
            invariants.a_confirmed_read_ends_in_bytes(self._world.ghost, ledger, wanted, len(read))

    # -- what is left over -----------------------------------------------------------------------

    async def nothing_is_left(self) -> None:
        """No long poll waits, no bytes are in flight, no call is under way (34, and 38 in part)."""
        deadline = self._world.loop.now + AT_REST_S
        while left := self._left():
            if self._world.loop.now > deadline:
                waiting = [f"{what}: {count}" for what, count in left.items()]
                invariants.everything_under_way_ends(self._world.ghost, waiting, AT_REST_S)
            await asyncio.sleep(2)

    def _left(self) -> dict[str, int]:
        ghost = self._world.ghost  # an open writer announces to its members, also in vain
        cut_off = [ghost.homes[bookie].address for bookie in ghost.cut_off]
        counts = {"calls under way": self._world.network.under_way(cut_off)}
        for node in self._world.nodes:
            if node.bookie is not None:
                counts[f"waiters at {node.address}"] = node.waiters
                counts[f"requests at {node.address}"] = node.bookie.under_way
                counts[f"request bytes at {node.address}"] = node.bookie.received.used
                counts[f"reads at {node.address}"] = node.bookie.responses.used
        for client, writer in self._work.writers:
            if client.process.alive:
                counts[f"bytes in flight of {writer.ledger_id}"] = writer.inflight_bytes
                counts[f"bytes held by {writer.ledger_id}"] = writer.held_bytes
        return {what: count for what, count in counts.items() if count}
