"""Whether the other bookies have the copies that a ledger's record says they have: they are asked
before this one drops its own, for an older record may name bookies that gave theirs up since.

Always true: no response, a refusal, or one entry that a bookie does not have of those that it is to
have means no.
"""

from collections.abc import Awaitable, Callable

from bookie_server.api.messages import StoredRequest, StoredResponse, ids_in
from bookie_server.api.status import Status
from spark_ledger.metadata.ledger_record import LedgerRecord, entries_kept, keeps

WINDOW = 8192  # entries that are asked for, and compared, at a time

Ask = Callable[[StoredRequest], Awaitable[StoredResponse | None]]
"""The response of the bookie that the request names; None: there was none."""


async def nobody_responds(request: StoredRequest) -> StoredResponse | None:
    return None


class Peers:
    """`token` is good to read any ledger."""

    def __init__(self, ask: Ask, token: bytes) -> None:
        self._ask = ask
        self._token = token

    async def have_all(self, record: LedgerRecord) -> bool:
        """Whether each bookie that the CLOSED record names has all of its copies."""
        members = {bookie: None for one in record.fragments for bookie in one.ensemble}
        for bookie_id in members:
            if not await self._has_its_own(record, bookie_id):
                return False
        return True

    async def _has_its_own(self, record: LedgerRecord, bookie_id: str) -> bool:
        assert record.last_entry is not None, "CLOSED"
        for entries, slot in entries_kept(record, bookie_id, record.last_entry):
            for first in range(entries.start, entries.stop, WINDOW):
                window = range(first, min(first + WINDOW, entries.stop))
                if not await self._has(record, bookie_id, slot, window):
                    return False
        return True

    async def _has(self, record: LedgerRecord, bookie_id: str, slot: int, window: range) -> bool:
        request = StoredRequest(
            bookie_id, record.ledger_id, window[0], window[-1], token=self._token
        )
        response = await self._ask(request)
        if response is None or response.status is not Status.OK or response.through < window[-1]:
            return False
        stored = dict.fromkeys(ids_in(response.spans, WINDOW)) if response.spans else {}
        return all(entry in stored for entry in window if keeps(record, slot, entry))
