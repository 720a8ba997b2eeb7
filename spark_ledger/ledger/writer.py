"""The writer of a ledger. Signatures first."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bookie_server.api.entry import Buffer
from spark_ledger.errors import LedgerError
from spark_ledger.metadata.ledger_record import LedgerRecord


@dataclass(frozen=True, slots=True)
class MissingCopy:
    """Entries first..last, acknowledged, of which `bookie_id` has not said that it has a copy."""

    first_entry: int
    last_entry: int
    bookie_id: str
    reason: str = ""


class LedgerWriter:
    ledger_id: int
    record: LedgerRecord
    version: int
    last_add_confirmed: int
    last_add_pushed: int
    inflight_bytes: int
    failure: LedgerError | None

    def append(self, payload: Sequence[Buffer] | Buffer, rows: int = 0) -> asyncio.Future[int]:
        raise NotImplementedError

    async def room(self) -> None:
        raise NotImplementedError

    async def fully_replicated(self, timeout_s: float) -> list[MissingCopy]:
        raise NotImplementedError

    async def close(self) -> LedgerRecord:
        raise NotImplementedError
