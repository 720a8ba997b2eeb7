"""A bookie's disks and a metadata store that went back in time."""

import random

import pytest

from bookie_server.disk import line_file, seen_links
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.line_file import BadLine
from bookie_server.disk.seen_links import SeenLinks
from bookie_server.ledgers.lineage import Lineage, LineageVerdict, judge
from spark_ledger.metadata import chain, cluster, hold, paths
from spark_ledger.metadata.chain import BOOKIE_EXTENDS_S, Chain, Extender
from spark_ledger.metadata.cluster import ClusterRecord, Hold
from tests.simulation.disk import SimDisk
from tests.simulation.loop import run
from tests.simulation.restoring import copied, go_back
from tests.simulation.store import SimStore

ID = "99999999-8888-4777-8666-555555555555"


class Bookie:
    """The disks of one bookie, and how it looks at the store."""

    def __init__(self, store: SimStore, name: str) -> None:
        self.store = store
        self.name = name
        self.disks = [SimDisk(store.rng), SimDisk(store.rng)]
        self.lineage: Lineage

    async def start(self) -> Lineage:
        session = self.store.session(self.name)
        self.lineage = await Lineage.open(session, self.name, ID, self.disks)
        await self.lineage.look()
        return self.lineage

    @property
    def refusal(self) -> str:
        return self.lineage.refusal


class Setting:
    """A cluster with two bookies and a process that appends links."""

    def __init__(self) -> None:
        self.store = SimStore(random.Random(5))
        self.admin = self.store.session("admin")
        self.a, self.b = Bookie(self.store, "a"), Bookie(self.store, "b")

    @classmethod
    async def begun(cls) -> "Setting":
        self = cls()
        await cluster.ensure(self.admin, ID)
        await self.a.start()
        await self.b.start()
        return self

    async def links(self, count: int) -> None:
        """So many more, as maintenance appends them in time."""
        session = self.store.session("maintenance")
        for _ in range(count):
            await chain.extend(session, self.store.peek(paths.CHAIN))

    def hold(self) -> Hold | None:
        return cluster.decode(self.store.peek(paths.CLUSTER).value).hold


def scenario(act) -> None:
    async def main() -> None:
        await act(await Setting.begun())

    run(main(), seed=1)


# -- the file on disk ------------------------------------------------------------------------------


def test_the_file_of_links_is_one_line_of_text():
    data = seen_links.FILE.encode(SeenLinks(ID, 2, {0: "8f3c", 17: "02aa"}))
    assert data == f"spark-ledger-links 1 {ID} 2 0:8f3c 17:02aa ".encode() + data[-9:]
    assert seen_links.FILE.decode(data) == SeenLinks(ID, 2, {0: "8f3c", 17: "02aa"})


@pytest.mark.parametrize("at", range(0, 70, 7))
def test_a_file_with_a_wrong_byte_is_refused(at: int):
    data = bytearray(seen_links.FILE.encode(SeenLinks(ID, 2, {0: "8f3c"})))
    data[at] ^= 1
    with pytest.raises(BadLine):
        seen_links.FILE.decode(bytes(data))


def test_of_two_disks_the_newer_file_counts_and_a_damaged_one_is_none():
    async def main() -> None:
        old, new, bad = SimDisk(), SimDisk(), SimDisk()
        await seen_links.FILE.write([old], SeenLinks(ID, 0, {0: "a", 900: "b"}))
        await seen_links.FILE.write([new], SeenLinks(ID, 1, {0: "a", 20: "c"}))
        await seen_links.FILE.write([bad], SeenLinks(ID, 7, {5: "x"}))
        file = await bad.open(seen_links.FILE.name)
        await file.close()
        await bad.remove(seen_links.FILE.name)
        (await bad.create(seen_links.FILE.name))
        assert await seen_links.read([old, bad, new], ID) == SeenLinks(ID, 1, {0: "a", 20: "c"})
        assert await seen_links.read([bad], ID) == SeenLinks(ID)

    run(main(), seed=1)


