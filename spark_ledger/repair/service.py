"""The service of a process that repairs the cluster: its worker repairs ledgers that are listed as
under-replicated; if the process is elected, it is also the auditor, which lists these ledgers.

Always true: a pass that fails is logged, and the next pass tries again. While the metadata store is
held (metadata/hold.py), no ledger is listed or repaired. The auditor looks while the worker copies,
because during a long copy it must see which bookies register again.
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
from spark_ledger.metadata.store_calls import take_role, unavailable_while
from spark_ledger.repair import limbo, status, work_list
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.limbo import ComparisonResult
from spark_ledger.repair.work_list import Cause, Reason
from spark_ledger.repair.worker import Worker

PASS_S, PASS_MIN_S = 10.0, 0.5
PASSES_PER_DELAY = 10  # passes in the time after which a bookie counts as lost
IDLE_S = 300.0
"""repair_once recovers an open ledger in limbo that gets no entry for this time."""

ALARM_ENDED = "the alarm is over: the bookies are registered again, or were declared lost"

log = logging.getLogger(__name__)


async def tokens_of(ledgers: LedgerStore) -> Tokens:
    """The tokens that repair sends with its requests. Raises Unavailable."""
    with unavailable_while("looking up the credential of repair"):
        if_absent = secrets.token_hex(32)
        credential = await autorecovery.repair_credential(ledgers.metadata, if_absent)
        return autorecovery.repair_tokens(credential)


class Autorecovery:
    """The service of one process, made by `start`. It publishes its findings with `host` and
    `pid`."""

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
        """The service for this process, with this host's clock, unless arguments give others.
        Raises Unavailable."""
        tokens = await tokens_of(ledgers)
        return cls(ledgers, tokens, host or socket.gethostname(), pid or os.getpid(), now_ms)

    async def run(self) -> None:
        """Look and work again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._repeat(action)) for action in (self.look, self.work)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel(*tasks)

    async def look(self) -> None:
        """One pass of the auditor, if this process is elected. Raises LedgerError."""
        await self._guard.refresh()  # raises MetadataHeld
        if await take_role(self._ledgers.metadata, paths.AUDITOR):
            report = await self._auditor.look()
            if report.alarm != self._alarm:
                self._alarm = report.alarm
                log.error("%s", report.alarm or ALARM_ENDED)
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
        """One pass of the worker. Raises LedgerError."""
        await self._guard.refresh()  # raises MetadataHeld
        await self._worker.round()

    async def _repeat(self, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await action()
            except StoreError as failure:
                log.warning("a pass of autorecovery ended early: %r", failure)
            except LedgerError as failure:
                log.warning("a pass of autorecovery ended early: %s", failure)
            except Exception:
                log.exception("a pass of autorecovery ended early: a defect")
            await asyncio.sleep(await self._pause_s())

    async def _pause_s(self) -> float:
        """The pause between passes: PASS_S, or less if `lost_bookie_delay_s` is short."""
        try:
            settings = await autorecovery.read_settings(self._ledgers.metadata)
        except (StoreError, BadAutorecoverySettings):
            return PASS_S
        return min(PASS_S, max(PASS_MIN_S, settings.lost_bookie_delay_s / PASSES_PER_DELAY))


class LimboRepair(NamedTuple):
    """The result of repair_once: the results of its comparisons, and the ledgers that it did not
    repair (`left`), each with the reason."""

    repaired: list[ComparisonResult]
    left: dict[int, str]


async def repair_once(ledgers: LedgerStore, idle_s: float = IDLE_S) -> LimboRepair:
    """Repair each ledger in limbo once, for an operator who does not wait for the workers of the
    cluster. If it finds open ledgers, it waits `idle_s` and recovers the ledgers that got no entry
    in that time. Raises Unavailable, ClientClosed."""
    worker = Worker(ledgers, await tokens_of(ledgers), idle_s=idle_s, always=True)
    reasons: dict[int, list[Reason]] = {}
    for listing in await limbo.list_limbo(ledgers.metadata):
        reason = Reason(Cause.LIMBO, listing.bookie_id, listing.since_ms)
        reasons.setdefault(listing.ledger_id, []).append(reason)
    done = LimboRepair([], {})
    with unavailable_while("listing ledgers in limbo as under-replicated"):
        for ledger_id in sorted(reasons):
            await work_list.add(ledgers.metadata, ledger_id, reasons[ledger_id])
    for ledger_id in sorted(reasons):
        await _work_at(worker, ledger_id, done)
    open_ledgers = [i for i in done.left if worker.is_waiting_to_close(i)]
    if open_ledgers:
        log.warning(
            "open ledgers are in limbo: waiting %s s to see whether they get entries", idle_s
        )
        await asyncio.sleep(idle_s)
        for ledger_id in open_ledgers:
            await _work_at(worker, ledger_id, done)
    return done


async def _work_at(worker: Worker, ledger_id: int, done: LimboRepair) -> None:
    outcome = await worker.work_at(ledger_id)
    done.left.pop(ledger_id, None)
    if outcome is None:
        done.left[ledger_id] = "a worker of the cluster repairs it now"
    elif outcome.repaired:
        done.repaired.extend(outcome.repaired)
    elif outcome.why:
        done.left[ledger_id] = outcome.why
