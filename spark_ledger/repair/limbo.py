"""Repair of what bookies list as in limbo: close the ledger, compare, copy what is missing, clear.

    recover -> ask the bookie how the ledger stands -> read there what belongs there by the write
    sets -> copy from the peers what it lacks -> clear, if it still stands as it was asked

`repair` compares the bookies it is given and that say that the ledger is in limbo there,
`repair_everywhere` every bookie that a fragment names, whatever it says: a list is of the past.

Always true:
- a bookie that is asked how a ledger stands lets go of what its read cache has of it, so what is
  compared is what its disks hold;
- a ledger is compared only once it is CLOSED, entry by entry, over every fragment that names the
  bookie (copies.py); one of page-cache durability is fenced with it: a bookie then knows that all
  it has is synced, and doubts it at no later start;
- limbo is cleared only after a comparison in which every entry was there or was taken by the
  bookie; an entry that no peer supplies leaves it in limbo, with that reason;
- if the bookie found something else to doubt meanwhile it refuses to clear, and is compared again.
"""

import json
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

from bookie_server.api.status import Status
from spark_ledger.errors import BadConfig, LedgerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.cluster import Cluster, say
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens, derive, entries_kept
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import each, names_in, reachable, read
from spark_ledger.repair.copies import CannotCompare, Copies, Pace, unpaced

COMPARISONS_MAX = 4


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


async def listed(metadata: MetadataStore) -> list[Listed]:
    """Everything that any bookie lists, by bookie and ledger. Raises Unavailable."""
    return await listed_of(metadata, await named(metadata))


async def named(metadata: MetadataStore) -> list[tuple[str, int]]:
    """Each bookie with each ledger that it lists, in order: a call for each bookie. Raises
    Unavailable."""
    with reachable("listing what is in limbo"):
        await metadata.sync(paths.LIMBO)
        return [
            (bookie_id, ledger_id)
            for bookie_id in await names_in(metadata, paths.LIMBO)
            for ledger_id in sorted(
                int(name)
                for name in await names_in(metadata, paths.limbo(bookie_id))
                if name.isdecimal()
            )
        ]


async def listed_of(metadata: MetadataStore, some: Collection[tuple[str, int]]) -> list[Listed]:
    """Those of these that are listed still. Raises Unavailable."""
    with reachable("reading what is in limbo"):
        found = await each(lambda one: _one_listed(metadata, *one), some)
    return [one for one in found if one is not None]


async def _one_listed(metadata: MetadataStore, bookie_id: str, ledger_id: int) -> Listed | None:
    node = await read(metadata, paths.limbo(bookie_id, ledger_id))
    if node is None:
        return None
    try:
        reason = str(json.loads(node.value)["reason"])
    except (KeyError, TypeError, ValueError):
        reason = "unknown"
    return Listed(bookie_id, ledger_id, reason, node.created_ms)


async def repair_everywhere(
    ledgers: LedgerStore, ledger_id: int, password: bytes = b"", gone: Set[str] = frozenset()
) -> tuple[LedgerRecord, list[Repaired]]:
    """Close the ledger, then compare every bookie that its fragments name, and those that list it,
    and bring back what any of them lacks. The record, and what became of each bookie.

    `gone`: as LedgerStore.recover takes it. Raises what that raises, Unavailable; BadConfig, before
    anything is changed, if one of `gone` holds nothing of the ledger's end, or is registered and
    does not list the ledger as in limbo.
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
        for bookie_id in unknown:
            with reachable("looking up a bookie"):
                address = await ledgers.cluster.directory.find(bookie_id)
            if address is None:
                raise never_seen(bookie_id)
        there = sorted(filter(ledgers.cluster.directory.is_registered, gone))
        doubting = await _listing(ledgers.metadata, ledger_id) if there else []
        for bookie_id in there:
            if bookie_id not in doubting:
                raise BadConfig(
                    f"bookie {bookie_id} is registered, and misses nothing of ledger {ledger_id}",
                    "Leave out --gone: it is asked. If it will not come back, stop it first.",
                )
    known = await ledgers.recover(ledger_id, password=password, gone=gone)
    members = [one for fragment in known.record.fragments for one in fragment.ensemble]
    members += await _listing(ledgers.metadata, ledger_id)
    bookie_ids = list(dict.fromkeys(members))
    return known.record, await repair_known(
        ledgers, known, bookie_ids, derive(password), everything=True
    )


def never_seen(bookie_id: str) -> BadConfig:
    return BadConfig(
        f"no bookie {bookie_id!r} was ever registered there",
        "`spark-ledger bookie list` tells which were.",
    )


async def _listing(metadata: MetadataStore, ledger_id: int) -> list[str]:
    """The bookies that list the ledger."""
    with reachable("listing what is in limbo"):
        await metadata.sync(paths.LIMBO)
        bookie_ids = await names_in(metadata, paths.LIMBO)
        return [
            one for one in bookie_ids if await _one_listed(metadata, one, ledger_id) is not None
        ]


async def repair_known(
    ledgers: LedgerStore,
    known: VersionedRecord,
    bookie_ids: Sequence[str],
    tokens: Tokens,
    *,
    everything: bool,
    pace: Pace = unpaced,
) -> list[Repaired]:
    """Of a CLOSED ledger, as it is `known`: what became of it at each bookie. `everything`: it is
    compared whatever the bookie says; else only where it is in limbo."""
    results = []
    for bookie_id in bookie_ids:
        cluster = ledgers.cluster
        one = _Repair(cluster, known, tokens, bookie_id, everything=everything, pace=pace)
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
        pace: Pace,
    ) -> None:
        assert known.record.last_entry is not None
        self._everything = everything
        self._cluster = cluster
        self._record = known.record
        self._ledger_id = known.record.ledger_id
        self._last_entry = known.record.last_entry
        self._token = tokens.recover
        self._bookie_id = bookie_id
        fence = known.record.durability == "page-cache"
        self._copies = Copies(cluster, known, tokens, bookie_id, fence=fence, pace=pace)

    def result(self, why: str = "") -> Repaired:
        """As far as it came."""
        where = self._bookie_id, self._ledger_id
        return Repaired(*where, not why, self._copies.copied, why, self._copies.compared)

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
            if self._copies.unsupplied:
                return self.result(self._copies.missing())
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
        self._copies.compared = 0
        for entries, slot in entries_kept(self._record, self._bookie_id, self._last_entry):
            await self._copies.bring_back(entries, slot)
