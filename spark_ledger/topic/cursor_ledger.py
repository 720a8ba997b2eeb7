"""The ledger that a cursor's positions are appended to, and finding them again.

Always true: an entry counts once it is acknowledged, synced on Qa bookies; whoever looks for the
last one to go on from it fences the ledger first, so its writer adds nothing that is not seen; an
entry that is damaged on every copy is passed over for the one before it, one that cannot be read
now is an error. One entry is under way at a time.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.reader import LedgerReader
from spark_ledger.ledger.records import IdSpent
from spark_ledger.ledger.writer import LedgerWriter
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic import cursor_entry
from spark_ledger.topic.cursor_entry import BadCursorEntry, CursorEntry
from spark_ledger.topic.intents import Intent, Intents
from spark_ledger.topic.topics import TopicInfo

ENTRIES_MAX = 50_000
AGE_S_MAX = 4 * 3600.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CursorLedger:
    """One that is open, and when it was opened. Made by `create`."""

    writer: LedgerWriter
    opened_s: float
    fragments_max: int
    entries: int = 0

    @property
    def id(self) -> int:
        return self.writer.ledger_id

    def full(self, now_s: float) -> bool:
        """Whether the next entry goes to another ledger: failed, long, old or fragmented."""
        return (
            self.writer.failure is not None
            or self.entries >= ENTRIES_MAX
            or now_s - self.opened_s >= AGE_S_MAX
            or len(self.writer.record.fragments) >= self.fragments_max
        )

    async def append(self, entry: CursorEntry) -> None:
        """Durable when it returns. Raises what LedgerWriter.append does."""
        self.entries += 1
        await self.writer.append(cursor_entry.encode(entry))


async def create(
    ledgers: LedgerStore, intents: Intents, intent: Intent, topic: TopicInfo
) -> CursorLedger:
    """A ledger of the topic's quorums, always synced, whose readers hear of its end.

    Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable.
    """
    policies = topic.policies
    writer: LedgerWriter | None = None
    while writer is None:
        ledger_id = await intents.ledger_id(intent)
        with suppress(IdSpent):
            writer = await ledgers.create(
                policies.ensemble_size,
                policies.write_quorum,
                policies.ack_quorum,
                intent=intent.id,
                topic=topic.id,
                ledger_id=ledger_id,
                announce_lac=True,
            )
    now_s = asyncio.get_running_loop().time()
    return CursorLedger(writer, now_s, ledgers.config.fragments_max)


async def last_entry(ledgers: LedgerStore, ledger_id: int, *, fence: bool) -> CursorEntry | None:
    """The last good entry; None if there is none. With `fence` its writer adds nothing after it;
    without, a later one may be on its way.

    Raises errors.NoSuchLedger, errors.DataUnavailable, errors.Unavailable, errors.NotEnoughBookies,
    errors.UnsupportedFormat.
    """
    reader = await ledgers.open(ledger_id, recover=fence)
    if not reader.is_closed:
        await reader.refresh_last_add_confirmed()
    for entry_id in range(reader.last_add_confirmed, -1, -1):
        with suppress(BadCursorEntry, errors.DigestMismatch):
            return cursor_entry.decode(await _payload(reader, entry_id))
        _log.error("entry %d of cursor ledger %d is damaged", entry_id, ledger_id)
    return None


async def discard(ledgers: LedgerStore, ledger_id: int) -> None:
    """Close and delete a ledger that no record names any more. What fails is the janitor's: it goes
    after its intent has ended."""
    try:
        await ledgers.recover(ledger_id)
        await ledgers.delete(ledger_id)
    except (errors.LedgerError, StoreError) as error:
        _log.info("cursor ledger %d stays for the janitor: %s", ledger_id, error)


async def _payload(reader: LedgerReader, entry_id: int) -> memoryview:
    found = [entry.payload async for _, entry in reader.read(entry_id, entry_id)]
    return found[0]
