"""What a cluster that is up does for itself, every PASS_S: topic/upkeep/upkeep.py, repair/limbo.py.

Always true: one observer for as long as the cluster is up, so that an abandoned writer can be told
from one that another observer merely has not seen yet; of several only the elected one works; a
pass that fails has deleted nothing more and is followed by the next.
"""

import asyncio
import logging
import os
import random
import time

from spark_ledger.errors import LedgerError
from spark_ledger.ledger.connect import connect
from spark_ledger.metadata import paths
from spark_ledger.metadata.store_calls import elected
from spark_ledger.repair.limbo_janitor import LimboJanitor
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.upkeep.merging import PASS_BYTES
from spark_ledger.topic.upkeep.upkeep import Upkeep

PASS_S = 60.0

log = logging.getLogger(__name__)


async def maintain(
    service_url: str, pass_s: float = PASS_S, *, merge_bytes: int = PASS_BYTES
) -> None:
    """Let go, checkpoint, clean, merge (copying `merge_bytes` a pass at most, about), and repair
    what is in limbo, until cancelled.

    Raises errors.Unavailable when the cluster cannot be reached.
    """
    ledgers = await connect(service_url)
    client = TopicClient(ledgers, random.Random(os.urandom(16)), lambda: time.time_ns() // 10**6)
    upkeep = Upkeep(client, merge_bytes=merge_bytes)
    limbo = LimboJanitor(ledgers)
    try:
        while True:
            await _pass(client, upkeep, limbo)
            await asyncio.sleep(pass_s)
    finally:
        await upkeep.close()
        await client.close()
        await ledgers.close()


async def _pass(client: TopicClient, upkeep: Upkeep, limbo: LimboJanitor) -> None:
    try:
        if not await elected(client.store, paths.MAINTAINER):
            return
        report = await upkeep.once()
        if report.eventful:
            log.info("maintenance: %s", report.summary())
        for warning in report.warnings():
            log.warning("maintenance: %s", warning)
    except LedgerError as error:
        log.warning("a pass of maintenance ended early: %s", error)
    await _repair(limbo)


async def _repair(limbo: LimboJanitor) -> None:
    try:
        await limbo.look()
    except LedgerError as error:
        log.warning("repairing what is in limbo ended early: %s", error)
