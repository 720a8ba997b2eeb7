"""Whether another process serves as this bookie already: on a copy of its directories, for the lock
on the directories themselves is ours.

Always true: who registered under our id is asked, by frames, before anybody is refused; one who
does not answer, or answers as somebody else, is a dead predecessor. One that registered no frames,
as an earlier version could, cannot be asked: it counts as running until its registration goes.
"""

import json
from collections.abc import Awaitable, Callable

from bookie_server.identity import WrongDisks
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode

WhoIs = Callable[[str], Awaitable[str]]
"""The id of the bookie that speaks frames at an address; empty: none does."""


async def refuse_beside_twin(
    store: MetadataStore, bookie_id: str, address: str, who_is: WhoIs
) -> None:
    """Raises WrongDisks when a bookie at another address than ours has our id; StoreError."""
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        try:
            found = await store.get(f"{folder}/{bookie_id}")
        except NoNode:
            continue
        there, frames = registered(found.value)
        if found.owner == store.session_id or there in ("", address):
            continue
        if not frames or await who_is(frames) == bookie_id:
            raise WrongDisks(
                f"bookie {bookie_id} is running already, at {there}: these directories are a copy"
                " of its own. Give this bookie empty directories, or stop the other one for good"
            )


def registered(record: bytes) -> tuple[str, str]:
    """The addresses of gRPC and of frames; empty where the record says none."""
    try:
        found = json.loads(record)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return "", ""
    return str(found.get("address", "")), str(found.get("frames", ""))
