"""Which bookies there are, also when watches are missed, the store fails, or a listener does."""

import asyncio
import json

import pytest

from spark_ledger.bookies.directory import (
    REREADS_PER_LOOK,
    BookieDirectory,
    listed_status,
    registered,
)
from spark_ledger.metadata import cluster, hold, paths
from spark_ledger.metadata.store import StoreUnavailable
from tests.simulation.loop import current
from tests.simulation.store import SimStore
from tests.unit.spark_ledger.ledger.fakes import simulated

HERE, READONLY = paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY


def registration(address, **more):
    return json.dumps({"address": address, "free_bytes": 1000, **more}).encode()


class Deaf:
    """A session whose watches never fire, and whose reads fail while told so."""

    def __init__(self, session):
        self._session = session
        self.failing = False
        self.reads = 0

    def __getattr__(self, name):
        return getattr(self._session, name)

    async def get(self, path, watch=None):
        return await self._read(self._session.get, path)

    async def children(self, path, watch=None):
        return await self._read(self._session.children, path)

    async def _read(self, call, path):
        self.reads += 1
        if self.failing:
            raise StoreUnavailable(path)
        return await call(path)


async def a_store(*bookies):
    store = SimStore()
    admin = store.session("admin")
    for folder in cluster.FOLDERS:
        await admin.create(folder, parents=True)
    for name in bookies:
        await admin.create(f"{HERE}/{name}", registration(f"{name}:1"), ephemeral=True)
    return store, admin


def ids(bookies):
    return [bookie.id for bookie in bookies]


@simulated
async def test_a_change_is_seen_at_once_by_its_watch():
    store, admin = await a_store("a")
    directory = BookieDirectory(store.session("client"), 1000.0)
    await directory.start()
    await admin.create(f"{HERE}/b", registration("b:1"))
    await admin.delete(f"{HERE}/a")
    await admin.create(f"{READONLY}/a", registration("a:2", reason="full"))
    await asyncio.sleep(1)
    assert (ids(directory.writable()), ids(directory.readonly())) == (["b"], ["a"])
    assert directory.address("a") == "a:2"
    await directory.close()


@simulated
async def test_where_a_bookie_speaks_frames_follows_its_registration():
    store, admin = await a_store()
    directory = BookieDirectory(store.session("client"), 1000.0)
    await directory.start()
    assert directory.address("a") is None
    await admin.create(f"{HERE}/a", registration("a:1", frames="a:7"))
    await asyncio.sleep(1)
    assert directory.address("a") == "a:7"
    await admin.delete(f"{HERE}/a")
    await asyncio.sleep(1)
    assert directory.address("a") == "a:7"
    await admin.create(f"{HERE}/a", registration("a:2", frames="a:8"))
    await asyncio.sleep(1)
    assert directory.address("a") == "a:8"
    await admin.delete(f"{HERE}/a")
    await admin.create(f"{HERE}/a", registration("a:2"))  # frames were switched off there
    await asyncio.sleep(1)
    assert directory.address("a") == "a:2"
    await directory.close()


@simulated
async def test_a_bookie_that_is_not_registered_is_looked_for_where_it_last_spoke_frames():
    store, admin = await a_store()
    directory = BookieDirectory(store.session("client"), 1000.0)
    await directory.start()
    known = registration("a:1", frames="a:7")
    await admin.create(f"{paths.BOOKIES_KNOWN}/a", known, parents=True)
    assert directory.address("a") is None
    assert await directory.find("a") == "a:7"
    await directory.close()


@simulated
async def test_a_change_whose_watch_was_missed_is_seen_at_the_next_refresh():
    store, admin = await a_store("a")
    directory = BookieDirectory(Deaf(store.session("client")), 30.0)
    await directory.start()
    await admin.create(f"{HERE}/b", registration("b:1"))
    await asyncio.sleep(29)
    assert ids(directory.writable()) == ["a"]
    await asyncio.sleep(2)
    assert ids(directory.writable()) == ["a", "b"]
    await directory.close()


class Watched:
    """A session that keeps the watches that it was given, by path."""

    def __init__(self, session):
        self._session = session
        self.watches = {}

    def __getattr__(self, name):
        return getattr(self._session, name)

    async def children(self, path, watch=None):
        self.watches.setdefault(path, set()).add(watch)
        return await self._session.children(path, watch)


