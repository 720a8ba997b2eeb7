"""One bookie over simulated disks, with short ways to ask it things."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, Self

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.status import Status
from bookie_server.bookie import Bookie
from bookie_server.config import StorageConfig
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from bookie_server.storage.storage import LedgerStorage
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, Tokens, verifiers
from tests.kit.budgets import NODE as CONFIG
from tests.kit.deleting import delete_ledgers
from tests.kit.handling import handle_bytes
from tests.kit.peers import has_everything
from tests.simulation.disk import Keep, SimDisk
from tests.simulation.index import SimIndex
from tests.simulation.store import SimSession, SimStore

KIB = 1 << 10
ID = "bookie-1"


def entry(ledger_id: int, entry_id: int, payload: bytes = b"payload", lac: int = -1) -> bytes:
    """An entry whose cumulative counts are those of equal entries before it."""
    count = entry_id + 1
    header = EntryHeader(
        ledger_id, entry_id, lac, count * len(payload), count, len(payload), payload_crc([payload])
    )
    return pack_header(header) + payload


class Node:
    """A bookie, its disks and its metadata; survives crashes of the bookie."""

    def __init__(
        self,
        config: StorageConfig = CONFIG,
        seed: int = 0,
        cluster_id: str = "",
        repair_credential: bytes = b"",
    ) -> None:
        rng = random.Random(seed)
        self.config = config
        self.cluster_id = cluster_id
        self.repair_credential = repair_credential
        self.journal_disk = SimDisk(rng)
        self.ledger_disk = SimDisk(rng)
        self.store = SimStore(rng)
        self.session: SimSession
        self.bookie: Bookie

    async def start(self) -> "Node":
        index = await SimIndex.open(self.ledger_disk)
        directories = Directories(
            [JournalDirectory("journal-1", self.journal_disk)],
            [LedgerDirectory("ledger-1", self.ledger_disk, index)],
        )
        return await self.start_on(directories)

    async def start_on(self, directories: Directories) -> Self:
        self.session = self.store.session("bookie")
        self.bookie = await Bookie.start(
            *(ID, directories, self.session),
            *(self.config, self.cluster_id, self.repair_credential),
            ask=has_everything,
        )
        return self

    async def crash(self, keep: Keep = "none") -> None:
        """Kill the bookie, lose what `keep` does not spare, start it again."""
        self.die(keep)
        await self.start()

    def die(self, keep: Keep = "none") -> None:
        self.bookie.abandon()
        self.journal_disk.crash(keep)
        self.ledger_disk.crash(keep)

    async def create_ledger(self, *ledger_ids: int, tokens: Tokens | None = None) -> None:
        session = self.store.session("client")
        for ledger_id in ledger_ids:
            record = LedgerRecord(
                ledger_id,
                1,
                1,
                1,
                (Fragment(0, (ID,)),),
                verifiers=verifiers(tokens) if tokens is not None else None,
            )
            path = paths.ledger(ledger_id)
            await session.create(path, ledger_record.encode(record), parents=True)

    async def add(
        self, *entries: bytes, recovery: bool = False, token: bytes = b""
    ) -> list[Status]:
        adds = [m.Add([each], recovery, token) for each in entries]
        response = await self.request("Add", m.AddRequest(ID, adds))
        return [result.status for result in response.results]

    async def add_all(self, *entries: bytes, recovery: bool = False) -> None:
        """Add as a patient client does: what is busy again, until all are stored."""
        for _ in range(1000):
            statuses = await self.add(*entries, recovery=recovery)
            if Status.BUSY not in statuses:
                assert statuses == [Status.OK] * len(entries)
                return
            await asyncio.sleep(self.config.retry_after_ms / 1000)
        raise AssertionError("busy for ever")

    async def read(self, ledger_id: int, first: int, last: int, **more: Any) -> m.ReadResponse:
        request = m.ReadRequest(ID, ledger_id, first, last, more.pop("max_bytes", 1 << 20), **more)
        response: m.ReadResponse = await self.request("Read", request)
        return response

    async def statuses(
        self, ledger_id: int, first: int, last: int, **more: Any
    ) -> Sequence[Status]:
        response = await self.read(ledger_id, first, last, **more)
        return [response.status] if response.status else [r.status for r in response.results]

    async def read_lac(self, ledger_id: int, **more: Any) -> m.ReadLacResponse:
        response: m.ReadLacResponse = await self.request(
            "ReadLac", m.ReadLacRequest(ID, ledger_id, **more)
        )
        return response

    async def write_lac(self, ledger_id: int, lac: int) -> Status:
        response = await self.request("WriteLac", m.WriteLacRequest(ID, ledger_id, lac))
        return Status(response.status)

    async def fence(self, ledger_id: int) -> Status:
        return (await self.read_lac(ledger_id, fence=True)).status

    async def request(self, method: str, request: m.Request) -> Any:
        answer = await handle_bytes(self.bookie, method, codec.encode(request))
        return codec.decode_response(method, answer)

    @property
    def storage(self) -> LedgerStorage:
        """The bookie's engine, which only tests look at from outside."""
        return self.bookie.storage

    @property
    def handles(self) -> LedgerHandles:
        """What the bookie knows of ledgers; as `storage`."""
        return self.bookie.ledgers

    @property
    def journal_homes(self) -> Mapping[int, str]:
        """By ledger: the journal that its records go to."""
        return self.storage._journals.homes

    def files(self, disk: SimDisk, folder: str) -> list[str]:
        return [path for path in disk.paths() if path.startswith(f"{folder}/")]


async def delete(node, *ledger_ids):
    await delete_ledgers(node.store.session("deleter"), *ledger_ids)


OK, ABSENT = Status.OK, Status.NO_SUCH_ENTRY


async def with_two_ledgers(config=CONFIG):
    """A started bookie and ledgers 1 and 2."""
    node = await Node(config).start()
    await node.create_ledger(1, 2)
    return node
