"""Ledgers whose end no bookie can decide, and the operator who declares the lost bookies gone.

Always true: such a ledger has a member that lost its disk, or what was on it, and with those whose
tail was torn that is an ack quorum ("Torn beside lost"). Once the lost are declared gone it must
close, with all that was acknowledged: within the budget a copy of it is elsewhere (35).
"""

import asyncio

from spark_ledger.errors import LedgerError
from tests.simulation import invariants
from tests.simulation.ghost import LedgerGhost
from tests.simulation.promises import PASSWORD
from tests.simulation.world import Client, World

RECOVERED_S = 120.0
"""Simulated seconds in which the recovery of one ledger must end."""


class Undecided:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world

    def is_undecidable(self, ledger: LedgerGhost) -> bool:
        """Whether in some write set a member lost its disk, or what was on it, and together with
        those whose tail was torn they are an ack quorum: then what was acked cannot be decided."""
        fragment = ledger.recovered_from or ledger.record.last_fragment
        lost, torn = self._doubtful(ledger.ledger_id)
        for entry_id in range(ledger.record.ensemble_size):
            members = invariants.write_set(ledger.record, entry_id, fragment.ensemble)
            gone = [b for b in members if b in lost or self._gone(b)]
            doubted = [b for b in members if b in torn and b not in gone]
            if gone and len(gone) + len(doubted) >= ledger.ack_quorum:
                return True
        return False

    async def recover_without_the_lost(self, client: Client, ledger: LedgerGhost) -> None:
        """An operator declares that those which lost their disk never come back. All that is judged
        of a ledger is judged of it."""
        ghost, ledger_id = self._world.ghost, ledger.ledger_id
        lost = self._doubtful(ledger_id)[0]
        fragment = ledger.recovered_from or ledger.record.last_fragment
        gone = frozenset(b for b in fragment.ensemble if b in lost or self._gone(b))
        ledger.declared_gone.update(dict.fromkeys(sorted(gone)))
        password = PASSWORD if ledger.record.verifiers is not None else b""
        try:
            async with asyncio.timeout(RECOVERED_S):
                await client.ledgers.recover(ledger_id, password=password, gone=gone)
        except (LedgerError, TimeoutError) as error:
            invariants.every_ledger_can_be_closed(ghost, ledger, error, RECOVERED_S)

    def _gone(self, bookie_id: str) -> bool:
        ghost = self._world.ghost
        return ghost.bookie(bookie_id).wiped or bookie_id in ghost.cut_off

    def _doubtful(self, ledger_id: int) -> tuple[list[str], list[str]]:
        """The bookies that lack what they lost, and those that lack what was torn."""
        lost, torn = [], []
        for node in self._world.nodes:
            handles = node.bookie.ledgers if node.bookie is not None else None
            limbo = handles.limbo(ledger_id)[0] if handles is not None else ""
            if limbo == "lost" or self._world.ghost.bookie(node.bookie_id).rotten:
                lost.append(node.bookie_id)
            elif limbo:
                torn.append(node.bookie_id)
        return lost, torn
