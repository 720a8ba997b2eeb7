"""A node of several directories that places large entries, for tests of direct writes."""

import asyncio

from bookie_server.api.status import Status
from bookie_server.journal.format import Record, RecordKind
from bookie_server.journal.scan import Replay
from bookie_server.logs.entry_log import log_path
from bookie_server.logs.index import decode_ledger_state
from bookie_server.logs.scan import scan
from spark_ledger.metadata import cluster
from tests.kit.settings import with_settings
from tests.simulation.disk import SimDisk
from tests.unit.bookie_server.clustered_node import CLUSTER_ID, SETTINGS, Clustered
from tests.unit.bookie_server.node import KIB, entry

OK, ABSENT, LIMBO, BUSY = Status.OK, Status.NO_SUCH_ENTRY, Status.LIMBO, Status.BUSY
JOURNALED, PLACED = "journaled", "placed"
LARGE = 16 * KIB
PLACING = with_settings(
    SETTINGS,
    large_entry_bytes=LARGE,
    journal_pending_bytes_max=1024 * KIB,
    write_cache_bytes=2048 * KIB,
    entry_log_bytes_max=1024 * KIB,
    disk_reserve_bytes=4 * KIB,
)
SPLITTING = {"entry_bytes_max": LARGE, "write_cache_bytes": 160 * KIB}
"""A flush begins with the third large entry in the write cache."""


def large(ledger_id: int, entry_id: int) -> bytes:
    return entry(ledger_id, entry_id, bytes([(7 * ledger_id + entry_id) % 251]) * LARGE)


def small(ledger_id: int, entry_id: int, size: int = 100) -> bytes:
    return entry(ledger_id, entry_id, b"s" * size)


class Wide(Clustered):
    """A node that places large entries."""

    def __init__(self, journals: int, ledgers: int, config=PLACING) -> None:
        super().__init__(journals, ledgers, config)

    async def home(self, directory: str, *ledger_ids: int) -> None:
        """These ledgers are made, and their entries go to the directory."""
        await self.create_ledger(*ledger_ids)
        for name, disk in self.ledgers.items():
            if name != directory:
                disk.fill_up(1 << 30)
        await self.bookie.disks.look()
        for ledger_id in ledger_ids:
            assert await self.add(small(ledger_id, 0)) == [OK]
            assert self.directories(ledger_id)[-1] == directory
        for disk in self.ledgers.values():
            disk.empty_out()
        await self.bookie.disks.look()

    def directories(self, ledger_id: int) -> tuple[str, ...]:
        state = self.storage.state(ledger_id)
        assert state is not None
        return state.directories

    async def journaled(self, name: str = "j0") -> list[Record]:
        """What the journal would replay after a kill."""
        found = []
        async for records in Replay(self.journals[name], None).records():
            found += [r._replace(body=bytes(r.body)) for r in records]
        return found

    async def ways(self, ledger_id: int, name: str = "j0") -> dict[int, str]:
        """By entry, where a start would find it that was not flushed: in the journal, or else in
        the direct log of a directory that lives."""
        records = [r for r in await self.journaled(name) if r.kind is RecordKind.ENTRY]
        journaled = [r.entry_id for r in records if r.ledger_id == ledger_id]
        placed = [e for i, e in await self.all_placed() if i == ledger_id]
        return {**dict.fromkeys(placed, PLACED), **dict.fromkeys(journaled, JOURNALED)}

    async def all_placed(self) -> list[tuple[int, int]]:
        """Ledger and id of the entries in direct logs beyond their marks."""
        found: list[tuple[int, int]] = []
        for store in self.storage.stores:
            for log_id, start in (await store.index.marked_logs()).items():
                file = await store.disk.open(log_path(log_id))
                async for chunk in scan(file, log_id, file.end, start):
                    found += [record.location[:2] for record in chunk.records]
        return found

    async def told(self, ledger_id: int, directory: str, name: str = "j0") -> int:
        """How many records of the journal say that the directory has entries of the ledger."""
        records = [r for r in await self.journaled(name) if r.kind is RecordKind.LEDGER]
        states = [decode_ledger_state(r.body) for r in records if r.ledger_id == ledger_id]
        return sum(directory in state.directories for state in states)

    def copies(self, wanted: bytes, directory: str = "d0") -> int:
        """How often the entry lies in the directory's logs."""
        disk = self.ledgers[directory]
        return sum(disk.content(path).count(wanted) for path in self.files(disk, "entrylog"))

    def sealed_with(self, wanted: bytes, directory: str = "d0") -> int:
        """How many sealed logs of the directory have the entry."""
        store = next(each for each in self.storage.stores if each.id == directory)
        paths = [log_path(log_id) for log_id in store.logs.sealed_ids()]
        return sum(wanted in self.ledgers[directory].content(path) for path in paths)

    def in_background(self, *entries: bytes, **more) -> "asyncio.Task[list[Status]]":
        return asyncio.ensure_future(self.add(*entries, **more))

    async def flushed(self) -> None:
        flushes = self.storage.flushes
        if not self.storage.is_flushing:
            self.storage.begin_flush()
        while self.storage.flushes == flushes:
            await moment()

    async def served(self, ledger_id: int, *entry_ids: int) -> None:
        """Each is there, and what was sent."""
        for each in entry_ids:
            found = await self.read(ledger_id, each, each)
            assert found.results[0].status is OK, (ledger_id, each, found.results[0])
            assert bytes(found.results[0].entry) in (small(ledger_id, each), large(ledger_id, each))


async def with_small_entries(journals: int = 1, ledgers: int = 2, **more):
    """Ledgers 1 and 2 at home in d0, each with a small entry 0."""
    node = Wide(journals, ledgers, with_settings(PLACING, **more))
    await cluster.ensure(node.store.session("admin"), CLUSTER_ID)
    await node.start()
    await node.home("d0", 1, 2)
    return node


async def moment() -> None:
    await asyncio.sleep(0.01)


def slow(disk: SimDisk, seconds: float) -> None:
    disk.faults.sync_s = (seconds, seconds)
