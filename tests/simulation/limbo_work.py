"""Repair in a run: an auditor and a worker at what bookies list as in limbo, and the end of all
limbo.

Always true: they are the product's own; they work while everything goes wrong. When all ledgers are
closed an operator repairs what is left, with the passwords that he has. In the end nothing is in
limbo any more but ledgers that cannot be closed, and whatever a bookie cleared is whole there (37).
"""

import asyncio

from bookie_server.api import messages as m
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.errors import LedgerError, NoSuchLedger
from spark_ledger.metadata.autorecovery import AutorecoverySettings, repair_tokens
from spark_ledger.metadata.ledger_record import LedgerRecord, derive, entries_kept, should_keep
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.limbo import list_limbo
from spark_ledger.repair.worker import Worker
from tests.kit.limbo_repair import repair
from tests.simulation import invariants
from tests.simulation.ghost import LedgerGhost
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.plan import Plan
from tests.simulation.promises import PASSWORD
from tests.simulation.world import CREDENTIAL, BookieNode, Client, World

NAME = "repairer"
PASS_S = 3.0
SETTINGS = AutorecoverySettings(lost_bookie_delay_s=40.0, repair_bytes_per_s=0)
"""A writer that stands still for half of the delay loses its ledger in limbo: some that hang do.
Nobody is lost: the chaos is over before (healing.py has runs in which many are)."""
TOKENS = repair_tokens(CREDENTIAL)
PASS_S_MAX = 24.0
"""Passes that change nothing come at longer and longer intervals."""
REPAIRED_S = 200.0
"""Simulated seconds in which all that was closed must be whole and out of limbo."""
REPAIRED_OVER_BUDGET_S = 20.0
"""The same beyond the budget, where it may stay in limbo."""


class LimboWork:
    """Of one run."""

    def __init__(self, world: World, plan: Plan, work: LedgerWork) -> None:
        self._world = world
        self._plan = plan
        self._work = work

    async def repair_often(self, client: Client) -> None:
        """As the processes of a cluster do, until the chaos' time is over."""
        auditor, worker = Auditor(client.ledgers, TOKENS), Worker(client.ledgers, TOKENS)
        end = self._world.loop.now + self._plan.chaos_s
        while self._world.loop.now < end:
            await asyncio.sleep(PASS_S)
            try:
                await auditor.look()
                await worker.round()
            except LedgerError as error:
                self._work.met(client, "repair", error)

    async def ends(self) -> None:
        """Everything was audited: what is in limbo is repaired, and what was repaired is whole."""
        client = await self._world.client(NAME)
        over_budget = self._world.ghost.over_budget
        deadline = self._world.loop.now + (REPAIRED_OVER_BUDGET_S if over_budget else REPAIRED_S)
        pause_s, before = PASS_S, [""]
        while left := self._left():
            pause_s = min(2 * pause_s, PASS_S_MAX) if left == before else PASS_S
            before = left
            if self._world.loop.now > deadline:
                invariants.what_is_in_limbo_is_repaired(self._world.ghost, left, REPAIRED_S)
                break
            await client.run(self._repair_all(client), "repairs")
            await asyncio.sleep(pause_s)
        for node in self._world.nodes:
            for ledger_id in self._world.ghost.bookie(node.bookie_id).cleared:
                ledger = self._world.ghost.ledgers[ledger_id]
                if ledger.closed and not ledger.deleted:
                    await self._compare(node, ledger)

    async def _repair_all(self, client: Client) -> None:
        try:
            for one in await list_limbo(client.ledgers.metadata):
                await self._repair(client, one.ledger_id, one.bookie_id)
        except LedgerError as error:
            self._work.met(client, "repair", error)

    async def _repair(self, client: Client, ledger_id: int, bookie_id: str) -> None:
        try:
            await repair(client.ledgers, ledger_id, [bookie_id], self._password(ledger_id))
        except NoSuchLedger:
            return  # its bookie clears it
        except LedgerError as error:
            self._work.met(client, "repair", error)

    def _password(self, ledger_id: int) -> bytes:
        return self._work.password_of(ledger_id) if ledger_id in self._world.ghost.ledgers else b""

    def _left(self) -> list[str]:
        """What is in limbo at the bookies that are there, and could be repaired."""
        found = []
        for node in self._world.nodes:
            if node.bookie is None or node.bookie_id in self._world.ghost.cut_off:
                continue
            if node.bookie.ledgers.every_ledger_state().limbo:
                found.append(f"every ledger at {node.address}")
            for ledger_id, reason in node.bookie.ledgers.limbo_reasons().items():
                ledger = self._world.ghost.ledgers.get(ledger_id)
                if ledger is None or ledger.closed or ledger.deleted:
                    found.append(f"ledger {ledger_id} at {node.address}, {reason}")
        return found

    async def _compare(self, node: BookieNode, ledger: LedgerGhost) -> None:
        """The bookie, asked past the network, has all that belongs to it."""
        ghost, mine = self._world.ghost, self._world.ghost.bookie(node.bookie_id)
        if node.bookie is None:
            return
        # what rots again, or shows it only now, is no fault of the repair, unless it is denied
        missing = await lacking(node, ledger.record, denied=mine.decayed)
        invariants.what_was_cleared_is_whole(ghost, node.bookie_id, ledger.ledger_id, missing)
        if mine.bereft and not missing:
            ghost.meet("copies of a lost directory brought back")


async def lacking(
    node: BookieNode, record: LedgerRecord, first_entry: int | None = None, *, denied: bool = False
) -> list[int]:
    """What the bookie should have and does not deliver, or, `denied`, denies, asked past the
    network; of one fragment only, if its first entry is given."""
    last = record.last_entry
    if last is None:
        last = record.last_fragment.first_entry - 1
    token = derive(PASSWORD).read if record.verifiers is not None else b""
    found = []
    for entries, slot in entries_kept(record, node.bookie_id, last):
        if first_entry not in (None, entries.start):
            continue
        for entry_id in entries:
            if not should_keep(record, slot, entry_id):
                continue
            told = await _told(node, record.ledger_id, entry_id, token)
            if meaning(told) is Meaning.NEGATIVE or not (denied or told is Status.OK):
                found.append(entry_id)
    return found


async def _told(node: BookieNode, ledger_id: int, entry_id: int, token: bytes) -> Status:
    assert node.bookie is not None
    request = m.ReadRequest(node.bookie_id, ledger_id, entry_id, entry_id, 1 << 20, token=token)
    answer = await node.bookie.handle(request)
    assert isinstance(answer, m.ReadResponse)
    return answer.results[0].status if answer.results else answer.status
