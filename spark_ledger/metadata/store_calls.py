"""Calls to the metadata store that many rooms make, and helpers for calls that are repeated.

Always true: the time that `store_now_ms` returns is between the call and its return, or
LONG_AGO_MS, at which no action is due.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from spark_ledger import errors
from spark_ledger.async_tasks import cancel
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    MetadataStore,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    Versioned,
    Watcher,
)

A = TypeVar("A")
B = TypeVar("B")

TRIES_MAX = 30
CALLS_AT_ONCE = 64
LONG_AGO_MS = 0
CLOCK_TRIES_MAX = 5
REFUSED = (
    "The store is up, and its nodes do not fit: check that the service URL is this cluster's,"
    " and that no older backup of the store was restored."
)
_PAUSE_S = 0.004
_PAUSE_S_MAX = 1.0


async def read(store: MetadataStore, path: str, watch: Watcher | None = None) -> Versioned | None:
    """The node, or None if it does not exist. `watch` is set before the read, also on a missing
    node."""
    try:
        return await store.get(path, watch)
    except NoNode:
        return None


async def look_up(store: MetadataStore, path: str) -> Versioned | None:
    """As `read`, but None only if the node did not exist at the time of the call: if this session's
    replica lacks the node, it is read again after a sync."""
    node = await read(store, path)
    if node is None:
        await store.sync(path)
        node = await read(store, path)
    return node


async def ensure(store: MetadataStore, path: str, value: bytes = b"") -> None:
    """Make a node at the path; an existing node stays unchanged."""
    if await read(store, path) is not None:
        return
    for _ in range(TRIES_MAX):
        try:
            await store.create(path, value, parents=True)
            return
        except NodeExists:
            return
        except OutcomeUnknown:
            await store.sync(path)  # it is harmless to create it again
    raise StoreUnavailable(f"{path} could not be made: {TRIES_MAX} responses were lost")


async def call_each(
    do: Callable[[A], Awaitable[B]], items: Iterable[A], at_once: int = CALLS_AT_ONCE
) -> list[B]:
    """Calls `do` with each item, `at_once` calls at a time; returns the results in the order of the
    items. An exception of one call cancels the others."""
    waiting = list(items)
    if len(waiting) <= 1:
        return [await do(item) for item in waiting]
    results: dict[int, B] = {}
    numbered_items = iter(enumerate(waiting))

    async def call_next() -> None:
        for number, item in numbered_items:
            results[number] = await do(item)

    tasks = [asyncio.ensure_future(call_next()) for _ in range(min(at_once, len(waiting)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await cancel(*tasks)
        raise
    return [results[number] for number in range(len(waiting))]


async def in_batches(items: AsyncIterator[A], size: int) -> AsyncIterator[list[A]]:
    """The items in lists of `size` items."""
    batch: list[A] = []
    async for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


async def names_in(store: MetadataStore, folder: str) -> list[str]:
    """The names of the folder's children; empty without the folder. Raises StoreError."""
    try:
        return await store.children(folder)
    except NoNode:
        return []


@contextmanager
def unavailable_while(action: str) -> Iterator[None]:
    """Raise the store's failures as errors.Unavailable, whose text names the work (`action`), and
    whether the store did not respond or refused."""
    try:
        yield
    except (StoreUnavailable, OutcomeUnknown) as error:
        raise errors.Unavailable(
            f"the metadata store did not answer while {action}: {error}"
        ) from error
    except StoreError as error:
        raise errors.Unavailable(
            f"the metadata store refused a request while {action}: {error!r}", REFUSED
        ) from error


async def take_role(store: MetadataStore, path: str) -> bool:
    """Take the role whose ephemeral is at `path`, unless another session has it; returns whether
    this session has the role. Raises errors.Unavailable."""
    with unavailable_while(f"reading which session is elected at {path}"):
        with suppress(NodeExists, OutcomeUnknown):
            await store.create(path, ephemeral=True)
        try:
            await store.sync(path)
            return (await store.get(path)).owner == store.session_id
        except NoNode:
            return False


def pause_s(rng: random.Random, tries: int) -> float:
    """The pause after so many lost races: longer after each race, with jitter."""
    longest = min(_PAUSE_S_MAX, _PAUSE_S * float(2 ** min(tries, 20)))
    return longest * rng.uniform(0.5, 1.0)


class Tries:
    """Counts the tries of a change that other changes can make fail: `tries_max` at most. With
    `rng` there is a pause after each try, except after the first `tries_without_pause`."""

    def __init__(
        self,
        rng: random.Random | None = None,
        tries_max: int = TRIES_MAX,
        tries_without_pause: int = 0,
    ) -> None:
        self.failed = 0
        self._rng = rng
        self._tries_max = tries_max
        self._tries_without_pause = tries_without_pause

    async def retry_or_raise(self, why: str | errors.LedgerError) -> None:
        """Call this after a failed try: it returns when the change may be tried again. After the
        last try it raises `why`, as errors.CommitContended if `why` is a text."""
        if self._rng is not None and self.failed >= self._tries_without_pause:
            await asyncio.sleep(pause_s(self._rng, self.failed))
        self.failed += 1
        if self.failed >= self._tries_max:
            raise errors.CommitContended(why) if isinstance(why, str) else why


async def store_now_ms(store: MetadataStore) -> int:
    """The time by the clock that stamps commits: the time of a node that this call creates.
    LONG_AGO_MS if responses were lost, or other processes asked at the same moment again and again.
    Raises StoreUnavailable."""
    for _ in range(CLOCK_TRIES_MAX):
        with suppress(NoNode, OutcomeUnknown):
            await store.delete(paths.STORE_CLOCK)
        with suppress(NoNode, NodeExists, OutcomeUnknown):
            await store.create(paths.STORE_CLOCK)
            await store.sync(paths.STORE_CLOCK)
            return (await store.get(paths.STORE_CLOCK)).created_ms
    return LONG_AGO_MS
