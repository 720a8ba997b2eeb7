"""Repair of one ledger in limbo, by hand."""

from collections.abc import Sequence

from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.ledger_record import derive
from spark_ledger.repair.limbo import ComparisonResult, compare_and_repair


async def repair(
    ledgers: LedgerStore, ledger_id: int, bookie_ids: Sequence[str], password: bytes = b""
) -> list[ComparisonResult]:
    """Close the ledger, then bring its copies on these bookies back and clear its limbo there; a
    bookie where it is not in limbo is not compared. Raises what LedgerStore.recover raises."""
    closed = await ledgers.recover(ledger_id, password=password)
    return await compare_and_repair(ledgers, closed, bookie_ids, derive(password), everything=False)