@pytest.mark.parametrize("keep", ["none", "some", "all"])
def test_a_crash_while_links_are_written_leaves_the_old_ones_or_the_new(keep):
    async def main() -> None:
        disk = SimDisk(random.Random(3))
        old, new = SeenLinks(ID, 0, {0: "a"}), SeenLinks(ID, 0, {0: "a", 1: "b"})
        await seen_links.FILE.write([disk], old)
        disk.crash(keep)
        assert await seen_links.read([disk], ID) == old
        await seen_links.FILE.write([disk], new)
        disk.crash(keep)
        assert await seen_links.read([disk], ID) == new

    run(main(), seed=1)


# -- the verdict -----------------------------------------------------------------------------------

OURS, HELD = ClusterRecord(ID, 3), ClusterRecord(ID, 3, Hold("older", "b"))
SEEN = SeenLinks(ID, 3, {0: "a", 4: "b"})
GROWN = Chain({0: "a", 4: "b", 5: "c"})


@pytest.mark.parametrize(
    ("seen", "found", "links", "next_id", "id_max", "verdict"),
    [
        (SEEN, OURS, GROWN, 100, 99, LineageVerdict.OURS),
        (SEEN, HELD, GROWN, None, 99, LineageVerdict.OURS),
        (SEEN, OURS, GROWN, 99, 99, LineageVerdict.OLDER),
        (SEEN, OURS, Chain({0: "a"}), 100, 0, LineageVerdict.OLDER),
        (SEEN, OURS, Chain({0: "a", 4: "x", 5: "y"}), 100, 0, LineageVerdict.OLDER),
        (SEEN, OURS, None, 100, 0, LineageVerdict.OLDER),
        (SEEN, ClusterRecord(ID, 2), GROWN, 100, 0, LineageVerdict.OLDER),
        (SEEN, ClusterRecord(ID, 4), Chain({0: "a", 2: "x"}), 100, 99, LineageVerdict.ACCEPTED),
        (SEEN, ClusterRecord(ID, 4), Chain({0: "a", 2: "x"}), 99, 99, LineageVerdict.OLDER),
        (SEEN, ClusterRecord("another", 3), GROWN, 100, 0, LineageVerdict.FOREIGN),
        (SEEN, None, None, 1, 0, LineageVerdict.FOREIGN),
        (SeenLinks(ID), ClusterRecord(ID), None, 1, 0, LineageVerdict.OURS),
        (SeenLinks(ID), ClusterRecord(ID), GROWN, 100, 99, LineageVerdict.OURS),
    ],
)
def test_what_a_store_is_to_a_disk(seen, found, links, next_id, id_max, verdict):
    assert judge(seen, found, links, next_id, id_max)[0] is verdict


# -- looks -----------------------------------------------------------------------------------------


def test_an_existing_cluster_gets_its_first_link_and_bookies_keep_it():
    async def act(at: Setting) -> None:
        assert chain.decode(at.store.peek(paths.CHAIN).value).newest == 0
        await at.a.lineage.look()
        assert (await seen_links.read(at.a.disks, ID)).newest == 0
        assert at.a.refusal == "" and at.hold() is None

    scenario(act)


@pytest.mark.parametrize("used", [0, 1, 3, 12])
def test_the_first_bookie_that_looks_holds_a_store_that_went_back(used: int):
    """Used for a while before any bookie looked, too: links of the same numbers are others."""

    async def act(at: Setting) -> None:
        copy = copied(at.store)
        await at.links(3)
        await at.a.lineage.look()
        go_back(at.store, copy)
        await at.links(used)
        await at.b.start()  # it was down, and has seen nothing newer than the copy
        assert at.b.refusal == "" and at.hold() is None
        await at.a.start()
        assert "link 3" in at.a.refusal and at.hold().by == "a"
        await at.b.lineage.look()
        assert "link 3" in at.b.refusal

    scenario(act)


