"""The process that maintains a cluster: upkeep of topics every PASS_S (topic/upkeep/upkeep.py), and
autorecovery (repair/service.py).

Always true: the process keeps one Upkeep as long as it lives, because a new Upkeep would have to
watch each writer for a lease before it may end the writer as abandoned. Of several such processes,
one is elected for the upkeep of topics, and one as the auditor; all of them repair. A pass that
fails deletes no further ledger, and the next pass follows. Upkeep and autorecovery do not wait for
each other.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import time

from spark_ledger.config import client_config
from spark_ledger.errors import LedgerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import take_role
from spark_ledger.process import connect, end_with_parent
from spark_ledger.repair.service import Autorecovery
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.policies import PASS_BYTES
from spark_ledger.topic.upkeep.upkeep import Upkeep

PASS_S = 60.0
SESSION_TIMEOUT_S = 10.0  # after this time another process takes the roles of a killed process
TRY_AGAIN_S, TRY_AGAIN_MAX_S, LONG_RUN_S = 0.5, 30.0, 60.0

log = logging.getLogger(__name__)


async def maintain(
    service_url: str,
    pass_s: float = PASS_S,
    *,
    merge_bytes: int = PASS_BYTES,
) -> None:
    """Trim, checkpoint, clean and merge topics (copying about `merge_bytes` a pass at most), audit
    ledgers and repair under-replicated ledgers, until cancelled.

    Raises errors.Unavailable when the cluster cannot be reached.
    """
    settings = client_config(service_url=service_url, session_timeout_s=SESSION_TIMEOUT_S)
    ledgers = await connect(service_url, settings)
    try:
        autorecovery = await Autorecovery.start(ledgers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(autorecovery.run())
            tasks.create_task(_repeat_upkeep(ledgers, pass_s, merge_bytes))
    finally:
        await ledgers.close()


async def maintain_on(
    service_url: str, *, merge_bytes: int = PASS_BYTES, pause_s: float = TRY_AGAIN_S
) -> None:
    """Run `maintain`, and run it again whenever it fails, after a longer pause each time: for a
    process that no other process restarts."""
    clock_s = asyncio.get_running_loop().time
    wait_s = pause_s
    while True:
        began_s = clock_s()
        try:
            await maintain(service_url, merge_bytes=merge_bytes)
        except LedgerError as failure:
            log.warning("%s", failure)
        except Exception:
            log.exception("a defect ended maintenance, which begins anew: please report the defect")
        if clock_s() - began_s >= LONG_RUN_S:
            wait_s = pause_s
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, TRY_AGAIN_MAX_S)


async def _repeat_upkeep(ledgers: LedgerStore, pass_s: float, merge_bytes: int) -> None:
    client = TopicClient(ledgers, random.Random(os.urandom(16)), lambda: time.time_ns() // 10**6)
    upkeep = Upkeep(client, merge_bytes=merge_bytes)
    try:
        while True:
            await _upkeep_pass(client, upkeep)
            await asyncio.sleep(pass_s)
    finally:
        await upkeep.close()
        await client.close()


async def _upkeep_pass(client: TopicClient, upkeep: Upkeep) -> None:
    try:
        if not await take_role(client.store, paths.MAINTAINER):
            return
        report = await upkeep.once()
        if report.is_eventful:
            log.info("maintenance: %s", report.summary())
        for warning in report.warnings():
            log.warning("maintenance: %s", warning)
    except (LedgerError, StoreError) as error:
        log.warning("a pass of maintenance ended early: %s", error)
    except Exception:
        log.exception("a pass of maintenance ended early: a defect")


def serve(
    service_url: str,
    *,
    merge_bytes: int = PASS_BYTES,
    parent_pipe: bool = False,
) -> None:
    """Maintain the cluster in this process until SIGTERM or SIGINT. With `parent_pipe` (for
    a process that another process starts) the function also ends when standard input is closed, and
    waits for a cluster that is not up yet. Raises as `maintain`."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    if parent_pipe:
        end_with_parent()

    async def work() -> None:
        maintenance_function = maintain_on if parent_pipe else maintain
        maintenance = asyncio.ensure_future(
            maintenance_function(service_url, merge_bytes=merge_bytes)
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, maintenance.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await maintenance

    asyncio.run(work())
