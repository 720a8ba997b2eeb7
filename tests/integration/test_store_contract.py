"""The contract of the metadata store over a real ZooKeeper, and what only a real one can show."""

import asyncio
import contextlib
import itertools
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from spark_ledger.errors import Unavailable
from spark_ledger.local.embedded_zookeeper import EmbeddedZooKeeper
from spark_ledger.local.processes import free_port
from spark_ledger.metadata.store import (
    Create,
    NoNode,
    OutcomeUnknown,
    SessionState,
    Set,
    StoreError,
    StoreUnavailable,
)
from spark_ledger.metadata.zookeeper import HANDSHAKE_S, READS_AT_ONCE, ZooKeeperStore, connect
from tests.integration.frozen import T, frozen
from tests.integration.proxy import Proxy
from tests.kit.store_contract import CONTRACT, PATIENCE_S, Bell

_roots = itertools.count()


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    server = EmbeddedZooKeeper(Path(tmp_path_factory.mktemp("zookeeper")))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def url(zookeeper: EmbeddedZooKeeper) -> str:
    return f"zk://{zookeeper.address}/tests/root-{next(_roots)}"


@pytest.mark.parametrize("sentence", CONTRACT)
def test_zookeeper_keeps_the_contract(sentence: str, url: str) -> None:
    asyncio.run(CONTRACT[sentence](lambda: connect(url)))


def test_a_url_where_nobody_answers_is_named_in_the_error() -> None:
    url = f"zk://127.0.0.1:{free_port()}/ledger"
    began = time.monotonic()
    with pytest.raises(Unavailable, match=url):
        asyncio.run(connect(url, connect_timeout_s=1))
    assert time.monotonic() - began < PATIENCE_S


def requests_of(zookeeper: EmbeddedZooKeeper) -> int:
    host, _, port = zookeeper.address.rpartition(":")
    with socket.create_connection((host, int(port))) as link:
        link.sendall(b"srvr")
        shown = link.makefile("rb").read().decode()
    return int(shown.partition("Received: ")[2].split()[0])


