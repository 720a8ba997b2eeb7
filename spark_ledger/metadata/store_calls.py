"""Calls, to the metadata store above all, that every part of the topic layer makes the same way.

Always true: the time that `store_now_ms` returns is between the call and its return, or it is
LONG_AGO_MS, at which nothing is due: responses were lost, or others asked at the same moment again
and again.
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
    """As `read`, but None only if the node did not exist at the call: another process may have made
    it and sent its name, and this session's replica may lag behind."""
    node = await read(store, path)
    if node is None:
        await store.sync(path)
        node = await read(store, path)
    return node


async def ensure(store: MetadataStore, path: str, value: bytes = b"") -> None:
    """Make a node at the path, if none is there; an existing one is left as it is."""
    if await read(store, path) is not None:
        return
    for _ in range(TRIES_MAX):
        try:
            await store.create(path, value, parents=True)
            return
        except NodeExists:
            return
        except OutcomeUnknown:
            await store.sync(path)  # to create it once more is harmless
    raise StoreUnavailable(f"{path} could not be made: {TRIES_MAX} answers were lost")


async def call_each(
    do: Callable[[A], Awaitable[B]], items: Iterable[A], at_once: int = CALLS_AT_ONCE
) -> list[B]:
    """Calls `do` with each item, `at_once` calls at a time; returns the results in the order of the
    items. An exception of one call cancels the others."""
    todo = list(items)
    if len(todo) <= 1:
        return [await do(item) for item in todo]
    results: dict[int, B] = {}
    turns = iter(enumerate(todo))

    async def take_turns() -> None:
        for turn, item in turns:
            results[turn] = await do(item)

    tasks = [asyncio.ensure_future(take_turns()) for _ in range(min(at_once, len(todo)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        await cancel(*tasks)
        raise
    return [results[turn] for turn in range(len(todo))]


async def in_batches(items: AsyncIterator[A], size: int) -> AsyncIterator[list[A]]:
    """The items, so many at a time."""
    batch: list[A] = []
    async for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


async def names_in(store: MetadataStore, folder: str) -> list[str]:
    """The folder's children; empty if it does not exist. Raises StoreError."""
    try:
        return await store.children(folder)
    except NoNode:
        return []


@contextmanager
def reachable(doing: str) -> Iterator[None]:
    """Raise the store's failures as errors.Unavailable, with the work under way (`doing`). A store
    that did not respond and one that refused get different texts."""
    try:
        yield
    except (StoreUnavailable, OutcomeUnknown) as error:
        raise errors.Unavailable(
            f"the metadata store did not answer while {doing}: {error}"
        ) from error
    except StoreError as error:
        raise errors.Unavailable(
            f"the metadata store refused a request while {doing}: {error!r}", REFUSED
        ) from error


async def elected(store: MetadataStore, path: str) -> bool:
    """Whether this session has the role whose ephemeral is at `path`, taking it if no session has.
    Raises errors.Unavailable."""
    with reachable(f"reading which session is elected at {path}"):
        with suppress(NodeExists, OutcomeUnknown):
            await store.create(path, ephemeral=True)
        try:
            await store.sync(path)
            return (await store.get(path)).owner == store.session_id
        except NoNode:
            return False


def pause_s(rng: random.Random, tries: int) -> float:
    """How long to wait after the `tries`-th lost race: longer each time, with jitter."""
    longest = min(_PAUSE_S_MAX, _PAUSE_S * float(2 ** min(tries, 20)))
    return longest * rng.uniform(0.5, 1.0)


class Tries:
    """The tries of one change that other changes may precede: at most `most`, with a pause by `rng`
    after each but the first `free` ones; without `rng` there is no pause."""

    def __init__(
        self, rng: random.Random | None = None, most: int = TRIES_MAX, free: int = 0
    ) -> None:
        self.made = 0
        self._rng = rng
        self._most = most
        self._free = free

    async def retry_or_raise(self, why: str | errors.LedgerError) -> None:
        """After a failed try: returns when the change may be tried again. After the last try it
        raises `why`, a text as errors.CommitContended."""
        if self._rng is not None and self.made >= self._free:
            await asyncio.sleep(pause_s(self._rng, self.made))
        self.made += 1
        if self.made >= self._most:
            raise errors.CommitContended(why) if isinstance(why, str) else why


async def store_now_ms(store: MetadataStore) -> int:
    """The store's time, by which commits are stamped: when it made a node that is made for it.
    Raises StoreUnavailable."""
    for _ in range(CLOCK_TRIES_MAX):
        with suppress(NoNode, OutcomeUnknown):
            await store.delete(paths.STORE_CLOCK)
        with suppress(NoNode, NodeExists, OutcomeUnknown):
            await store.create(paths.STORE_CLOCK)
            await store.sync(paths.STORE_CLOCK)
            return (await store.get(paths.STORE_CLOCK)).created_ms
    return LONG_AGO_MS
