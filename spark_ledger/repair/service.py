"""The service of a process that heals the cluster: it works at the list and, if it is elected, is
the auditor that fills the list.

Always true: a pass that fails is logged, and the next pass tries again; while the metadata store is
held (metadata/hold.py) nothing is listed or repaired; the auditor looks while this process copies,
because during a long copy it must see which bookies come back.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from spark_ledger.async_tasks import cancel
from spark_ledger.errors import LedgerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import BadAutorecoverySettings
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.ledger_record import Tokens
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import elected, reachable
from spark_ledger.repair import limbo, status, work_list
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.limbo import Repaired
from spark_ledger.repair.work_list import Cause, Reason
from spark_ledger.repair.worker import Worker

PASS_S, PASS_MIN_S = 10.0, 0.5
PASSES_A_DELAY = 10
IDLE_S = 300.0

log = logging.getLogger(__name__)


async def tokens_of(ledgers: LedgerStore) -> Tokens:
    """The tokens that repair sends with its requests. Raises Unavailable."""
    with reachable("looking up the credential of repair"):
        new = secrets.token_hex(32)
        return autorecovery.repair_tokens(
            await autorecovery.repair_credential(ledgers.metadata, new)
        )


class Autorecovery:
    """The service of one process, which is `pid` of `host` to others. Made by `start`."""

    def __init__(
        self,
        ledgers: LedgerStore,
        tokens: Tokens,
        host: str,
        pid: int,
        now_ms: Callable[[], int] | None,
    ) -> None:
        self._ledgers = ledgers
        self._host, self._pid = host, pid
        self._auditor = Auditor(ledgers, tokens, now_ms)
        self._worker = Worker(ledgers, tokens)
        self._guard = ClusterGuard(ledgers.metadata)
        self._alarm = ""

    @classmethod
    async def start(
        cls,
        ledgers: LedgerStore,
        host: str = "",
        pid: int = 0,
        now_ms: Callable[[], int] | None = None,
    ) -> "Autorecovery":
        """Without arguments: for this process, with this host's clock. Raises Unavailable."""
        tokens = await tokens_of(ledgers)
        return cls(ledgers, tokens, host or socket.gethostname(), pid or os.getpid(), now_ms)

    async def run(self) -> None:
        """Look and work again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._again(once)) for once in (self.look, self.work)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)

    async def look(self) -> None:
        """One look, if this process is the auditor. Raises LedgerError."""
        await self._guard.refresh()
        if await elected(self._ledgers.metadata, paths.AUDITOR):
            report = await self._auditor.look()
            if report.alarm != self._alarm:
                self._alarm = report.alarm
                log.error("%s", report.alarm or "the bookies that were gone are back")
            findings = status.Findings(
                host=self._host,
                pid=self._pid,
                absent=report.absent,
                lost=tuple(sorted(report.lost)),
                too_many=tuple(sorted(report.too_many)),
                unlisted=report.unlisted,
            )
            await status.publish(self._ledgers.metadata, findings)

    async def work(self) -> None:
        """One round of work. Raises LedgerError."""
        await self._guard.refresh()
        await self._worker.round()

    async def _again(self, once: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await once()
            except StoreError as failure:
                log.warning("a pass of autorecovery ended early: %r", failure)
            except LedgerError as failure:
                log.warning("a pass of autorecovery ended early: %s", failure)
            except Exception:
                log.exception("a pass of autorecovery ended early: a defect")
            await asyncio.sleep(await self._pause_s())

    async def _pause_s(self) -> float:
        """Short enough for the cluster's delay to take effect."""
        try:
            settings = await autorecovery.read_settings(self._ledgers.metadata)
        except (StoreError, BadAutorecoverySettings):
            return PASS_S
        return min(PASS_S, max(PASS_MIN_S, settings.lost_bookie_delay_s / PASSES_A_DELAY))


class Pass(NamedTuple):
    """The results of the comparisons, and the ledgers that were left alone, each with the
    reason."""

    repaired: list[Repaired]
    left: dict[int, str]


async def repair_once(ledgers: LedgerStore, idle_s: float = IDLE_S) -> Pass:
    """Repair each ledger in limbo once, for an operator who does not wait for the workers of the
    cluster. If there are open ledgers it takes `idle_s`. Raises Unavailable, ClientClosed."""
    worker = Worker(ledgers, await tokens_of(ledgers), idle_s=idle_s, always=True)
    reasons: dict[int, list[Reason]] = {}
    for listing in await limbo.listed(ledgers.metadata):
        reason = Reason(Cause.LIMBO, listing.bookie_id, listing.since_ms)
        reasons.setdefault(listing.ledger_id, []).append(reason)
    done = Pass([], {})
    with reachable("listing what is in limbo as under-replicated"):
        for ledger_id in sorted(reasons):
            await work_list.add(ledgers.metadata, ledger_id, reasons[ledger_id])
    for ledger_id in sorted(reasons):
        await _work_at(worker, ledger_id, done)
    open_ones = [ledger_id for ledger_id in done.left if worker.watches(ledger_id)]
    if open_ones:
        log.warning("open ledgers are in limbo: whether they move is watched for %s s", idle_s)
        await asyncio.sleep(idle_s)
        for ledger_id in open_ones:
            await _work_at(worker, ledger_id, done)
    return done


async def _work_at(worker: Worker, ledger_id: int, done: Pass) -> None:
    outcome = await worker.work_at(ledger_id)
    done.left.pop(ledger_id, None)
    if outcome is None:
        done.left[ledger_id] = "a worker of the cluster repairs it now"
    elif outcome.repaired:
        done.repaired.extend(outcome.repaired)
    elif outcome.why:
        done.left[ledger_id] = outcome.why