@simulated
async def test_looks_while_nothing_changes_set_the_same_watch_again_and_it_still_fires():
    store, admin = await a_store("a")
    session = Watched(store.session("client"))
    directory = BookieDirectory(session, 30.0)
    await directory.start()

    await asyncio.sleep(30 * 100)
    assert {path: len(watches) for path, watches in session.watches.items()} == {
        HERE: 1,
        READONLY: 1,
    }

    await admin.create(f"{HERE}/b", registration("b:1"))
    await asyncio.sleep(1)
    assert ids(directory.writable()) == ["a", "b"]
    await directory.close()


class Counting:
    """A session that tells which registrations were read."""

    def __init__(self, session):
        self._session = session
        self.read = []

    def __getattr__(self, name):
        return getattr(self._session, name)

    async def get(self, path, watch=None):
        self.read.append(path.rpartition("/")[2])
        return await self._session.get(path, watch)


@simulated
async def test_of_many_only_those_that_came_and_went_are_read_when_a_watch_fires():
    store, admin = await a_store(*(f"b{n:02d}" for n in range(40)))
    session = Counting(store.session("client"))
    directory = BookieDirectory(session, 1000.0)
    await directory.start()
    session.read.clear()

    await admin.create(f"{READONLY}/new", registration("new:1"), ephemeral=True)
    await admin.delete(f"{HERE}/b07")
    await asyncio.sleep(1)

    assert session.read == ["new", "b07"]
    assert (len(directory.writable()), ids(directory.readonly())) == (39, ["new"])
    await directory.close()


@simulated
async def test_who_registered_anew_before_anybody_looked_is_read_again():
    store, admin = await a_store(*(f"b{n:02d}" for n in range(40)))
    session = store.session("client")
    directory = BookieDirectory(session, 1000.0)
    await directory.start()
    async with directory._refreshing:
        await admin.delete(f"{HERE}/b07")
        await admin.create(f"{HERE}/b07", registration("b07:2"), ephemeral=True)
        await asyncio.sleep(1)

    await asyncio.sleep(1)
    assert directory.address("b07") == "b07:2"
    await directory.close()


@simulated
async def test_of_many_some_are_read_again_each_time_and_all_in_turn():
    names = [f"b{n:02d}" for n in range(40)]
    store, admin = await a_store(*names)
    session = Counting(store.session("client"))
    directory = BookieDirectory(session, 10.0)
    await directory.start()
    for name in names:
        await admin.set(f"{HERE}/{name}", registration(f"{name}:1", frames=f"{name}:7"), 0)
    session.read.clear()

    await asyncio.sleep(10.5)
    assert session.read == names[:REREADS_PER_LOOK]
    await asyncio.sleep(20)
    assert session.read[: len(names)] == names
    assert [directory.address(name) for name in names] == [f"{name}:7" for name in names]
    await directory.close()


@simulated
async def test_free_space_which_no_watch_tells_of_is_brought_up_to_date_without_a_fuss():
    store, admin = await a_store("a")
    directory, told = BookieDirectory(store.session("client"), 30.0), []
    await directory.start()
    directory.add_listener(lambda: told.append(current().time()))
    await admin.set(f"{HERE}/a", registration("a:1", free_bytes=5), 0)
    await asyncio.sleep(31)
    assert [bookie.free_bytes for bookie in directory.writable()] == [5]
    assert told == []
    await admin.set(f"{HERE}/a", registration("a:9"), 1)
    await asyncio.sleep(31)
    assert len(told) == 1
    await directory.close()


@simulated
async def test_a_refresh_that_fails_is_repeated_until_it_ends_and_forgets_nothing():
    store, admin = await a_store("a")
    session = Deaf(store.session("client"))
    directory = BookieDirectory(session, 30.0)
    await directory.start()
    await admin.create(f"{HERE}/b", registration("b:1"))
    session.failing = True
    await asyncio.sleep(100)
    assert ids(directory.writable()) == ["a"]
    assert 60 < session.reads < 90, "once a second"
    session.failing = False
    await asyncio.sleep(2)
    assert ids(directory.writable()) == ["a", "b"]
    await directory.close()


