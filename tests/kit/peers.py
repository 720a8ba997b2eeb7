"""Other bookies, as one that asks them before it drops its copies hears them."""

from bookie_server.api.messages import StoredRequest, StoredResponse
from bookie_server.api.status import Status


async def has_everything(request: StoredRequest) -> StoredResponse:
    """The response of a bookie that has all copies of the ledger."""
    entries = (request.first_entry, request.last_entry)
    return StoredResponse(Status.OK, request.last_entry, [entries])
