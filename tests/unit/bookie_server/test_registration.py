import asyncio
import json
import random

from bookie_server import __version__
from bookie_server.disk.interface import DiskFailed
from bookie_server.serve.registration import Registration, RegistrationState
from spark_ledger.metadata.store import SessionState
from tests.simulation.loop import run
from tests.simulation.store import SimSession, SimStore

ID = "b1"
AVAILABLE, READONLY, KNOWN = (
    f"/bookies/{folder}/{ID}" for folder in ("available", "readonly", "known")
)
REFRESH_S = 30.0


class World:
    """One bookie's registration on a simulated store."""

    def __init__(self) -> None:
        self.store = SimStore(random.Random(7))
        self.standing = RegistrationState(free_bytes=10, total_bytes=20)
        self.disk_fails = False

    def registration(
        self, session: SimSession, address: str = "host:1", frames: str = "host:7"
    ) -> Registration:
        async def standing() -> RegistrationState:
            if self.disk_fails:
                raise DiskFailed("statvfs: EIO")
            return self.standing

        return Registration(session, ID, address, frames, "rack-1", standing, REFRESH_S)

    def at(self, path: str) -> dict[str, object] | None:
        found = self.store.peek(path)
        return None if found is None else json.loads(found.value)


def test_a_registered_bookie_is_available_and_known():
    async def scenario() -> None:
        world = World()
        session = world.store.session("bookie")
        registration = world.registration(session)
        await registration.start(first_seen_ms=5)
        assert world.at(AVAILABLE) == {
            "address": "host:1",
            "frames": "host:7",
            "rack": "rack-1",
            "free_bytes": 10,
            "total_bytes": 20,
            "version": 1,
            "server_version": __version__,
        }
        assert world.store.peek(AVAILABLE).owner == session.session_id
        known = {"address": "host:1", "frames": "host:7", "first_seen_ms": 5}
        assert world.at(KNOWN) == known
        await registration.stop()
        assert world.at(AVAILABLE) is None
        assert world.at(KNOWN) == known

    run(scenario(), seed=1)


def test_the_node_of_a_killed_predecessor_is_replaced_at_once():
    async def scenario() -> None:
        world = World()
        before = world.store.session("before")
        await world.registration(before).start(first_seen_ms=5)
        before.suspend(1000)
        now = world.store.session("now")
        registration = world.registration(now, "host:2", "host:8")
        await registration.start(first_seen_ms=9)
        assert world.store.peek(AVAILABLE).owner == now.session_id
        assert world.at(AVAILABLE)["address"] == "host:2"
        assert world.at(KNOWN) == {"address": "host:2", "frames": "host:8", "first_seen_ms": 5}
        await registration.stop()

    run(scenario(), seed=1)


def test_a_bookie_that_may_not_register_does_as_soon_as_it_may():
    async def scenario() -> None:
        world = World()
        session, may = world.store.session("bookie"), [False]

        async def may_register() -> bool:
            return may[0]

        async def standing() -> RegistrationState:
            return world.standing

        registration = Registration(
            session, ID, "host:1", "host:7", "rack-1", standing, REFRESH_S, may_register
        )
        await registration.start(first_seen_ms=5)
        await asyncio.sleep(5 * REFRESH_S)
        assert not registration.is_registered
        assert world.at(AVAILABLE) is None and world.at(READONLY) is None
        assert world.at(KNOWN) is not None, "by it who reads finds the bookie"
        may[0] = True
        await asyncio.sleep(3)
        assert registration.is_registered and world.at(AVAILABLE) is not None
        may[0] = False  # one that is registered stays so, and tells of its space
        world.standing = RegistrationState(1, 20, "disk full")
        registration.publish_soon()
        await asyncio.sleep(3)
        assert world.at(READONLY)["reason"] == "disk full" and world.at(AVAILABLE) is None
        session.expire()
        await asyncio.sleep(2 * REFRESH_S)
        assert world.at(READONLY) is None and not registration.is_registered
        await registration.stop()

    run(scenario(), seed=1)


def test_a_lost_session_is_made_good():
    async def scenario() -> None:
        world = World()
        session, back = world.store.session("bookie"), asyncio.Event()
        registration = world.registration(session)
        await registration.start(first_seen_ms=5)
        first = session.session_id
        session.add_session_listener(lambda state: state is SessionState.CONNECTED and back.set())
        session.expire()
        await back.wait()
        await asyncio.sleep(REFRESH_S / 10)
        assert session.session_id != first
        assert world.store.peek(AVAILABLE).owner == session.session_id
        await registration.stop()

    run(scenario(), seed=1)


