"""The reader of a ledger. Signatures first."""

from collections.abc import AsyncIterator

from bookie_server.api.entry import Entry
from spark_ledger.metadata.ledger_record import LedgerRecord


class LedgerReader:
    ledger_id: int
    record: LedgerRecord
    version: int
    last_add_confirmed: int
    is_closed: bool

    async def refresh_last_add_confirmed(self) -> int:
        raise NotImplementedError

    def read(
        self, first: int, last: int, *, known_confirmed: int | None = None
    ) -> AsyncIterator[tuple[int, Entry]]:
        raise NotImplementedError
