"""What a cluster that is up does for itself: the janitors' passes, every PASS_S.

Always true: one observer for as long as the cluster is up, so that an abandoned writer can be told
from one that another observer merely has not seen yet; a pass that fails has deleted nothing more
and is followed by the next.
"""

import asyncio
import logging
import os
import random

from spark_ledger.errors import LedgerError
from spark_ledger.ledger.connect import connect
from spark_ledger.repair.limbo_janitor import LimboJanitor
from spark_ledger.topic.janitor import Janitor

PASS_S = 60.0

log = logging.getLogger(__name__)


async def maintain(service_url: str, pass_s: float = PASS_S) -> None:
    """Clean, and repair what is in limbo, until cancelled.

    Raises errors.Unavailable when the cluster cannot be reached.
    """
    ledgers = await connect(service_url)
    janitor = Janitor(ledgers.metadata, ledgers, random.Random(os.urandom(16)))
    limbo = LimboJanitor(ledgers)
    try:
        while True:
            await _clean(janitor)
            await _repair(limbo)
            await asyncio.sleep(pass_s)
    finally:
        await ledgers.close()


async def _clean(janitor: Janitor) -> None:
    try:
        report = await janitor.clean()
    except LedgerError as error:
        log.warning("the janitor's pass ended early: %s", error)
        return
    if report.condemned or report.deleted or report.refused:
        log.info("janitor: %s", report)


async def _repair(limbo: LimboJanitor) -> None:
    try:
        await limbo.look()
    except LedgerError as error:
        log.warning("repairing what is in limbo ended early: %s", error)
