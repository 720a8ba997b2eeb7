"""Bookies for people and for readiness probes, not for placement: those that were ever seen, as the
metadata store lists them (`registered`), and what one says of itself when it is asked (`ask`).

Always true: a listing begins with a sync; a bookie is in it once, in the best state it has. A
bookie is asked directly and by address; whether other bookies or the metadata store are there plays
no part.
"""

import json
from typing import Any

from bookie_server.api import codec
from bookie_server.api.messages import InfoRequest, InfoResponse
from bookie_server.api.status import Status
from spark_ledger.bookies.network import CallFailed, Network
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode
from spark_ledger.metadata.store_calls import names_in

DOWN, READ_ONLY, WRITABLE = "down", "read-only", "writable"
_FOLDERS = {
    DOWN: paths.BOOKIES_KNOWN,
    READ_ONLY: paths.BOOKIES_READONLY,
    WRITABLE: paths.BOOKIES_AVAILABLE,
}


async def registered(store: MetadataStore) -> list[dict[str, Any]]:
    """Every bookie ever seen, by id, with what it registered, a `state` (WRITABLE, READ_ONLY or
    DOWN) and how many ledgers it lists as in limbo. Raises StoreUnavailable."""
    await store.sync()
    bookies: dict[str, dict[str, Any]] = {}
    for state, folder in _FOLDERS.items():
        for bookie_id, record in (await _those_in(store, folder)).items():
            bookies[bookie_id] = {"id": bookie_id, "state": state, **record}
    for bookie_id, record in bookies.items():
        record["limbo_ledgers"] = len(await names_in(store, paths.limbo(bookie_id)))
    return [bookies[bookie_id] for bookie_id in sorted(bookies)]


def told(bookie: dict[str, Any]) -> dict[str, Any]:
    """A bookie of `registered` as listings tell of it; free bytes are unknown of one that is
    down."""
    why = bookie.get("reason") or bookie.get("degraded") or ""
    if bookie["state"] == DOWN:
        why = "not registered: it is down, or cannot reach ZooKeeper"
    return {
        "id": bookie["id"],
        "state": bookie["state"],
        "why": why,
        "address": bookie.get("address", ""),
        "frames": bookie.get("frames", ""),
        "rack": bookie.get("rack", ""),
        "version": bookie.get("server_version", ""),
        "free_bytes": bookie.get("free_bytes"),
        "total_bytes": bookie.get("total_bytes"),
        "limbo_ledgers": bookie["limbo_ledgers"],
    }


async def alive(store: MetadataStore) -> frozenset[str]:
    """Ids of the bookies that are registered now, writable or not. Raises StoreUnavailable."""
    names = [*await names_in(store, paths.BOOKIES_AVAILABLE)]
    return frozenset(names + await names_in(store, paths.BOOKIES_READONLY))


async def _those_in(store: MetadataStore, folder: str) -> dict[str, dict[str, Any]]:
    found = {}
    for bookie_id in await names_in(store, folder):
        try:
            found[bookie_id] = json.loads((await store.get(f"{folder}/{bookie_id}")).value)
        except NoNode:
            continue  # this one just left
    return found


async def ask(network: Network, address: str, timeout_s: float) -> InfoResponse:
    """The response of whatever bookie speaks frames at `address` ("host:port"). Raises
    CallFailed."""
    body = await network.call(address, "Info", (codec.encode(InfoRequest()),), timeout_s)
    try:
        response = codec.decode_response("Info", body)
    except codec.BadMessage as error:
        raise CallFailed(f"no bookie answers there: {error}") from error
    assert isinstance(response, InfoResponse)
    return response


def why_not_ready(response: InfoResponse) -> str:
    """Empty when the bookie is registered and takes new entries."""
    if response.status is Status.SHUTTING_DOWN:
        return "draining: it is stopping"
    if response.status is not Status.OK:
        return f"failed: {response.reason or response.status.name}"
    if response.state != "writable":
        return f"{response.state}: {response.reason}".rstrip(": ")
    return ""
