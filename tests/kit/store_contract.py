"""The contract of every MetadataStore, as tests that run over any of them.

`CONTRACT` maps a sentence to an async test. A test takes `open_store`, which opens one more
session on the same, empty store; the test closes it. The tests run over ZooKeeper in
tests/integration, and over the simulated store in tests/simulation.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from spark_ledger.metadata.store import (
    ANY_VERSION,
    BadVersion,
    Check,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    NotEmpty,
    SessionState,
    Set,
)

OpenStore = Callable[[], Awaitable[MetadataStore]]
CONTRACT: dict[str, Callable[[OpenStore], Awaitable[None]]] = {}
PATIENCE_S = 60


def contract(test: Callable[[OpenStore], Awaitable[None]]):
    CONTRACT[test.__name__] = test
    return test


class Bell:
    """A watcher that counts, and can be waited for."""

    def __init__(self) -> None:
        self.rings = 0
        self._rung = asyncio.Event()

    def __call__(self) -> None:
        self.rings += 1
        self._rung.set()

    async def rung(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._rung.wait()
        self._rung.clear()


@contract
async def a_created_node_is_read_back_at_version_0(open_store: OpenStore) -> None:
    store = await open_store()
    await store.create("/a", b"one")
    node = await store.get("/a")
    assert (node.value, node.version, node.owner) == (b"one", 0, 0)
    await store.close()


@contract
async def many_nodes_are_read_at_once_and_those_that_are_not_there_are_none(
    open_store: OpenStore,
) -> None:
    store = await open_store()
    await store.create("/a", b"one")
    await store.create("/b", b"two")
    await store.set("/b", b"three", 0)
    nodes = await store.get_many(["/b", "/missing", "/a"])
    got = [node and (node.value, node.version) for node in nodes]
    assert got == [(b"three", 1), None, (b"one", 0)]
    assert await store.get_many([]) == []
    await store.close()


@contract
async def a_node_is_created_once(open_store: OpenStore) -> None:
    store = await open_store()
    await store.create("/a", b"one")
    with pytest.raises(NodeExists):
        await store.create("/a", b"two")
    assert (await store.get("/a")).value == b"one"
    await store.close()


@contract
async def parents_are_made_when_asked_for_and_missed_when_not(open_store: OpenStore) -> None:
    store = await open_store()
    with pytest.raises(NoNode):
        await store.create("/a/b/c", b"x")
    await store.create("/a/b/c", b"x", parents=True)
    await store.create("/a/b/d", b"y", parents=True)
    assert await store.children("/a/b") == ["c", "d"]
    assert (await store.get("/a")).value == b""
    with pytest.raises(NodeExists):
        await store.create("/a/b/c", b"x", parents=True)
    await store.close()


@contract
async def a_set_replaces_only_the_version_it_names(open_store: OpenStore) -> None:
    store = await open_store()
    await store.create("/a", b"one")
    assert await store.set("/a", b"two", 0) == 1
    with pytest.raises(BadVersion):
        await store.set("/a", b"three", 0)
    assert (await store.get("/a")).value == b"two"
    assert await store.set("/a", b"four", ANY_VERSION) == 2
    with pytest.raises(NoNode):
        await store.set("/b", b"", 0)
    await store.close()


@contract
async def a_delete_removes_only_the_version_it_names_and_no_parent(open_store: OpenStore) -> None:
    store = await open_store()
    await store.create("/a/b", parents=True)
    with pytest.raises(NotEmpty):
        await store.delete("/a")
    with pytest.raises(BadVersion):
        await store.delete("/a/b", 7)
    await store.delete("/a/b", 0)
    await store.delete("/a")
    with pytest.raises(NoNode):
        await store.delete("/a")
    with pytest.raises(NoNode):
        await store.get("/a")
    await store.close()


@contract
async def children_are_sorted_names_and_a_missing_parent_is_no_empty_one(
    open_store: OpenStore,
) -> None:
    store = await open_store()
    await store.create("/a")
    assert await store.children("/a") == []
    for name in ("c", "a", "b"):
        await store.create(f"/a/{name}")
    assert await store.children("/a") == ["a", "b", "c"]
    assert await store.children("/") == ["a"]
    with pytest.raises(NoNode):
        await store.children("/missing")
    await store.close()


@contract
async def a_multi_applies_all_its_operations(open_store: OpenStore) -> None:
    store = await open_store()
    await store.create("/head", b"0")
    await store.create("/old", b"")
    await store.create("/intent", b"open")
    await store.multi(
        [
            Set("/head", b"1", 0),
            Create("/log", b""),
            Create("/log/1", b"body"),
            Delete("/old", 0),
            Check("/intent", 0),
        ]
    )
    assert (await store.get("/head")).version == 1
    assert (await store.get("/log/1")).value == b"body"
    assert await store.children("/") == ["head", "intent", "log"]
    await store.multi([])
    await store.close()


@contract
async def a_multi_that_makes_a_node_and_takes_it_away_checks_that_there_is_none(
    open_store: OpenStore,
) -> None:
    store = await open_store()
    none_there = [Create("/a"), Delete("/a", ANY_VERSION)]
    await store.multi([*none_there, Create("/b")])
    with pytest.raises(NoNode):
        await store.get("/a")
    await store.create("/a", b"there")
    with pytest.raises(MultiFailed) as failed:
        await store.multi([*none_there, Delete("/b", 0)])
    assert failed.value.index == 0
    assert isinstance(failed.value.cause, NodeExists)
    assert (await store.get("/a")).value == b"there"
    assert (await store.get("/b")).version == 0
    await store.close()


@contract
async def a_failed_multi_changes_nothing_and_names_the_first_failure(
    open_store: OpenStore,
) -> None:
    store = await open_store()
    await store.create("/head", b"0")
    cases = [
        (Set("/head", b"", 9), BadVersion),
        (Check("/head", 9), BadVersion),
        (Check("/missing", ANY_VERSION), NoNode),
        (Create("/head", b""), NodeExists),
        (Create("/missing/child", b""), NoNode),
        (Delete("/missing", ANY_VERSION), NoNode),
    ]
    for index in (0, 1):
        for operation, cause in cases:
            operations = [Create("/first", b""), Create("/last", b"")]
            operations.insert(index, operation)
            with pytest.raises(MultiFailed) as failure:
                await store.multi(operations)
            assert failure.value.index == index
            assert type(failure.value.cause) is cause
    assert await store.children("/") == ["head"]
    assert (await store.get("/head")).version == 0
    await store.close()


@contract
async def of_many_racing_sets_exactly_one_holds(open_store: OpenStore) -> None:
    stores = [await open_store() for _ in range(4)]
    await stores[0].create("/a", b"")
    outcomes = await asyncio.gather(
        *(store.set("/a", b"%d" % number, 0) for number, store in enumerate(stores)),
        return_exceptions=True,
    )
    winners = [number for number, outcome in enumerate(outcomes) if outcome == 1]
    assert len(winners) == 1
    assert all(isinstance(outcome, BadVersion) for outcome in outcomes if outcome != 1)
    for store in stores:
        await store.sync()
        assert (await store.get("/a")).value == b"%d" % winners[0]
        await store.close()


@contract
async def after_a_sync_another_session_sees_what_was_written(open_store: OpenStore) -> None:
    writer, reader = await open_store(), await open_store()
    for number in range(5):
        await writer.create(f"/{number}", b"")
        await reader.sync()
        await reader.get(f"/{number}")
    await writer.close()
    await reader.close()


@contract
async def a_watch_on_a_node_rings_once_at_its_next_change(open_store: OpenStore) -> None:
    store, other = await open_store(), await open_store()
    await store.create("/a", b"")
    bell = Bell()
    await store.get("/a", bell)
    await store.get("/a", bell)
    await other.set("/a", b"1", 0)
    await bell.rung()
    await other.set("/a", b"2", 1)
    await store.sync()
    assert (await store.get("/a")).version == 2
    assert bell.rings == 1
    await store.close()
    await other.close()


@contract
async def a_watch_on_a_missing_node_rings_when_it_is_made(open_store: OpenStore) -> None:
    store, other = await open_store(), await open_store()
    bell = Bell()
    with pytest.raises(NoNode):
        await store.get("/a", bell)
    await other.create("/a", b"made")
    await bell.rung()
    await store.sync()
    assert (await store.get("/a")).value == b"made"
    await store.close()
    await other.close()


@contract
async def a_watch_on_a_node_rings_when_it_is_deleted(open_store: OpenStore) -> None:
    store, other = await open_store(), await open_store()
    await store.create("/a", b"")
    bell = Bell()
    await store.get("/a", bell)
    await other.delete("/a")
    await bell.rung()
    await store.close()
    await other.close()


@contract
async def a_watch_on_children_rings_when_one_comes_or_goes(open_store: OpenStore) -> None:
    store, other = await open_store(), await open_store()
    await store.create("/a")
    bell = Bell()
    assert await store.children("/a", bell) == []
    await other.create("/a/b")
    await bell.rung()
    await store.sync()
    assert await store.children("/a", bell) == ["b"]
    await other.delete("/a/b")
    await bell.rung()
    assert bell.rings == 2
    await store.close()
    await other.close()


@contract
async def an_ephemeral_node_names_its_session_and_goes_with_it(open_store: OpenStore) -> None:
    owner, other = await open_store(), await open_store()
    await owner.create("/bookies/one", b"", ephemeral=True, parents=True)
    bell = Bell()
    await other.sync()
    node = await other.get("/bookies/one", bell)
    assert node.owner == owner.session_id != 0
    assert node.owner != other.session_id
    await owner.close()
    await bell.rung()
    await other.sync()
    with pytest.raises(NoNode):
        await other.get("/bookies/one")
    assert await other.children("/bookies") == []
    await other.close()


@contract
async def a_node_tells_when_it_was_made_by_the_store_s_clock(open_store: OpenStore) -> None:
    store = await open_store()
    await store.create("/a")
    await store.create("/b")
    first, second = await store.get("/a"), await store.get("/b")
    await store.set("/a", b"later", 0)
    changed = await store.get("/a")
    assert changed.created_ms == first.created_ms == first.modified_ms <= second.created_ms
    assert second.created_ms <= changed.modified_ms
    await store.close()


@contract
async def nodes_tell_which_of_them_was_set_first(open_store: OpenStore) -> None:
    store, other = await open_store(), await open_store()
    await store.create("/a")
    await store.multi([Create("/b"), Create("/c")])
    await other.sync("/a")
    a, b, c = [await other.get(path) for path in ("/a", "/b", "/c")]
    assert 0 < a.set_in < b.set_in == c.set_in
    await store.multi([Set("/a", b"later", 0)])
    await other.sync("/a")
    (again,) = await other.get_many(["/a"])
    assert again is not None
    assert again.set_in > c.set_in
    for opened in (store, other):
        await opened.close()


@contract
async def an_open_store_is_connected(open_store: OpenStore) -> None:
    store = await open_store()
    assert store.session_state is SessionState.CONNECTED
    await store.close()
