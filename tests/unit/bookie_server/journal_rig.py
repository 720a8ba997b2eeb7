"""A journal over a simulated disk: what is written and what a start replays."""

from bookie_server.journal.format import Position, Record, RecordKind, body_crc
from bookie_server.journal.scan import Replay
from bookie_server.journal.writer import FOLDER, Journal
from tests.unit.bookie_server.node import CONFIG

NOTHING = Position(0, 0)


def note(number, length=10):
    """A record that is known by its entry id."""
    body = number.to_bytes(4, "little") * (length // 4)
    return Record(RecordKind.LEDGER, 7, number, body, body_crc(body))


async def opened(disk, file_id=1, synced=NOTHING):
    await disk.make_folder(FOLDER)
    return await Journal.open(disk, CONFIG, file_id, synced)


async def replayed(disk, mark=None):
    replay = Replay(disk, mark)
    numbers = [record.entry_id async for records in replay.records() for record in records]
    return numbers, replay