def test_a_bookie_that_was_off_meanwhile_holds_the_store_when_it_comes_back():
    async def act(at: Setting) -> None:
        copy = copied(at.store)
        await at.links(2)
        await at.b.start()
        go_back(at.store, copy)
        for _ in range(40):
            await at.links(1)
            await at.a.lineage.look()
        assert at.hold() is None
        await at.b.start()
        assert at.hold() is not None

    scenario(act)


def test_after_accept_a_bookie_that_was_down_takes_the_store_as_it_is():
    async def act(at: Setting) -> None:
        copy = copied(at.store)
        await at.links(3)
        await at.a.lineage.look()
        await at.b.lineage.look()
        go_back(at.store, copy)
        await at.a.start()
        await hold.accept(at.store.session("person"))
        for bookie in (at.a, at.b):  # b was down all the time
            await bookie.start()
            assert bookie.refusal == ""
            assert (await seen_links.read(bookie.disks, ID)).epoch == 1
        assert at.hold() is None

    scenario(act)


def test_the_copy_of_before_an_accept_put_back_is_held_and_gets_a_new_epoch():
    async def act(at: Setting) -> None:
        first = copied(at.store)
        await at.links(3)
        await at.a.lineage.look()
        go_back(at.store, first)
        await at.a.start()
        await hold.accept(at.store.session("person"))
        await at.a.lineage.look()
        go_back(at.store, first)
        await at.a.lineage.look()
        assert "epoch" in at.a.refusal
        assert (await hold.accept(at.store.session("person"))).cluster.epoch == 2

    scenario(act)


def test_the_newest_store_put_back_ends_nothing_by_itself_but_is_no_older_one():
    async def act(at: Setting) -> None:
        old = copied(at.store)
        await at.links(3)
        await at.a.lineage.look()
        newest = copied(at.store)
        go_back(at.store, old)
        await at.a.lineage.look()
        assert at.hold() is not None
        go_back(at.store, newest)
        await at.a.lineage.look()
        assert at.hold() is None and at.a.refusal == ""

    scenario(act)


@pytest.mark.parametrize("found", ["empty", "another"])
def test_a_store_without_the_cluster_is_neither_held_nor_registered_in(found: str):
    async def act(at: Setting) -> None:
        other = SimStore(random.Random(2))
        if found == "another":
            await cluster.ensure(other.session("admin"), "another")
        go_back(at.store, copied(other))
        before = copied(at.store)
        assert not await at.a.lineage.may_register()
        assert copied(at.store) == before

    scenario(act)


def test_without_maintenance_a_bookie_appends_links_itself():
    async def act(at: Setting) -> None:
        now = [0.0]
        at.a.lineage.extender = Extender(at.admin, BOOKIE_EXTENDS_S, lambda: now[0])
        await at.a.lineage.look()
        for now[0] in (170.0, 190.0, 300.0, 380.0):
            await at.a.lineage.look()
        assert chain.decode(at.store.peek(paths.CHAIN).value).newest == 2

    scenario(act)


def test_disks_that_cannot_keep_links_do_not_keep_the_bookie_from_registering(monkeypatch):
    async def act(at: Setting) -> None:
        await at.links(1)

        async def fails(*_: object) -> None:
            raise DiskFailed("full")

        monkeypatch.setattr(line_file, "replace_file", fails)
        assert await at.a.lineage.may_register()
        monkeypatch.undo()
        assert await at.a.lineage.may_register()
        assert (await seen_links.read(at.a.disks, ID)).newest == 1

    scenario(act)


def test_a_store_that_is_held_again_while_a_bookie_looks_is_seen_by_its_watch():
    async def act(at: Setting) -> None:
        heard = []
        at.a.lineage.listeners.append(lambda: heard.append(at.a.refusal != ""))
        await hold.put(at.store.session("other"), ID, Hold("older", "other"))
        await at.a.lineage.look()
        await hold.accept(at.store.session("person"))
        await at.a.lineage.look()
        assert heard == [True, False]

    scenario(act)
