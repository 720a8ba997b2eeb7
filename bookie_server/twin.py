"""Whether another process serves as this bookie already: on a copy of its directories, for the lock
on the directories themselves is ours.

Always true: who registered under our id is asked at the address he gave before anybody is refused;
one who does not answer, or answers as somebody else, is a dead predecessor.
"""

import json
from collections.abc import Awaitable, Callable

from bookie_server.identity import WrongDisks
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode

WhoIs = Callable[[str], Awaitable[str]]
"""The id of the bookie that answers at an address; empty: none does."""


async def refuse_beside_twin(
    store: MetadataStore, bookie_id: str, address: str, who_is: WhoIs
) -> None:
    """Raises WrongDisks when a bookie at another address than ours has our id; StoreError."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        try:
            found = await store.get(f"{folder}/{bookie_id}")
        except NoNode:
            continue
        there = registered_address(found.value)
        if found.owner == store.session_id or there in ("", address):
            continue
        if await who_is(there) == bookie_id:
            raise WrongDisks(
                f"bookie {bookie_id} is running already, at {there}: these directories are a copy"
                " of its own. Give this bookie empty directories, or stop the other one for good"
            )


def registered_address(record: bytes) -> str:
    """Empty where the record says none."""
    try:
        found = json.loads(record)
    except ValueError:
        return ""
    return str(found.get("address", "")) if isinstance(found, dict) else ""