def test_syncs_that_come_together_share_a_request_and_each_sees_what_was_written_before_it(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store, other = await connect(url), await connect(url)
        await store.create("/n", b"")

        async def written_and_read(number: int) -> None:
            await other.create(f"/n-{number}", b"")
            await store.sync(f"/n-{number}")
            await store.get(f"/n-{number}")

        began = requests_of(zookeeper)
        await asyncio.gather(*(store.sync() for _ in range(200)))
        assert requests_of(zookeeper) - began < 20
        await asyncio.gather(*map(written_and_read, range(100)))
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_many_nodes_are_read_in_their_order_with_few_requests(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store = await connect(url)
        await store.multi([Create(f"/n{number}", b"%d" % number) for number in range(0, 200, 2)])
        began = requests_of(zookeeper)
        nodes = await store.get_many([f"/n{number}" for number in range(200)])
        assert requests_of(zookeeper) - began <= 200 / READS_AT_ONCE + 5  # pings, and this question
        values = [None if node is None else node.value for node in nodes]
        assert values == [None if number % 2 else b"%d" % number for number in range(200)]
        assert await store.get("/n198") == nodes[198]
        await store.close()

    asyncio.run(scenario())


def test_two_roots_are_two_clusters(zookeeper: EmbeddedZooKeeper) -> None:
    async def scenario() -> None:
        one = await connect(f"zk://{zookeeper.address}/one")
        two = await connect(f"zk://{zookeeper.address}/two/deep")
        await one.create("/a", b"")
        with pytest.raises(NoNode):
            await two.get("/a")
        await one.close()
        await two.close()

    asyncio.run(scenario())


def test_a_closed_store_says_so(url: str) -> None:
    async def scenario() -> None:
        store = await connect(url)
        await store.close()
        await store.close()
        with pytest.raises(StoreUnavailable):
            await store.get("/")
        with pytest.raises(StoreUnavailable):
            await store.create("/a")

    asyncio.run(scenario())


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """Of a store that goes on: the first answers may take longer than it waits for one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await call()


def test_a_write_without_an_answer_is_unknown_and_a_read_unavailable(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store = await connect(url, call_timeout_s=1)
        await store.create("/a", b"")
        with frozen(zookeeper):
            with pytest.raises(OutcomeUnknown):
                await store.set("/a", b"?", 0)
            with pytest.raises(StoreUnavailable):
                await store.get("/a")
        await answered(store.sync)
        assert (await answered(lambda: store.get("/a"))).value == b"?"
        await store.close()

    asyncio.run(scenario())


def test_a_restart_of_zookeeper_suspends_the_session_rings_its_watches_and_keeps_its_nodes(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store, states, bell = await connect(url), [], Bell()
        store.add_session_listener(states.append)
        await store.create("/mine", b"", ephemeral=True)
        await store.get("/mine", bell)
        await asyncio.to_thread(zookeeper.kill)
        await bell.rung()
        assert store.session_state is SessionState.SUSPENDED
        await asyncio.to_thread(zookeeper.start)
        assert (await store.get("/mine")).owner == store.session_id
        assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
        await store.close()

    asyncio.run(scenario())


def test_calls_wait_for_the_end_of_an_outage_that_is_longer_than_one_answer_may_take(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store, bell = await connect(url, call_timeout_s=0.5, outage_timeout_s=60), Bell()
        await store.create("/a", b"1")
        await store.get("/a", bell)
        await asyncio.to_thread(zookeeper.kill)
        await bell.rung()
        calls = [store.get("/a"), store.create("/b", b"2"), store.multi([Set("/a", b"3", 0)])]
        waiting = [asyncio.ensure_future(call) for call in calls]
        await asyncio.to_thread(zookeeper.start)
        read, *_ = await asyncio.gather(*waiting)
        assert read.value in (b"1", b"3")
        assert ((await store.get("/a")).value, (await store.get("/b")).value) == (b"3", b"2")
        await store.close()

    asyncio.run(scenario())


def test_an_outage_longer_than_is_waited_for_is_an_error_that_names_the_option(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store = await connect(url, call_timeout_s=0.5, outage_timeout_s=3)
        with frozen(zookeeper), pytest.raises(StoreUnavailable, match=r"outageTimeout is 3 s"):
            await store.get("/a")
        await store.close()

    asyncio.run(scenario())


def test_a_handshake_that_zookeeper_never_answers_is_given_up_long_before_the_session_ends(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    async def scenario() -> None:
        with Proxy(int(zookeeper.address.rpartition(":")[2])) as proxy:
            store = await connect(f"zk://{proxy.address}/forgotten", session_timeout_s=60)
            session = store.session_id
            proxy.drop(answers=True)
            proxy.reset()
            await asyncio.to_thread(proxy.lost.wait)  # as may those made while a server starts
            proxy.drop()
            asked = time.monotonic()
            await store.sync()
            assert time.monotonic() - asked < 6 * HANDSHAKE_S
            assert store.session_id == session
            await store.close()

    asyncio.run(scenario())


def test_a_lost_session_is_told_and_followed_by_a_new_one(
    zookeeper: EmbeddedZooKeeper, url: str
) -> None:
    async def scenario() -> None:
        store, states, bell = await connect(url, session_timeout_s=2), [], Bell()
        other, renewed = await connect(url), Bell()

        def hear(state: SessionState) -> None:
            states.append(state)
            if SessionState.LOST in states and state is SessionState.CONNECTED:
                renewed()

        store.add_session_listener(hear)
        await store.create("/mine", b"", ephemeral=True)
        first = store.session_id
        await store.get("/mine", bell)
        await other.sync()
        gone = Bell()
        await other.get("/mine", gone)
        await asyncio.to_thread(end_session, zookeeper, store)
        await gone.rung()
        await bell.rung()
        await renewed.rung()
        assert store.session_id not in (0, first)
        assert states[-2:] == [SessionState.LOST, SessionState.CONNECTED]
        with pytest.raises(NoNode):
            await store.get("/mine")
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_a_session_that_an_older_store_refuses_is_named_so_and_followed_by_a_new_one(
    tmp_path: Path,
) -> None:
    """ZooKeeper closes the connection of a client that has seen a later transaction than it has."""
    server = EmbeddedZooKeeper(tmp_path / "zookeeper")
    server.start()

    async def scenario() -> None:
        url = f"zk://{server.address}/restored"
        store = await connect(url, session_timeout_s=6, call_timeout_s=0.5)
        await store.create("/before", b"")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(shutil.copytree, tmp_path / "zookeeper", tmp_path / "copy")
        await asyncio.to_thread(server.start)
        await answered(store.sync)
        for number in range(50):
            await store.create(f"/after-{number}", b"")
        first, renewed = store.session_id, Bell()
        store.add_session_listener(lambda now: renewed() if now is SessionState.CONNECTED else None)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(shutil.rmtree, tmp_path / "zookeeper")
        await asyncio.to_thread(shutil.move, tmp_path / "copy", tmp_path / "zookeeper")
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(PATIENCE_S):
            error = ""
            while "closes every connection" not in error:  # known once it has closed one
                with pytest.raises(StoreUnavailable) as raised:
                    await store.get("/after-0")
                error = str(raised.value)
        await renewed.rung()
        assert store.session_id not in (0, first)
        with pytest.raises(NoNode):
            await answered(lambda: store.get("/after-0"))
        await store.get("/before")
        await store.close()

    try:
        asyncio.run(scenario())
    finally:
        server.stop()


def end_session(zookeeper: EmbeddedZooKeeper, store: ZooKeeperStore) -> None:
    """From outside, as if it had expired: whoever knows a session's password may close it."""
    double = KazooClient(zookeeper.address, client_id=store._client.client_id)
    double.start()
    double.stop()
    double.close()


def test_a_value_over_zookeepers_limit_is_an_error_and_the_store_goes_on(url: str) -> None:
    async def scenario() -> None:
        store = await connect(url)
        with pytest.raises(StoreError):
            await store.create("/big", bytes(2 << 20))
        await store.create("/small", b"")
        await store.close()

    asyncio.run(scenario())
