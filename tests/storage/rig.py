"""One storage node over simulated disks that is started, asked, crashed and started again.

Always true: what is known of the engine's inside is known here and nowhere else in this package;
a node runs as a process of the simulated loop, so that a crash leaves nothing of it running.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bookie_server.api import messages as m
from bookie_server.bookie import Bookie
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.writer import JournalFailed
from bookie_server.logs.index import LedgerState, Location
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from bookie_server.storage.storage import LedgerStorage
from tests.kit.budgets import ENGINE
from tests.kit.handling import reclaim_once
from tests.kit.peers import has_everything
from tests.simulation.disk import Keep, SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.loop import Process, current
from tests.storage.records import CLUSTER_ID, Records
from tests.storage.stepping import SteppedDisk, Steps, stepped_index, stepped_store

KIB = 1 << 10
BOOKIE_ID = "00000000-0000-0000-0000-000000000001"
PAGE_CACHE = True


class Down(Exception):
    """The node does not run: nobody answers."""


@dataclass(frozen=True)
class Shape:
    """What a node is made of. `stepped`: `Rig.steps` counts what is done to the disks.
    `page_cache`: the last ledger has that durability. `eager_index`: the index syncs by itself
    after all that it is given, as RocksDB may; otherwise it never does."""

    journals: int = 1
    ledgers: int = 1
    config: StorageConfig = ENGINE
    stepped: bool = False
    page_cache: bool = False
    eager_index: bool = False


class EagerIndex(SimIndex):
    """One that syncs by itself: nobody may rely on it, and nobody may be harmed by it."""

    async def put(self, locations: Sequence[Location]) -> None:
        await super().put(locations)
        await self.sync()

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        await super().move(moves)
        await self.sync()

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        await super().delete(ledger_id, entry_ids)
        await self.sync()

    async def delete_ledger(self, ledger_id: int) -> None:
        await super().delete_ledger(ledger_id)
        await self.sync()

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        await super().put_ledgers(states)
        await self.sync()

    async def delete_states(self, ledger_ids: Sequence[int]) -> None:
        await super().delete_states(ledger_ids)
        await self.sync()

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        await super().mark_logs(marks)
        await self.sync()


class Rig:
    """The node, its disks and the metadata it reads."""

    def __init__(self, shape: Shape, rng: random.Random | None = None) -> None:
        self.shape = shape
        self.rng = rng or random.Random(0)
        self.steps = Steps()
        self.records = Records()
        if shape.stepped:
            stepped_store(self.records, self.steps)
        self.ids: dict[SimDisk, str] = {}
        self.journal_disks = [self._disk(f"journal-{n}") for n in range(shape.journals)]
        self.ledger_disks = [self._disk(f"ledger-{n}") for n in range(shape.ledgers)]
        self.missing: list[SimDisk] = []
        """Directories that the next start does not find."""
        self.boots = 0
        self.process: Process | None = None
        self._bookie: Bookie | None = None

    def _disk(self, name: str) -> SimDisk:
        disk = SteppedDisk(self.rng) if self.shape.stepped else SimDisk(self.rng)
        if isinstance(disk, SteppedDisk):
            disk.steps, disk.label = self.steps, f"{name}:"
        self.ids[disk] = name
        return disk

    def add_journal_directory(self) -> None:
        """There from the next start on."""
        self.journal_disks.append(self._disk(f"journal-{len(self.journal_disks)}"))

    def add_ledger_directory(self) -> None:
        """There from the next start on."""
        self.ledger_disks.append(self._disk(f"ledger-{len(self.ledger_disks)}"))

    @property
    def disks(self) -> list[SimDisk]:
        return [*self.journal_disks, *self.ledger_disks]

    @property
    def bookie(self) -> Bookie:
        assert self._bookie is not None, "the node does not run"
        return self._bookie

    @property
    def running(self) -> bool:
        return self._bookie is not None

    @property
    def failed(self) -> bool:
        """Whether the node exits now, for a disk of it failed. Raises what no disk is to blame
        for."""
        if not self.bookie.failed.done():
            return False
        error = self.bookie.failed.exception()
        if error is not None and not isinstance(error, DiskFailed | JournalFailed):
            raise error
        return True

    # -- its life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises what the node does not start for."""
        self.boots += 1
        process = self.process = current().process(f"bookie#{self.boots}")
        self._bookie = await process.spawn(self._boot(), name="boots")

    async def _boot(self) -> Bookie:
        failed: dict[str, str] = {}
        ledgers = []
        for directory_id, disk in self._named(self.ledger_disks):
            kind = EagerIndex if self.shape.eager_index else SimIndex
            try:
                index = await kind.open(disk)
                if self.shape.stepped:
                    stepped_index(index, self.steps)
                ledgers.append(LedgerDirectory(directory_id, disk, index, directory_id))
            except DiskFailed as error:
                failed[directory_id] = str(error)
        if not ledgers:
            raise DiskFailed(str(failed))
        journals = [JournalDirectory(*each, each[0]) for each in self._named(self.journal_disks)]
        directories = Directories(journals, ledgers, failed)
        return await Bookie.start(
            *(BOOKIE_ID, directories, self.records, self.shape.config, CLUSTER_ID),
            ask=has_everything,
        )

    def _named(self, disks: Sequence[SimDisk]) -> Iterator[tuple[str, SimDisk]]:
        for disk in disks:
            if disk not in self.missing:
                yield self.ids[disk], disk

    def crash(self, keep: Keep, seed: int = 0) -> None:
        """The node dies; what `keep` does not spare of the unsynced bytes dies with it."""
        self.rng.seed(seed)
        for disk in self.disks:
            disk.crash(keep)
        if self.process is not None:
            self.process.kill()
        self._bookie = self.process = None

    async def stop(self) -> None:
        """In good order; what is durable then is all that is left."""
        await self.ended()
        self.crash("none")

    async def ended(self) -> None:
        """The node has stopped in good order; its disks are as it left them."""
        assert self.process is not None
        await self.process.spawn(self.bookie.stop(), name="stops")

    # -- what it is asked ------------------------------------------------------------------------

    def ask(self, request: m.Request) -> "asyncio.Task[Any]":
        """The answer comes from the node's process: none after a crash."""
        if self.process is None:
            raise Down
        return self.process.spawn(self.bookie.handle(request))

    async def reclaim(self, below: float = 1.0) -> None:
        """A pass that buries, collects and compacts, now."""
        assert self.process is not None
        await self.process.spawn(reclaim_once(self.bookie, below), name="reclaims")

    async def walked(self) -> None:
        """Returns when the node knows again which ledgers are in limbo."""
        while self.bookie.ledgers.every_ledger_state().limbo and not self.failed:
            await _moment()

    async def look_at_space(self) -> None:
        """What the monitor does now and then."""
        assert self.process is not None
        await self.process.spawn(self.bookie.disks.look(), name="looks")

    @property
    def storage(self) -> LedgerStorage:
        """The bookie's engine, which only tests look at from outside."""
        return self.bookie.storage

    def drop(self, disk: SimDisk) -> None:
        """The directory was found to be lost, as the monitor finds it."""
        self.storage.drop(self.ids[disk], DiskFailed("it was unmounted"))

    @property
    def living(self) -> list[SimDisk]:
        """Ledger directories that the node has not dropped."""
        alive = [store.id for store in self.storage.stores]
        return [disk for disk in self.ledger_disks if self.ids[disk] in alive]

    def directories(self, ledger_id: int) -> tuple[str, ...]:
        """Those that may hold entries of the ledger; the last takes new ones."""
        state = self.storage.state(ledger_id)
        return () if state is None else state.directories

    @property
    def is_flushing(self) -> bool:
        """Whether a flush was begun and has not ended."""
        return self.storage.is_flushing

    def in_cache(self, ledger_id: int) -> bool:
        """Whether entries of the ledger are still to be flushed."""
        return self.storage.in_cache(ledger_id)

    async def stored(self, ledger_id: int) -> list[int]:
        """The entries of the ledger that cache and index know."""
        return list(await self.storage.reader.stored(ledger_id, 0, 1000))

    async def flush(self) -> None:
        """Returns when a flush that began now is complete."""
        storage = self.storage
        while storage.is_flushing and not self.failed:
            await _moment()
        flushes = storage.flushes
        if not self.failed:
            storage.begin_flush()
        while not self.failed and (storage.flushes == flushes or storage.is_flushing):
            await _moment()

    def begin_flush(self) -> None:
        """What a full half of the write cache does."""
        storage = self.storage
        if not storage.is_flushing:
            storage.begin_flush()


async def _moment() -> None:
    await asyncio.sleep(0.001)
