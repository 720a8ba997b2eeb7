"""Repair of what bookies list as in limbo: close the ledger, compare, copy what is missing, clear.

    recover -> ask the bookie how the ledger stands -> read there what belongs there by the write
    sets -> copy from the peers what it lacks -> clear, if it still stands as it was asked

`repair` compares the bookies it is given and that say that the ledger is in limbo there,
`repair_everywhere` every bookie that a fragment names, whatever it says: a list is of the past.

Always true:
- a bookie that is asked how a ledger stands lets go of what its read cache has of it, so what is
  compared is what its disks hold;
- a ledger is compared only once it is CLOSED, entry by entry, over every fragment that names the
  bookie; what can be read there, CRCs checked, is left alone, all else is copied by recovery adds,
  which also replace a copy that cannot be read any more;
- limbo is cleared only after a comparison in which every entry was there or was taken by the
  bookie; an entry that no peer supplies leaves it in limbo, with that reason;
- if the bookie found something else to doubt meanwhile it refuses to clear, and is compared again;
- the bytes under way are those of one window (read_request_bytes and one entry).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence, Set
from typing import NamedTuple

from bookie_server.api.entry import Entry, pack_header
from bookie_server.api.messages import Add, AddResult
from bookie_server.api.status import Status
from spark_ledger.errors import BadConfig, DataUnavailable, LedgerError, Unavailable
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.cluster import Cluster, judge, say
from spark_ledger.ledger.read.reader import AsyncLedgerReader
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens, derive, entries_kept, keeps
from spark_ledger.metadata.store import MetadataStore, NoNode, StoreError

COMPARISONS_MAX = 4
UNSUPPLIED_MAX = 16  # entries that no peer has; then the rest of the ledger is not tried
ENTRIES_AT_ONCE = 1024
BUSY_TRIES = 100


class Listed(NamedTuple):
    """A ledger that a bookie lists as in limbo. `reason` is "torn" or "lost"; `since_ms` is when
    it was listed, by the store's clock."""

    bookie_id: str
    ledger_id: int
    reason: str
    since_ms: int


class Repaired(NamedTuple):
    """What became of one ledger at one bookie. `cleared`: nothing is missing there and it is in
    limbo no more; `why` says what stands in the way, if anything. `compared` counts the entries
    that belong there and were asked for, `copied` those that it was given."""

    bookie_id: str
    ledger_id: int
    cleared: bool
    copied: int = 0
    why: str = ""
    compared: int = 0


class CannotCompare(Exception):
    """The bookie gives no response to compare with, or does not take a copy."""


async def listed(metadata: MetadataStore) -> list[Listed]:
    """Everything that any bookie lists, by bookie and ledger. Raises Unavailable."""
    found = []
    try:
        await metadata.sync(paths.LIMBO)
        for bookie_id in await _children(metadata, paths.LIMBO):
            names = await _children(metadata, paths.limbo(bookie_id))
            for ledger_id in sorted(int(name) for name in names if name.isdecimal()):
                one = await _one_listed(metadata, bookie_id, ledger_id)
                if one is not None:
                    found.append(one)
    except StoreError as failure:
        raise Unavailable(f"what is in limbo cannot be listed: {failure!r}") from failure
    return found


async def _children(metadata: MetadataStore, path: str) -> list[str]:
    try:
        return await metadata.children(path)
    except NoNode:
        return []


async def _one_listed(metadata: MetadataStore, bookie_id: str, ledger_id: int) -> Listed | None:
    try:
        node = await metadata.get(paths.limbo(bookie_id, ledger_id))
    except NoNode:
        return None
    try:
        reason = str(json.loads(node.value)["reason"])
    except (KeyError, TypeError, ValueError):
        reason = "unknown"
    return Listed(bookie_id, ledger_id, reason, node.created_ms)


async def repair(
    ledgers: LedgerStore, ledger_id: int, bookie_ids: Sequence[str], password: bytes = b""
) -> list[Repaired]:
    """Close the ledger, then bring its copies on these bookies back and clear it there; where it
    is not in limbo nothing is compared.

    Raises what LedgerStore.recover raises; what hinders a bookie's repair is told in its result.
    """
    known = await ledgers.recover(ledger_id, password=password)
    return await _repair(ledgers, known, bookie_ids, password, everything=False)


