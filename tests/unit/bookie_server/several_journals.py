"""A storage over several journals, opened, killed and opened again."""

from bookie_server.journal.format import Record, RecordKind, body_crc
from bookie_server.logs.index import (
    LedgerState,
    Location,
    encode_ledger_state,
)
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from bookie_server.storage.storage import LedgerStorage
from tests.simulation.disk import SimDisk
from tests.simulation.index import SimIndex
from tests.unit.bookie_server.node import CONFIG, entry


def state(ledger_id: int, **more) -> Record:
    body = encode_ledger_state(LedgerState(ledger_id, revision=1, **more))
    return Record(RecordKind.LEDGER, ledger_id, -1, body, body_crc(body))


def added(ledger_id: int, *entry_ids: int, payload: bytes = b"payload") -> list[Record]:
    bodies = [(e, entry(ledger_id, e, payload)) for e in entry_ids]
    return [Record(RecordKind.ENTRY, ledger_id, e, body, 0) for e, body in bodies]


async def placed(storage: LedgerStorage, ledger_id: int, *entry_ids: int) -> list[Location]:
    """Where entries lie by now, in the direct log of the storage's only directory."""
    (store,) = storage.stores
    entries = [(ledger_id, each, entry(ledger_id, each)) for each in entry_ids]
    return await store.direct_log.put(ledger_id, entries)


async def opened(disk: SimDisk) -> LedgerStorage:
    index = await SimIndex.open(disk)
    journal = JournalDirectory("journal-1", SimDisk())
    directories = Directories([journal], [LedgerDirectory("ledger-1", disk, index)])
    return (await LedgerStorage.open(directories, CONFIG))[0]


async def ids(storage: LedgerStorage, ledger_id: int) -> list[int]:
    return list((await storage.reader.read(ledger_id, range(10_001), 1 << 30)).entries)


HOME = {"directories": ("ledger-1",)}
