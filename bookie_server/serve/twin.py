"""Whether another process serves as this bookie already: on a copy of its directories, for the lock
on the directories themselves is ours.

Always true: the process registered under our id is asked, by frames, before any start is refused;
one that does not respond, or responds with another identity, is a dead predecessor. One that
registered no frames, as an earlier version could, cannot be asked: it counts as running until its
registration goes.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

from bookie_server.api import codec
from bookie_server.api.frames import (
    HEAD_BYTES,
    METHOD_NUMBERS,
    BadFrame,
    FrameKind,
    Head,
    pack_head,
    unpack_head,
)
from bookie_server.api.messages import InfoRequest, InfoResponse
from bookie_server.disk.identity import WrongDisks
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode

RESPONSE_S = 3.0
_INFO_BYTES_MAX = 1 << 20

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


async def who_is(frames: str) -> str:
    """See WhoIs: one Info call on a connection of its own; RESPONSE_S at most."""
    try:
        async with asyncio.timeout(RESPONSE_S):
            return (await _info(frames)).bookie_id
    except (OSError, EOFError, BadFrame, codec.BadMessage, ValueError):
        return ""  # nothing that responds as a bookie does


async def _info(frames: str) -> InfoResponse:
    host, _, port = frames.rpartition(":")
    request = codec.encode(InfoRequest())
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        await _head(reader, FrameKind.HELLO)
        method = METHOD_NUMBERS["Info"]
        writer.write(
            pack_head(FrameKind.CALL, call=1, length=len(request), method=method) + request
        )
        body = await reader.readexactly((await _head(reader, FrameKind.ANSWER)).length)
    finally:
        writer.close()
    response = codec.decode_response("Info", body)
    assert isinstance(response, InfoResponse)
    return response


async def _head(reader: asyncio.StreamReader, kind: FrameKind) -> Head:
    """Raises BadFrame for any other kind, EOFError."""
    head = unpack_head(await reader.readexactly(HEAD_BYTES), 0, _INFO_BYTES_MAX)
    if head.kind is not kind:
        raise BadFrame(f"a {head.kind.name} where a {kind.name} was expected")
    return head