async def repair_everywhere(
    ledgers: LedgerStore, ledger_id: int, password: bytes = b"", gone: Set[str] = frozenset()
) -> tuple[LedgerRecord, list[Repaired]]:
    """Close the ledger, then compare every bookie that its fragments name, and those that list it,
    and bring back what any of them lacks. The record, and what became of each bookie.

    `gone`: as LedgerStore.recover takes it. Raises what that raises, Unavailable; BadConfig, before
    anything is changed, if one of `gone` holds nothing of the ledger's end.
    """
    if gone:
        record = (await ledgers.record(ledger_id, fresh=True)).record
        ensemble = record.last_fragment.ensemble
        unknown = sorted(gone - set(ensemble))
        if unknown and not record.closed:
            raise BadConfig(
                f"no bookie {unknown[0]!r} holds the end of ledger {ledger_id}",
                f"Its bookies are {', '.join(ensemble)}: name the one that is gone by its id.",
            )
    known = await ledgers.recover(ledger_id, password=password, gone=gone)
    named = [each for fragment in known.record.fragments for each in fragment.ensemble]
    named += await _listing(ledgers.metadata, ledger_id)
    bookie_ids = list(dict.fromkeys(named))
    return known.record, await _repair(ledgers, known, bookie_ids, password, everything=True)


async def _listing(metadata: MetadataStore, ledger_id: int) -> list[str]:
    """The bookies that list the ledger."""
    try:
        await metadata.sync(paths.LIMBO)
        bookie_ids = await _children(metadata, paths.LIMBO)
        return [
            each for each in bookie_ids if await _one_listed(metadata, each, ledger_id) is not None
        ]
    except StoreError as failure:
        raise Unavailable(f"what is in limbo cannot be listed: {failure!r}") from failure


async def _repair(
    ledgers: LedgerStore,
    known: VersionedRecord,
    bookie_ids: Sequence[str],
    password: bytes,
    *,
    everything: bool,
) -> list[Repaired]:
    tokens, results = derive(password), []
    for bookie_id in bookie_ids:
        one = _Repair(ledgers.cluster, known, tokens, bookie_id, everything=everything)
        try:
            results.append(await one.run())
        except CannotCompare as failure:
            results.append(one.result(str(failure)))
        except LedgerError as failure:
            results.append(one.result(failure.what))
    return results


