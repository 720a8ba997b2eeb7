"""How a simulated bookie registers: as registration.py does, in its session.

Always true: who finds an ephemeral node of an earlier session of his takes it away first.
"""

import contextlib
import json

from bookie_server.api import codec
from bookie_server.api.messages import StoredRequest, StoredResponse
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import NodeExists, NoNode
from spark_ledger.metadata.store_calls import read
from tests.simulation.network import SimClient
from tests.simulation.store import SimSession

RESPONSE_S = 3.0


def record(address: str, rack: str) -> bytes:
    plain = {"address": address, "rack": rack, "free_bytes": 1 << 30}
    return json.dumps({**plain, "total_bytes": 1 << 31, "version": 1}, sort_keys=True).encode()


async def stored_at(
    session: SimSession, client: SimClient, request: StoredRequest
) -> StoredResponse | None:
    """As registration.stored_at."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        found = await read(session, f"{folder}/{request.bookie_id}")
        if found is None:
            continue
        address = json.loads(found.value)["address"]
        try:
            body = await client.call(address, "Stored", (codec.encode(request),), RESPONSE_S)
            response = codec.decode_response("Stored", body)
        except (CallFailed, codec.BadMessage):
            return None
        assert isinstance(response, StoredResponse)
        return response
    return None


async def publish(session: SimSession, bookie_id: str, value: bytes, readonly: bool) -> None:
    """Raises StoreError."""
    known = f"{paths.BOOKIES_KNOWN}/{bookie_id}"
    folders = (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY)
    folder, other = reversed(folders) if readonly else folders
    here = f"{folder}/{bookie_id}"
    try:
        await session.create(known, value)
    except NodeExists:
        await session.sync(here)
    try:
        found = await session.get(here)
        if found.owner != session.session_id:
            await session.delete(here, found.version)
            raise NoNode(here)
    except NoNode:
        await session.create(here, value, ephemeral=True)
    with contextlib.suppress(NoNode):
        await session.delete(f"{other}/{bookie_id}")
