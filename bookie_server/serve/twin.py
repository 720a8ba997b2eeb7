"""Whether another process served as this bookie, from a copy of its directories, while this process
did not respond (it was paused, cut off, or not started).

Always true: a start draws a token and writes it to the directories before it publishes it in
/bookies/starts/<id>, and before the bookie registers or serves. So if the directories lack the
token in the store, another process wrote it: the token is *foreign*. A process that reads a foreign
token puts every ledger in limbo, durably, and so gives no negative response from then on: the other
process may have acknowledged entries that are missing here (ledgers/limbo.py). It publishes a new
token of its own, which is foreign to the other process, and ends END_DELAY_S later without another
look: so both processes end. A start that reads a foreign token does not end, as the other process
may have ended; if that process still runs, the start's own token ends it.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from bookie_server.disk import starts as start_files
from bookie_server.disk.identity import WrongDisks
from bookie_server.disk.interface import Disk, DiskFailed
from bookie_server.disk.starts import Starts
from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    BadVersion,
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    SessionState,
    StoreError,
    Versioned,
)
from spark_ledger.metadata.store_calls import TRIES_MAX, read

LOOK_S, END_DELAY_S = 30.0, 3.0
_log = logging.getLogger(__name__)


class Start(NamedTuple):
    """The store's record of a start. `twin`: the start's process met another process that served as
    this bookie, and both end."""

    number: int
    token: str
    twin: bool = False


class TwinWatch:
    """The watch of one bookie. `draw` gives a random token."""

    def __init__(
        self,
        store: MetadataStore,
        bookie_id: str,
        disks: Sequence[Disk],
        starts: Starts,
        draw: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._store = store
        self._path = paths.bookie_start(bookie_id)
        self._bookie_id = bookie_id
        self._disks = disks
        self._starts = starts
        self._draw = draw
        self._wake = asyncio.Event()
        store.add_session_listener(self._session_changed)

    @classmethod
    async def open(cls, store: MetadataStore, bookie_id: str, disks: Sequence[Disk]) -> "TwinWatch":
        return cls(store, bookie_id, disks, await start_files.read(disks, bookie_id))

    async def begin(self) -> bool:
        """Draw and publish the token of this start. Returns whether another process served as this
        bookie since the last start: then the caller puts every ledger in limbo before the bookie
        serves. Raises StoreError, DiskFailed."""
        await self._store.sync(self._path)
        node = await read(self._store, self._path)
        is_foreign = self._is_foreign(node)
        await self._publish(node, twin=False)
        return is_foreign

    async def run(self, put_all_in_limbo: Callable[[], Awaitable[None]]) -> None:
        """Look until the store has a foreign token. Then put every ledger in limbo. Raises
        WrongDisks END_DELAY_S later."""
        while True:
            try:
                node = await read_watched(self._store, self._path, self._wake.set)
                if self._is_foreign(node):
                    break
            except StoreError as failure:
                _log.warning("the look for another process as this bookie failed: %r", failure)
            except Exception:
                _log.exception("a defect: the look for another process as this bookie failed")
            await woken(self._wake, LOOK_S)
            self._wake.clear()
        text = (
            f"another process serves as this bookie {self._bookie_id}, from a copy of its"
            " directories: both end. Give one of them empty directories, then start the other"
        )
        _log.error("%s", text)
        await put_all_in_limbo()
        with contextlib.suppress(StoreError, DiskFailed):
            await self._publish(node, twin=True)
        await asyncio.sleep(END_DELAY_S)
        raise WrongDisks(text)

    def _is_foreign(self, node: Versioned | None) -> bool:
        start = None if node is None else decode(node.value)
        return start is not None and not self._starts.knows(start.number, start.token)

    async def _publish(self, node: Versioned | None, *, twin: bool) -> None:
        """Publish a new token, on the directories first. If another process writes its token
        meanwhile, that token stays in the store, and the next look finds it foreign."""
        start = None if node is None else decode(node.value)
        number = max(self._starts.newest, 0 if start is None else start.number) + 1
        starts = self._starts.with_start(number, self._draw())
        await start_files.FILE.write(self._disks, starts)
        self._starts = starts
        value = encode(Start(number, starts.tokens[number], twin))
        for _ in range(TRIES_MAX):
            try:
                if node is None:
                    await self._store.create(self._path, value, parents=True)
                else:
                    await self._store.set(self._path, value, node.version)
                return
            except (BadVersion, NodeExists, OutcomeUnknown):
                await self._store.sync(self._path)
                node = await read(self._store, self._path)
                if node is not None and (node.value == value or self._is_foreign(node)):
                    return

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._wake.set()


async def read_watched(
    store: MetadataStore, path: str, changed: Callable[[], None]
) -> Versioned | None:
    """The node, if it exists; the store calls `changed` when it may have changed. Raises
    StoreError."""
    await store.sync(path)
    with contextlib.suppress(NoNode):
        return await store.get(path, changed)
    return None


def encode(start: Start) -> bytes:
    fields = {"number": start.number, "token": start.token}
    return json.dumps(fields | ({"twin": True} if start.twin else {}), sort_keys=True).encode()


def decode(value: bytes) -> Start | None:
    """The start; None if the value is damaged."""
    try:
        fields = json.loads(value)
        return Start(int(fields["number"]), str(fields["token"]), bool(fields.get("twin", False)))
    except errors.MALFORMED:
        return None