class _Repair:
    """One closed ledger at one bookie. `everything`: it is compared whatever the bookie says."""

    def __init__(
        self,
        cluster: Cluster,
        known: VersionedRecord,
        tokens: Tokens,
        bookie_id: str,
        *,
        everything: bool,
    ) -> None:
        assert known.record.last_entry is not None
        self._everything = everything
        self._copied = self._compared = 0
        self._cluster = cluster
        self._record = known.record
        self._ledger_id = known.record.ledger_id
        self._last_entry = known.record.last_entry
        self._token = tokens.recover
        self._bookie_id = bookie_id
        self._reader = AsyncLedgerReader(cluster, known, tokens)
        self._unsupplied: dict[int, str] = {}

    def result(self, why: str = "") -> Repaired:
        """As far as it came."""
        where = self._bookie_id, self._ledger_id
        return Repaired(*where, not why, self._copied, why, self._compared)

    async def run(self) -> Repaired:
        """Raises CannotCompare, LedgerError."""
        where = self._bookie_id, self._ledger_id
        done = False
        for _ in range(COMPARISONS_MAX):
            asked = await self._cluster.bookies.clear_limbo(*where, token=self._token)
            told = asked.status is Status.OK
            if told and not asked.limbo and (done or not self._everything):
                return self.result()
            if not told and not (self._everything and asked.status is Status.LIMBO):
                raise CannotCompare(say(asked))
            await self._bring_back()
            done = True
            if self._unsupplied:
                return self.result(self._who_is_missing())
            if not told:
                raise CannotCompare(say(asked))
            if not asked.limbo:
                continue  # the comparison may have met something to doubt
            cleared = await self._cluster.bookies.clear_limbo(
                *where, asked.revision, token=self._token
            )
            if cleared.status is Status.OK:
                return self.result()
            if cleared.status is not Status.LIMBO:
                raise CannotCompare(say(cleared))
        raise CannotCompare("more was found damaged there while it was compared")

    async def _bring_back(self) -> None:
        self._compared = 0
        for entries, slot in entries_kept(self._record, self._bookie_id, self._last_entry):
            async for lacking in self._lacking(entries, slot):
                for run in _runs(lacking):
                    await self._copy(run)

    async def _lacking(self, entries: range, slot: int) -> AsyncIterator[list[int]]:
        """What the bookie should have of `entries` and cannot deliver, window by window. A ledger
        of page-cache durability is fenced with it: a bookie then knows that all it has is synced,
        and doubts it at no later start."""
        fence = self._record.durability == "page-cache"
        at = entries.start
        while at < entries.stop:
            last = min(at + ENTRIES_AT_ONCE, entries.stop) - 1
            response = await self._cluster.bookies.read(
                *(self._bookie_id, self._ledger_id, at, last),
                max_bytes=self._cluster.config.read_request_bytes,
                fence=fence,
                token=self._token,
            )
            window = range(at, last + 1)
            if response.status is Status.OK and response.results:
                window = range(at, min(at + len(response.results), entries.stop))
            elif response.status is not Status.NO_SUCH_LEDGER:
                raise CannotCompare(say(response))
            kept = [entry_id for entry_id in window if keeps(self._record, slot, entry_id)]
            self._compared += len(kept)
            yield [
                entry_id
                for entry_id in kept
                if not _is_whole(judge(response, self._ledger_id, entry_id - at, entry_id))
            ]
            at = window.stop

    async def _copy(self, run: range) -> None:
        """Give the bookie a run of entries, from bookies that have them; others are
        `_unsupplied`."""
        at = run.start
        while at < run.stop and len(self._unsupplied) < UNSUPPLIED_MAX:
            batch: list[Entry] = []
            try:
                async for entry_id, entry in self._reader.read(at, run.stop - 1):
                    at = entry_id + 1
                    batch.append(entry)
                    if _bytes(batch) >= self._cluster.config.read_request_bytes:
                        await self._give(batch)
                        batch = []
            except DataUnavailable as failure:
                self._unsupplied[at] = failure.what
                at += 1
            await self._give(batch)

    async def _give(self, batch: Sequence[Entry]) -> None:
        """Durable at the bookie when it returns. Raises CannotCompare."""
        results = await asyncio.gather(*map(self._give_one, batch))
        refused = [result for result in results if result.status is not Status.OK]
        if refused:
            raise CannotCompare(f"it does not take a copy: {say(refused[0])}")
        self._copied += len(batch)

    async def _give_one(self, entry: Entry) -> AddResult:
        add = Add([pack_header(entry.header), entry.payload], True, self._token)
        for _ in range(BUSY_TRIES):
            result = await self._cluster.bookies.add(self._bookie_id, add)
            if result.status is not Status.BUSY:
                break
            await asyncio.sleep(result.retry_after_ms / 1000 or 0.05)
        return result

    def _who_is_missing(self) -> str:
        entry_id, why = next(iter(self._unsupplied.items()))
        count = len(self._unsupplied)
        more = "or more " if count == UNSUPPLIED_MAX else ""
        return f"no peer supplies {count} {more}of its entries, the first is {entry_id}: {why}"


def _is_whole(said: tuple[object, Entry | str] | None) -> bool:
    return said is not None and isinstance(said[1], Entry)


def _bytes(batch: Sequence[Entry]) -> int:
    return sum(len(entry.payload) for entry in batch)


def _runs(entry_ids: Sequence[int]) -> list[range]:
    """Ascending ids as ranges without gaps."""
    runs: list[range] = []
    for entry_id in entry_ids:
        if runs and runs[-1].stop == entry_id:
            runs[-1] = range(runs[-1].start, entry_id + 1)
        else:
            runs.append(range(entry_id, entry_id + 1))
    return runs