@pytest.mark.parametrize("end", ["suspended", "expired"])
@simulated
async def test_what_happened_while_the_session_was_away_is_seen_when_it_is_back(end):
    store, admin = await a_store("a")
    session = store.session("client")
    directory = BookieDirectory(session, 1000.0)
    await directory.start()
    if end == "suspended":
        session.suspend(5.0)
    else:
        session.expire()
    await admin.create(f"{HERE}/b", registration("b:1"))
    await asyncio.sleep(40)
    assert ids(directory.writable()) == ["a", "b"]
    await directory.close()


@simulated
async def test_a_listener_that_fails_is_reported_and_harms_nobody_else():
    store, admin = await a_store("a")
    directory, told, reported = BookieDirectory(store.session("client"), 30.0), [], []
    loop = current()
    loop.call_exception_handler = reported.append
    await directory.start()

    def fails():
        raise KeyError("a defect")

    directory.add_listener(fails)
    directory.add_listener(lambda: told.append(1))
    for name in "bc":
        await admin.create(f"{HERE}/{name}", registration(f"{name}:1"))
        await asyncio.sleep(1)
    del loop.call_exception_handler
    assert told == [1, 1]
    assert [type(context["exception"]) for context in reported] == [KeyError, KeyError]
    assert ids(directory.writable()) == ["a", "b", "c"]
    await directory.close()


@simulated
async def test_a_listener_taken_away_by_another_is_not_called_and_may_be_taken_away_twice():
    store, admin = await a_store()
    directory, told = BookieDirectory(store.session("client"), 30.0), []
    await directory.start()

    def second():
        told.append("second")

    def first():
        told.append("first")
        directory.remove_listener(second)

    directory.add_listener(first)
    directory.add_listener(second)
    await admin.create(f"{HERE}/a", registration("a:1"))
    await asyncio.sleep(1)
    assert told == ["first"]
    directory.remove_listener(second)
    await directory.close()


@simulated
async def test_a_damaged_registration_is_no_bookie_and_hides_no_other():
    store, admin = await a_store("a")
    for name, value in (("b", b"{"), ("c", b"null"), ("d", registration("d:1", free_bytes=1e999))):
        await admin.create(f"{HERE}/{name}", value)
    directory = BookieDirectory(store.session("client"), 30.0)
    await directory.start()
    assert ids(directory.writable()) == ["a"]
    await directory.close()


@simulated
async def test_a_malformed_node_is_known_by_a_field_and_not_by_what_its_reason_reads_like():
    store, admin = await a_store("a")
    await admin.create(f"{HERE}/b", b"{")
    words = json.dumps({"reason": "its node is malformed"}).encode()
    await admin.create(f"{HERE}/c", words)
    listed = {one["id"]: one for one in await registered(store.session("client"))}
    assert [bool(listed[one].get("malformed")) for one in "abc"] == [False, True, False]
    assert listed_status(listed["b"])["why"] == "its node is malformed: b'{'"


@simulated
async def test_a_bookie_that_may_not_register_is_found_where_it_started_again():
    """As under a hold: the store has the registration of before, and a newer remembered address."""
    store, admin = await a_store("b1", "b2")
    directory = BookieDirectory(store.session("client"), 1.0)
    await directory.start()
    await admin.create(f"{paths.BOOKIES_KNOWN}/b1", registration("b1:2"), parents=True)
    await admin.delete(f"{HERE}/b1")
    await asyncio.sleep(1)
    assert directory.address("b1") == "b1:2"

    await admin.set(f"{paths.BOOKIES_KNOWN}/b1", registration("b1:3"), 0)
    await asyncio.sleep(2)
    assert directory.address("b1") == "b1:3"
    assert not directory.is_registered("b1")
    await directory.close()


@simulated
async def test_a_bookie_that_does_not_register_under_a_hold_is_listed_with_the_hold():
    store = SimStore()
    session = store.session("b1")
    await cluster.ensure(session, "c")
    await session.create(f"{paths.BOOKIES_KNOWN}/b1", registration("h:1"), parents=True)
    (bookie,) = await registered(session)
    assert "held" not in listed_status(bookie)["why"]
    await hold.put(session, "c", cluster.Hold("older", "b1"))
    (bookie,) = await registered(session)
    assert bookie["held"] == "older"
    assert "held" in listed_status(bookie)["why"]
