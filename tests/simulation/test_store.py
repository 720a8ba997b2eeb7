"""The simulated metadata store keeps its promises, and breaks those that the real one breaks."""

import asyncio
import random

import pytest

from spark_ledger.metadata.store import (
    BadVersion,
    Check,
    Create,
    Delete,
    MultiFailed,
    NoNode,
    OutcomeUnknown,
    SessionState,
    Set,
    StoreUnavailable,
)
from tests.simulation.loop import current, run
from tests.simulation.store import SimStore, StoreFaults


def test_a_replica_lags_until_sync_but_sees_its_own_writes():
    async def main() -> None:
        store = SimStore(faults=StoreFaults(lag_s=1000.0))
        writer, reader = store.session("writer"), store.session("reader")
        await writer.create("/a", b"0")
        await writer.set("/a", b"1", 0)
        assert (await writer.get("/a")).value == b"1"
        with pytest.raises(NoNode):
            await reader.get("/a")
        await reader.sync()
        assert (await reader.get("/a")).value == b"1"
        with pytest.raises(BadVersion):
            await reader.set("/a", b"2", 0)

    run(main())


def test_a_multi_is_applied_whole_or_not_at_all():
    async def main() -> None:
        store = SimStore()
        session = store.session()
        await session.create("/a", b"0")
        with pytest.raises(MultiFailed) as failed:
            await session.multi([Create("/b"), Set("/a", b"1", 0), Check("/a", 0)])
        assert failed.value.index == 2
        assert isinstance(failed.value.cause, BadVersion)
        assert store.peek("/b") is None
        await session.multi([Create("/b"), Create("/b/c"), Set("/a", b"1", 0), Delete("/b/c", 0)])
        assert await session.children("/") == ["a", "b"]
        assert len(store.log) == 2

    run(main())


def test_an_unknown_outcome_was_applied_or_not_and_never_later():
    applied = []

    async def main(seed: int) -> None:
        store = SimStore(random.Random(seed), StoreFaults(unknown=1.0))
        session = store.session()
        with pytest.raises(OutcomeUnknown):
            await session.create("/a")
        store.faults.unknown = 0
        await session.sync()
        then = store.peek("/a") is not None
        await asyncio.sleep(100)
        assert then == (store.peek("/a") is not None)
        applied.append(then)

    for seed in range(20):
        run(main(seed))
    assert True in applied
    assert False in applied


def test_watches_fire_once_on_change_creation_and_suspension():
    async def main() -> None:
        store = SimStore()
        session, other = store.session(), store.session()
        seen: list[str] = []
        with pytest.raises(NoNode):
            await session.get("/a", lambda: seen.append("created"))
        await other.create("/a")
        await asyncio.sleep(1)
        assert seen == ["created"]
        await session.get("/a", lambda: seen.append("changed"))
        await session.children("/", lambda: seen.append("children"))
        await other.set("/a", b"1", 0)
        await other.set("/a", b"2", 1)
        await asyncio.sleep(1)
        assert seen == ["created", "changed"]
        session.suspend(1.0)
        await asyncio.sleep(0.5)
        assert session.session_state is SessionState.SUSPENDED
        assert seen == ["created", "changed", "children"]
        assert (await session.get("/a")).value == b"2"
        assert session.session_state is SessionState.CONNECTED

    run(main())


def test_a_missed_watch_is_never_told():
    async def main() -> None:
        store = SimStore(faults=StoreFaults(missed=1.0))
        session, other = store.session(), store.session()
        seen: list[str] = []
        await other.create("/a")
        await session.sync()
        await session.get("/a", lambda: seen.append("changed"))
        await other.set("/a", b"1", 0)
        await asyncio.sleep(10)
        assert (await session.get("/a")).value == b"1"
        store.calm()
        await other.set("/a", b"2", 1)
        await asyncio.sleep(10)
        assert seen == []

    run(main())


def test_an_expired_session_loses_its_ephemerals_before_its_client_knows():
    async def main() -> None:
        store = SimStore()
        session, other = store.session(), store.session()
        states: list[SessionState] = []
        session.add_session_listener(states.append)
        await session.create("/e", ephemeral=True)
        assert (await other.get("/e")).owner == session.session_id
        session.expire()
        assert session.session_state is SessionState.CONNECTED
        with pytest.raises(NoNode):
            await other.get("/e")
        with pytest.raises(OutcomeUnknown):
            await session.create("/f")
        await session.create("/f", ephemeral=True)
        await asyncio.sleep(1)
        assert SessionState.LOST in states
        assert (await other.get("/f")).owner == session.session_id
        await session.close()
        with pytest.raises(NoNode):
            await other.get("/f")

    run(main())


def test_an_abandoned_sessions_ephemerals_go_at_its_time_out():
    async def main() -> None:
        store = SimStore()
        session = store.session()
        await session.create("/e", ephemeral=True)
        session.abandon()
        await asyncio.sleep(29)
        assert store.peek("/e")
        await asyncio.sleep(2)
        assert not store.peek("/e")

    run(main())


def test_a_stalled_store_times_out_writes_whose_outcome_is_unknown():
    async def main() -> None:
        store = SimStore()
        session = store.session()
        store.stall(15)
        begun = current().time()
        with pytest.raises(OutcomeUnknown):
            await session.create("/a")
        assert current().time() - begun == pytest.approx(10)
        await session.sync()
        assert store.peek("/a")

    run(main())


def test_requests_while_suspended_wait_and_then_were_certainly_not_carried_out():
    async def main() -> None:
        store = SimStore()
        session = store.session()
        session.suspend(25)
        with pytest.raises(StoreUnavailable):
            await session.create("/a")
        await asyncio.sleep(30)
        assert not store.peek("/a")
        await session.create("/a")

    run(main())
