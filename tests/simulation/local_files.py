"""Clients on the hosts of all bookies: what the files of a bookie show to another process there.

Always true:
- a file shows what was written to it, synced or not, whoever wrote it and whether he lives: after a
  power cut what the disk kept, after rot what the disk has, EIO where the disk says so;
- a name that is gone, or a directory that is lost or away, is FileNotFoundError;
- a look takes as long as the disk takes, and some of them much longer, so that a location may be
  gone by then; a few clients may look at nothing.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from bookie_server.api.messages import IDENTITY_FILE, EntryLocation
from bookie_server.disk.interface import DiskFailed, NoSuchFile
from spark_ledger.bookies.local_reads import HostFiles
from spark_ledger.ledger import reader
from tests.simulation.disk import SimDisk
from tests.simulation.network import SimClient, SimNetwork

if TYPE_CHECKING:
    from tests.simulation.world import BookieNode

LATE = 0.1
LATE_S = (0.0, 1.3)  # more than LocalReads waits, too
BLOCK = 4
REFUSED = 0.2
"""Of the clients."""
T = TypeVar("T")


@contextmanager
def small_blocks() -> Iterator[None]:
    """Clients take any entry for one that is worth to be read in the files of a bookie, and ask for
    the locations of a few ahead of time."""
    before = reader.LOCAL_READ_BYTES_MIN, reader.BLOCK_ENTRIES
    try:
        reader.LOCAL_READ_BYTES_MIN, reader.BLOCK_ENTRIES = 1, BLOCK
        yield
    finally:
        reader.LOCAL_READ_BYTES_MIN, reader.BLOCK_ENTRIES = before


def root(address: str, directory: str) -> str:
    """The path of a ledger directory of the bookie there."""
    return f"/{address}/{directory}"


class SimFiles(HostFiles):
    """All chance comes from `rng`."""

    def __init__(self, nodes: "Sequence[BookieNode]", rng: random.Random) -> None:
        super().__init__()
        self._nodes = nodes
        self._rng = rng
        self._refused = rng.random() < REFUSED

    async def read(
        self, locations: Sequence[EntryLocation], check: Callable[[list[memoryview]], T]
    ) -> T:
        if all(each.file == IDENTITY_FILE for each in locations):
            return check([memoryview(self._identity(each.directory)) for each in locations])
        if self._rng.random() < LATE:
            await asyncio.sleep(self._rng.uniform(*LATE_S))
        return check([memoryview(await self._look(each)) for each in locations])

    def _identity(self, directory: str) -> bytes:
        for node, mounted, _ in self._mounted():
            if mounted == directory:
                return node.bookie_id.encode()
        raise FileNotFoundError(directory)

    async def _look(self, location: EntryLocation) -> bytes:
        """Raises OSError."""
        for _, mounted, disk in self._mounted():
            if mounted == location.directory:
                try:
                    return await disk.look(location.file, location.position, location.entry_bytes)
                except NoSuchFile as error:
                    raise FileNotFoundError(str(error)) from error
                except DiskFailed as error:
                    raise OSError(str(error)) from error
        raise FileNotFoundError(location.directory)

    def _mounted(self) -> "Iterator[tuple[BookieNode, str, SimDisk]]":
        if self._refused:
            raise PermissionError("another user's")
        for node in self._nodes:
            for number, disk in enumerate(node.ledger_disks):
                if number not in node.missing:
                    yield node, root(node.address, node.ledger_names[number]), disk


class NearClient(SimClient):
    """spark_ledger.bookies.bookie_client.Network for a caller on the hosts of all bookies."""

    def __init__(self, network: SimNetwork, caller: str, files: SimFiles) -> None:
        super().__init__(network, caller)
        self.local_files = files

    def is_here(self, _address: str) -> bool:
        return True
