"""The janitor: deletes ledgers that were made for topics and are in none.

Always true: an intent is condemned by compare-and-set first, then its ledgers are recovered
(closed), then their topics are synced and folded, and only what is CLOSED and in no topic *then*
is deleted. Every commit checks its intent in its multi, so either the commit or the janitor loses
(hazard 4). Age only suggests candidates. Any error ends the pass with nothing more deleted.
Ledgers are found through the blocks recorded under intents, never by listing, and must name the
intent in their record: what LedgerClient made is never touched. Under an open intent nothing is
deleted; what a deleted topic refers to stays until retention exists.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import MetadataStore, SessionState
from spark_ledger.topic import records
from spark_ledger.topic.intents import STALE, Intent, Intents
from spark_ledger.topic.store_calls import reachable, read
from spark_ledger.topic.topic_log import TopicLog

LEASE_S = 900.0
CONDEMNED_FRACTION_MAX = 0.2  # of the open intents, in one pass; one is always allowed
DELETED_FRACTION_MAX = 0.1  # of the ledgers that the pass knows
DELETED_UNGUARDED = 20  # so many may go in any case


@dataclass(frozen=True, slots=True)
class CleanReport:
    """Intents and ledgers by what the pass did, or would do when `dry_run`. `kept` are ledgers of
    ended intents that a topic refers to. `refused` says why nothing was deleted."""

    dry_run: bool
    condemned: tuple[str, ...] = ()
    closed: tuple[int, ...] = ()
    deleted: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class _Sighting:
    """Since when, in which session, an intent's heartbeat has had this version."""

    heartbeat: int
    since_s: float
    session: int


class Janitor:
    """Remembers from pass to pass what it saw: an intent is stale when this observer saw no
    heartbeat for a whole lease, in one unbroken session (hazard 44)."""

    def __init__(
        self,
        store: MetadataStore,
        ledgers: LedgerStore,
        rng: random.Random,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = store
        self._ledgers = ledgers
        self._intents = Intents(store, ledgers, rng)
        self._lease_s = lease_s
        self._seen: dict[str, _Sighting] = {}
        self._logs: dict[str, TopicLog] = {}
        self._session = 0
        self._cluster: bytes | None = None
        store.add_session_listener(self._session_changed)

    async def clean(
        self, *, dry_run: bool = False, force: bool = False, condemn: Sequence[str] = ()
    ) -> CleanReport:
        """One pass. `condemn` names intents to take as stale now; `force` lets the pass delete
        more than a tenth of the ledgers it knows.

        Raises errors.Unavailable and what recovering or deleting a ledger raises.
        """
        with reachable("cleaning"):
            await self._check_cluster()
            intents = await self._all_intents()
            stale = await self._stale(intents, condemn)
            if not dry_run:
                intents = await self._condemn(intents, stale)
            ended = [i for i in intents if not i.open or (dry_run and i.id in stale)]
            found = {intent.id: await self._ledgers_of(intent) for intent in intents}
            mine = [record for intent in ended for record in found[intent.id]]
            closed = await self._close(mine, dry_run)
            referred = await self._referred({record.topic: None for record in mine})
            ids = sorted(record.ledger_id for record in mine)
            garbage = [ledger for ledger in ids if ledger not in referred]
            known = sum(len(some) for some in found.values())
            refused = "" if force else _too_many(len(garbage), known)
            if not dry_run and not refused:
                await self._delete(garbage)
        kept = tuple(ledger for ledger in ids if ledger in referred)
        deleted = () if refused else tuple(garbage)
        return CleanReport(dry_run, tuple(stale), closed, deleted, kept, refused)

    async def _check_cluster(self) -> None:
        """The store is still the one this janitor began with (hazard 50)."""
        await self.store.sync()
        node = await read(self.store, paths.CLUSTER)
        value = b"" if node is None else node.value
        if self._cluster is None:
            self._cluster = value
        if value != self._cluster:
            raise errors.Unavailable(
                "the metadata store holds another cluster than before",
                "Check the service URL; nothing is deleted until it is right.",
            )

    async def _all_intents(self) -> list[Intent]:
        if await read(self.store, paths.INTENTS) is None:
            return []
        names = await self.store.children(paths.INTENTS)
        return [await self._intents.get(name) for name in names]

    async def _stale(self, intents: Sequence[Intent], condemn: Sequence[str]) -> list[str]:
        """The open intents that may be condemned in this pass."""
        opened = [intent.id for intent in intents if intent.open]
        expired = [intent for intent in opened if await self._expired(intent)]
        rate = max(1, int(len(opened) * CONDEMNED_FRACTION_MAX))
        wanted = [intent for intent in opened if intent in condemn]
        return wanted + [intent for intent in expired if intent not in wanted][:rate]

    async def _expired(self, intent_id: str) -> bool:
        """Whether its heartbeat has stood still for a lease under this observer's eyes."""
        node = await self.store.get(paths.intent_heartbeat(intent_id))
        now_s = asyncio.get_running_loop().time()
        seen = self._seen.get(intent_id)
        if seen is None or (seen.heartbeat, seen.session) != (node.version, self._session):
            self._seen[intent_id] = _Sighting(node.version, now_s, self._session)
            return False
        connected = self.store.session_state is SessionState.CONNECTED
        return connected and now_s - seen.since_s >= self._lease_s

    async def _condemn(self, intents: Sequence[Intent], stale: Sequence[str]) -> list[Intent]:
        return [
            await self._intents.condemn(intent.id, STALE) if intent.id in stale else intent
            for intent in intents
        ]

    async def _ledgers_of(self, intent: Intent) -> list[LedgerRecord]:
        """The ledgers that exist of the blocks recorded under the intent."""
        found = []
        path = paths.intent_blocks(intent.id)
        for name in await self.store.children(path):
            node = await self.store.get(f"{path}/{name}")
            block = records.decode_block(node.value)
            for ledger_id in range(block.first, block.first + block.count):
                record = await self._record(ledger_id)
                if record is not None and record.intent == intent.id:
                    found.append(record)
        return found

    async def _record(self, ledger_id: int) -> LedgerRecord | None:
        try:
            return (await self._ledgers.record(ledger_id)).record
        except errors.NoSuchLedger:
            return None

    async def _close(self, found: Sequence[LedgerRecord], dry_run: bool) -> tuple[int, ...]:
        """Recover what is not CLOSED: after this no writer adds to any of them."""
        opened = sorted(record.ledger_id for record in found if not record.closed)
        for ledger_id in [] if dry_run else opened:
            await self._ledgers.recover(ledger_id)
        return tuple(opened)

    async def _referred(self, topic_ids: dict[str, None]) -> dict[int, None]:
        """The ledgers that these topics refer to now, folded after a sync."""
        referred: dict[int, None] = {}
        for topic_id in sorted(topic_ids):
            log = self._logs.setdefault(topic_id, TopicLog(self.store, topic_id))
            state = await log.fold(fresh=True)
            referred |= dict.fromkeys(state.ledgers())
        return referred

    async def _delete(self, garbage: Sequence[int]) -> None:
        for ledger_id in garbage:
            await self._ledgers.delete(ledger_id)

    def _session_changed(self, state: SessionState) -> None:
        self._session += 1


def _too_many(garbage: int, known: int) -> str:
    if garbage <= max(DELETED_UNGUARDED, known * DELETED_FRACTION_MAX):
        return ""
    return f"{garbage} of {known} ledgers would be deleted: look first, then clean with force"
