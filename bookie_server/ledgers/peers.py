"""Whether the other bookies have the copies that a ledger's record assigns to them. This bookie
sends them requests before it drops its own copies: an old record may name bookies that gave up
their copies.

Always true: the result is False if a bookie does not respond, refuses, or lacks a single entry that
it should have.
"""

from collections.abc import Awaitable, Callable

from bookie_server.api.messages import StoredRequest, StoredResponse, ids_in
from bookie_server.api.status import Status
from spark_ledger.metadata.ledger_record import LedgerRecord, entries_kept, should_keep

WINDOW = 8192  # entries of one request and comparison

Ask = Callable[[StoredRequest], Awaitable[StoredResponse | None]]
"""The response of the bookie that the request names; None: the bookie did not respond."""


async def no_response(request: StoredRequest) -> StoredResponse | None:
    return None


class Peers:
    """Sends requests to the other bookies. `token` grants reads of any ledger."""

    def __init__(self, ask: Ask, token: bytes) -> None:
        self._ask = ask
        self._token = token

    async def have_all(self, record: LedgerRecord) -> bool:
        """Whether each bookie that the CLOSED record names has all of its copies."""
        members = {bookie: None for fragment in record.fragments for bookie in fragment.ensemble}
        for bookie_id in members:
            if not await self._has_its_copies(record, bookie_id):
                return False
        return True

    async def _has_its_copies(self, record: LedgerRecord, bookie_id: str) -> bool:
        assert record.last_entry is not None, "CLOSED"
        for entries, slot in entries_kept(record, bookie_id, record.last_entry):
            for first in range(entries.start, entries.stop, WINDOW):
                window = range(first, min(first + WINDOW, entries.stop))
                if not await self._has_window(record, bookie_id, slot, window):
                    return False
        return True

    async def _has_window(
        self, record: LedgerRecord, bookie_id: str, slot: int, window: range
    ) -> bool:
        request = StoredRequest(
            bookie_id, record.ledger_id, window[0], window[-1], token=self._token
        )
        response = await self._ask(request)
        if response is None or response.status is not Status.OK or response.through < window[-1]:
            return False
        stored = dict.fromkeys(ids_in(response.spans, WINDOW)) if response.spans else {}
        return all(entry in stored for entry in window if should_keep(record, slot, entry))
