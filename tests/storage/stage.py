"""A node and its model, with short ways to do one thing after the other, for written scenarios.

Always true: what is asked here is waited for and judged; `crash` and `come_back` verify everything
that was ever promised, as every case does.
"""

from collections.abc import Sequence

from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.logs.index import LedgerState
from tests.simulation.disk import Keep
from tests.storage.case import Case
from tests.storage.model import Begun, Broken, entry_of
from tests.storage.rig import Shape


class Stage(Case):
    """Made with a Shape; `start` it first."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__(bytes(4), shape)
        self.rig.rng.seed(seed)
        self.states: list[LedgerState] = []
        self.walks = False
        """A start of the node is over when it knows which ledgers are in limbo."""

    async def start(self) -> None:
        await self.rig.start()

    async def add(
        self,
        ledger_id: int,
        entry_ids: Sequence[int],
        *,
        size: int = 900,
        recovery: bool = False,
        variant: int = 0,
    ) -> None:
        """One frame of the entries. Judged when answered; whether they are taken is not asked."""
        ledger = self.model.ledgers[ledger_id]
        adds, sent = [], []
        for entry_id in entry_ids:
            entry = entry_of(ledger_id, entry_id, variant, entry_id - 1, size)
            self.model.sends(ledger, entry_id, entry, entry_id - 1)
            adds.append(m.Add([entry], recovery))
            sent.append((entry_id, entry))
        await self._added(ledger, adds, sent, Begun(recovery, ledger.fenced, ledger.buried))

    async def add_again(self, ledger_id: int) -> None:
        """Somebody copies to the node what it had, or has."""
        ledger = self.model.ledgers[ledger_id]
        sent = [(entry_id, entries[0]) for entry_id, entries in ledger.sent.items()]
        adds = [m.Add([entry], recovery=True) for _, entry in sent]
        await self._added(ledger, adds, sent, Begun(True, ledger.fenced, ledger.buried))

    async def fence(self, ledger_id: int) -> None:
        self.model.ledgers[ledger_id].fence_asked = True
        await self._fenced(self.model.ledgers[ledger_id], by_read=False)

    async def announce(self, ledger_id: int, lac: int) -> None:
        ledger = self.model.ledgers[ledger_id]
        ledger.lac_sent = max(ledger.lac_sent, lac)
        await self._write_lac(ledger, lac)

    def delete(self, ledger_id: int) -> None:
        self.model.ledgers[ledger_id].deleted = True
        self.rig.records.drop_ledger(ledger_id)

    async def served(self, ledger_id: int) -> list[int]:
        """The entries of the ledger that a read gives."""
        ledger = self.model.ledgers[ledger_id]
        found = await self._read_range(ledger, 0, ledger.next_entry + 1)
        return [entry_id for entry_id, result in found.items() if result.status is Status.OK]

    async def reads(self) -> None:
        """Every ledger, judged."""
        for ledger in self.model.ledgers.values():
            await self._read_range(ledger, 0, ledger.next_entry)

    async def repaired(self, ledger_id: int) -> None:
        """If the ledger is in limbo it is compared, what it lacks is copied, and limbo cleared."""
        ledger = self.model.ledgers[ledger_id]
        if not ledger.clearing:
            await self._compare(ledger, repair=True, clear=True)

    def is_at_rest(self) -> None:
        """Nothing is under way, so nothing counts as waiting."""
        held = self.rig.bookie.responses.used
        if held:
            raise Broken(f"{held} bytes of responses are counted, and no read is under way")

    async def flushed(self) -> None:
        """Everything stored so far is in its final place, and the checkpoint past it."""
        await self.rig.flush()

    async def crash(self, keep: Keep, seed: int = 0) -> None:
        """Die, start again, verify."""
        self.rig.crash(keep, seed)
        self.model.crashed(power=keep != "all")
        await self.back()

    async def back(self) -> None:
        """Start again, verify."""
        await self._come_back(again=False)

    async def _started(self) -> None:
        if self.walks:
            await self.rig.walked()

    async def verify(self) -> None:
        await self._verify(restarted=False)
        await self._works()