def test_free_space_is_brought_up_to_date():
    async def scenario() -> None:
        world = World()
        registration = world.registration(world.store.session("bookie"))
        await registration.start(first_seen_ms=5)
        world.standing = RegistrationState(free_bytes=3, total_bytes=20)
        await asyncio.sleep(REFRESH_S * 1.5)
        assert world.at(AVAILABLE)["free_bytes"] == 3
        await registration.stop()

    run(scenario(), seed=1)


def test_free_space_that_cannot_be_told_for_a_while_does_not_end_the_registration():
    async def scenario() -> None:
        world = World()
        session = world.store.session("bookie")
        registration = world.registration(session)
        await registration.start(first_seen_ms=5)
        world.disk_fails = True
        await asyncio.sleep(2 * REFRESH_S)
        world.disk_fails = False
        session.expire()
        await asyncio.sleep(2 * REFRESH_S)
        assert world.store.peek(AVAILABLE).owner == session.session_id
        await registration.stop()

    run(scenario(), seed=1)


def test_a_bookie_that_turns_read_only_moves_with_its_reason_and_comes_back():
    async def scenario() -> None:
        world = World()
        registration = world.registration(world.store.session("bookie"))
        await registration.start(first_seen_ms=5)
        world.standing = RegistrationState(1, 20, readonly_reason="disk nearly full")
        await asyncio.sleep(REFRESH_S * 1.5)
        assert world.at(AVAILABLE) is None
        assert world.at(READONLY)["reason"] == "disk nearly full"
        world.standing = RegistrationState(9, 20)
        await asyncio.sleep(REFRESH_S)
        assert world.at(READONLY) is None
        assert world.at(AVAILABLE)["free_bytes"] == 9
        await registration.stop()

    run(scenario(), seed=1)


def test_a_change_is_published_at_once_the_new_place_before_the_old_one_goes():
    async def scenario() -> None:
        world = World()
        registration = world.registration(world.store.session("bookie"))
        await registration.start(first_seen_ms=5)
        places: list[tuple[bool, bool]] = []
        world.store.listeners.append(
            lambda *_: places.append(
                (world.at(AVAILABLE) is not None, world.at(READONLY) is not None)
            )
        )
        world.standing = RegistrationState(1, 20, readonly_reason="disk full: /a")
        registration.publish_soon()
        await asyncio.sleep(REFRESH_S / 10)
        world.standing = RegistrationState(9, 20)
        registration.publish_soon()
        await asyncio.sleep(REFRESH_S / 10)
        assert places == [(True, True), (False, True), (True, True), (True, False)]
        await registration.stop()

    run(scenario(), seed=1)


def test_a_bookie_that_lost_a_directory_is_available_and_says_which():
    async def scenario() -> None:
        world = World()
        world.standing = RegistrationState(1, 20, degraded="ledger directory /b failed: EIO")
        registration = world.registration(world.store.session("bookie"))
        await registration.start(first_seen_ms=5)
        assert world.at(AVAILABLE)["degraded"] == "ledger directory /b failed: EIO"
        await registration.stop()

    run(scenario(), seed=1)


def test_writes_with_unknown_outcomes_end_in_one_true_registration():
    async def scenario(seed: int) -> None:
        world = World()
        session = world.store.session("bookie")
        registration = world.registration(session)
        await registration.start(first_seen_ms=5)
        world.store.faults.unknown = 0.5
        for free in range(20):
            world.standing = RegistrationState(free, 20, "full" if free % 3 == 0 else "")
            await asyncio.sleep(REFRESH_S)
        world.store.calm()
        world.standing = RegistrationState(7, 20)
        await asyncio.sleep(REFRESH_S * 2)
        assert world.at(READONLY) is None
        assert world.at(AVAILABLE)["free_bytes"] == 7
        await registration.stop()

    for seed in range(5):
        run(scenario(seed), seed=seed)


def test_a_registration_replaced_by_another_address_is_an_error_and_one_of_our_own_is_not(caplog):
    async def scenario() -> None:
        world = World()
        one = world.registration(world.store.session("bookie"), "host:1")
        await one.start(first_seen_ms=5)
        twin = world.registration(world.store.session("copy"), "host:2")
        await twin.start(first_seen_ms=5)
        assert not caplog.messages
        await asyncio.sleep(REFRESH_S * 1.5)
        await one.stop()
        await twin.stop()

    run(scenario(), seed=1)
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "at host:2: it serves from a copy" in errors[0]
