"""The janitor of ledgers in limbo: which of those that bookies list are repaired now.

Always true:
- an open ledger whose writer moves is left alone: it is recovered only after this observer saw
  neither its record nor its last add confirmed change for `idle_s`; one that is marked
  IN_RECOVERY, or that is CLOSED, is repaired at once;
- only its owner may repair a ledger with a password: it is named once, with the command;
- a ledger that was deleted is cleared by its bookie itself;
- what hinders one ledger hinders no other, and the next pass tries again.
"""

import asyncio
import logging
from typing import NamedTuple

from spark_ledger.errors import DataUnavailable, LedgerError, NoSuchLedger
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.ledger_record import LedgerState
from spark_ledger.repair.limbo import Repaired, listed, repair

IDLE_S = 300.0
_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """What an open ledger looked like, and since when it does (the loop's clock)."""

    version: int
    last_add_confirmed: int
    since_s: float


class Pass(NamedTuple):
    """What was tried, and the ledgers that were left alone: why."""

    repaired: list[Repaired]
    left: dict[int, str]


async def repair_once(ledgers: LedgerStore, idle_s: float = IDLE_S) -> Pass:
    """Repair what is listed, each once: for who has no janitor that lives on. If there are open
    ledgers it takes `idle_s`. Raises Unavailable, ClientClosed."""
    janitor = LimboJanitor(ledgers, idle_s)
    repaired = await janitor.look()
    if janitor.watches_open:
        _log.warning("open ledgers are in limbo: whether they move is watched for %s s", idle_s)
        tried = [one[:2] for one in repaired]
        await asyncio.sleep(idle_s)
        repaired += [one for one in await janitor.look() if one[:2] not in tried]
    return Pass(repaired, dict(janitor.left))


class LimboJanitor:
    """One observer; it must live on from pass to pass."""

    def __init__(self, ledgers: LedgerStore, idle_s: float = IDLE_S) -> None:
        self._ledgers = ledgers
        self._idle_s = idle_s
        self._seen: dict[int, _Seen] = {}
        self._named: dict[int, None] = {}  # ledgers with a password
        self.left: dict[int, str] = {}
        """Ledgers that the last pass left alone: why."""

    @property
    def watches_open(self) -> bool:
        """Whether the last pass left an open ledger alone that may be recovered later."""
        return any(ledger_id in self._seen for ledger_id in self.left)

    async def look(self) -> list[Repaired]:
        """One pass over what is listed; what was tried. Raises Unavailable, ClientClosed."""
        bookies: dict[int, list[str]] = {}
        for one in await listed(self._ledgers.metadata):
            bookies.setdefault(one.ledger_id, []).append(one.bookie_id)
        self._seen = {i: seen for i, seen in self._seen.items() if i in bookies}
        self.left = {}
        results = []
        for ledger_id in sorted(bookies):
            try:
                if await self._is_due(ledger_id):
                    results += await repair(self._ledgers, ledger_id, bookies[ledger_id])
            except NoSuchLedger:
                continue  # its bookie clears it
            except LedgerError as failure:
                self.left[ledger_id] = failure.what
                _log.warning("ledger %d stays in limbo for now: %s", ledger_id, failure.what)
        for result in results:
            _log.log(logging.INFO if result.cleared else logging.WARNING, "limbo: %s", result)
        return results

    async def _is_due(self, ledger_id: int) -> bool:
        known = await self._ledgers.record(ledger_id, fresh=True)
        if known.record.verifiers is not None:
            if ledger_id not in self._named:
                _log.warning(
                    "ledger %d is in limbo and has a password: run `spark-ledger ledger recover"
                    " %d --password ...`",
                    *(ledger_id, ledger_id),
                )
            self._named[ledger_id] = None
            self.left[ledger_id] = "it has a password: `ledger recover ID --password ...`"
            return False
        if known.record.state is not LedgerState.OPEN:
            return True
        seen = _Seen(known.version, await self._confirmed(ledger_id), self._now())
        before = self._seen.get(ledger_id)
        if before is None or before[:2] != seen[:2]:
            before = self._seen[ledger_id] = seen
        due = seen.since_s - before.since_s >= self._idle_s
        if not due:
            self.left[ledger_id] = "it is open, and its writer may live"
        return due

    async def _confirmed(self, ledger_id: int) -> int:
        reader = await self._ledgers.open(ledger_id, recover=False)
        try:
            return await reader.refresh_last_add_confirmed()
        except DataUnavailable:
            return reader.last_add_confirmed

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
