"""What a process that heals the cluster does all the time: it works at the list, and, if it is
elected, it is the auditor who fills it.

Always true: what fails is said and tried again with the next pass; nothing here waits for a pass of
anybody else.
"""

import asyncio
import logging
import secrets

from spark_ledger.errors import LedgerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import elected, reachable
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.worker import Worker

PASS_S, PASS_MIN_S = 10.0, 0.5
PASSES_A_DELAY = 10

log = logging.getLogger(__name__)


class Autorecovery:
    """Of one process. Made by `start`."""

    def __init__(self, ledgers: LedgerStore, credential: str) -> None:
        self._ledgers = ledgers
        tokens = autorecovery.repair_tokens(credential)
        self._auditor = Auditor(ledgers, tokens)
        self._worker = Worker(ledgers, tokens)
        self._alarm = ""

    @classmethod
    async def start(cls, ledgers: LedgerStore) -> "Autorecovery":
        """Raises Unavailable."""
        with reachable("looking up the credential of repair"):
            new = secrets.token_hex(32)
            return cls(ledgers, await autorecovery.repair_credential(ledgers.metadata, new))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(await self._pause_s())

    async def once(self) -> None:
        """One look, if this process is the auditor, and one round of work."""
        try:
            if await elected(self._ledgers.metadata, paths.AUDITOR):
                report = await self._auditor.look()
                if report.alarm != self._alarm:
                    self._alarm = report.alarm
                    log.error("%s", report.alarm or "the bookies that were gone are back")
            await self._worker.round()
        except LedgerError as failure:
            log.warning("a pass of autorecovery ended early: %s", failure)

    async def _pause_s(self) -> float:
        """Short enough for the delay to count."""
        try:
            settings = await autorecovery.read_settings(self._ledgers.metadata)
        except (StoreError, autorecovery.BadSettings):
            return PASS_S
        return min(PASS_S, max(PASS_MIN_S, settings.lost_bookie_delay_s / PASSES_A_DELAY))
