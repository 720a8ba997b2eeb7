"""Repair of ledgers that bookies list as in limbo: close the ledger, compare, copy missing entries,
clear the limbo.

    recover -> ask the bookie for the ledger's limbo state -> read at the bookie the entries that it
    should keep -> copy the missing entries from peers -> clear, if the limbo state is unchanged

Of the given bookies, `compare_and_repair` compares those that respond that the ledger is in limbo,
or, with `everything`, all. `repair_everywhere` compares every bookie that a fragment names, since
the list of ledgers in limbo may be old.

Always true:
- a bookie that is asked for a ledger's limbo state drops the ledger from its read cache, so the
  comparison sees the entries on its disks;
- a ledger is compared only once it is CLOSED, entry by entry, over every fragment that names the
  bookie (copies.py). The comparison fences a ledger of page-cache durability: the bookie then syncs
  every entry before it delivers it, and a later unclean stop does not put the ledger in limbo;
- limbo is cleared only after a comparison in which the bookie had or took every entry; if no peer
  supplies an entry, the ledger stays in limbo, and the result has the reason;
- if the bookie found another reason of limbo meanwhile, it refuses to clear the limbo, and is
  compared again.
"""

import json
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.errors import BadConfig, LedgerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.cluster import Cluster, status_text
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens, derive, entries_kept
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import call_each, names_in, read, unavailable_while
from spark_ledger.repair.copies import CannotCompare, Copies, Pace, unpaced

COMPARISONS_MAX = 4


class LimboLedger(NamedTuple):
    """A ledger that a bookie lists as in limbo. `reason` is "torn" or "lost"; `since_ms` is the
    time at which it was listed, by the store's clock."""

    bookie_id: str
    ledger_id: int
    reason: str
    since_ms: int


class ComparisonResult(NamedTuple):
    """The result for one ledger at one bookie. `cleared`: the bookie lacks no entry, and no longer
    has the ledger in limbo; otherwise `why` names the obstacle. `compared` counts the entries that
    the bookie should have, `copied` the entries that were copied to it."""

    bookie_id: str
    ledger_id: int
    cleared: bool
    copied: int = 0
    why: str = ""
    compared: int = 0


async def list_limbo(metadata: MetadataStore) -> list[LimboLedger]:
    """All ledgers that bookies list as in limbo, by bookie and ledger. Raises Unavailable."""
    return await read_limbo_ledgers(metadata, await limbo_pairs(metadata))


async def limbo_pairs(metadata: MetadataStore) -> list[tuple[str, int]]:
    """Pairs of a bookie and a ledger that it lists, in order; makes one call for each bookie.
    Raises Unavailable."""
    with unavailable_while("listing ledgers in limbo"):
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


async def read_limbo_ledgers(
    metadata: MetadataStore, pairs: Collection[tuple[str, int]]
) -> list[LimboLedger]:
    """The (bookie, ledger) pairs that are still listed, with reason and time. Raises
    Unavailable."""
    with unavailable_while("reading the list of ledgers in limbo"):
        listings = await call_each(lambda pair: _read_limbo_ledger(metadata, *pair), pairs)
    return [listing for listing in listings if listing is not None]


async def _read_limbo_ledger(
    metadata: MetadataStore, bookie_id: str, ledger_id: int
) -> LimboLedger | None:
    node = await read(metadata, paths.limbo(bookie_id, ledger_id))
    if node is None:
        return None
    try:
        reason = str(json.loads(node.value)["reason"])
    except errors.MALFORMED:
        reason = "unknown"
    return LimboLedger(bookie_id, ledger_id, reason, node.created_ms)


async def repair_everywhere(
    ledgers: LedgerStore, ledger_id: int, password: bytes = b"", gone: Set[str] = frozenset()
) -> tuple[LedgerRecord, list[ComparisonResult]]:
    """Close the ledger, then compare every bookie that its fragments name or that lists it, and
    bring back the entries that a bookie lacks. Returns the record, and the result for each bookie.

    `gone`: as in LedgerStore.recover. Raises Unavailable, and what that method raises. Raises
    BadConfig, before any change, for a bookie of `gone` that was never registered, or that is
    registered and does not list the ledger as in limbo. For a ledger that is not closed, also for
    a bookie that is no member of the last fragment.
    """
    if gone:
        record = (await ledgers.record(ledger_id, fresh=True)).record
        ensemble = record.last_fragment.ensemble
        not_members = sorted(gone - set(ensemble))
        if not_members and not record.closed:
            raise BadConfig(
                f"bookie {not_members[0]!r} does not hold the end of ledger {ledger_id}",
                f"Its bookies are {', '.join(ensemble)}: give the id of the bookie that is gone.",
            )
        for bookie_id in not_members:
            with unavailable_while("looking up a bookie"):
                address = await ledgers.cluster.directory.find(bookie_id)
            if address is None:
                raise never_seen(bookie_id)
        registered = sorted(filter(ledgers.cluster.directory.is_registered, gone))
        bookies_listing = await _bookies_listing(ledgers.metadata, ledger_id) if registered else []
        for bookie_id in registered:
            if bookie_id not in bookies_listing:
                raise BadConfig(
                    f"bookie {bookie_id} is registered, and does not list ledger {ledger_id} as in"
                    " limbo",
                    "Leave out --gone: recovery asks the bookie. If the bookie will not come back,"
                    " stop it first.",
                )
    closed = await ledgers.recover(ledger_id, password=password, gone=gone)
    members = [bookie for fragment in closed.record.fragments for bookie in fragment.ensemble]
    members += await _bookies_listing(ledgers.metadata, ledger_id)
    bookie_ids = list(dict.fromkeys(members))
    return closed.record, await compare_and_repair(
        ledgers, closed, bookie_ids, derive(password), everything=True
    )


def never_seen(bookie_id: str) -> BadConfig:
    return BadConfig(
        f"no bookie {bookie_id!r} was ever registered in this cluster",
        "`spark-ledger bookie list` lists all bookies that were registered.",
    )


async def _bookies_listing(metadata: MetadataStore, ledger_id: int) -> list[str]:
    """The bookies that list the ledger."""
    with unavailable_while("listing ledgers in limbo"):
        await metadata.sync(paths.LIMBO)
        bookie_ids = await names_in(metadata, paths.LIMBO)
        return [
            b for b in bookie_ids if await _read_limbo_ledger(metadata, b, ledger_id) is not None
        ]


async def compare_and_repair(
    ledgers: LedgerStore,
    closed: VersionedRecord,
    bookie_ids: Sequence[str],
    tokens: Tokens,
    *,
    everything: bool,
    pace: Pace = unpaced,
) -> list[ComparisonResult]:
    """Repair a CLOSED ledger, by its record `closed`, at each of the bookies; returns the results.
    `everything`: compare at every bookie; otherwise only at bookies with the ledger in limbo."""
    results = []
    for bookie_id in bookie_ids:
        cluster = ledgers.cluster
        repair = _Repair(cluster, closed, tokens, bookie_id, everything=everything, pace=pace)
        try:
            results.append(await repair.run())
        except CannotCompare as failure:
            results.append(repair.result(str(failure)))
        except LedgerError as failure:
            results.append(repair.result(failure.what))
    return results


class _Repair:
    """The repair of one closed ledger at one bookie. `everything`: compare the ledger even if it is
    not in limbo."""

    def __init__(
        self,
        cluster: Cluster,
        closed: VersionedRecord,
        tokens: Tokens,
        bookie_id: str,
        *,
        everything: bool,
        pace: Pace,
    ) -> None:
        assert closed.record.last_entry is not None
        self._everything = everything
        self._cluster = cluster
        self._record = closed.record
        self._ledger_id = closed.record.ledger_id
        self._last_entry = closed.record.last_entry
        self._token = tokens.recover
        self._bookie_id = bookie_id
        fence = closed.record.durability == "page-cache"
        self._copies = Copies(cluster, closed, tokens, bookie_id, fence=fence, pace=pace)

    def result(self, why: str = "") -> ComparisonResult:
        """The result so far."""
        where = self._bookie_id, self._ledger_id
        return ComparisonResult(*where, not why, self._copies.copied, why, self._copies.compared)

    async def run(self) -> ComparisonResult:
        """Raises CannotCompare, LedgerError. A bookie that cannot judge its limbo yet answers
        Status.LIMBO; with `everything` its entries are compared all the same."""
        where = self._bookie_id, self._ledger_id
        has_compared = False
        for _ in range(COMPARISONS_MAX):
            state = await self._cluster.bookies.clear_limbo(*where, token=self._token)  # only asks
            has_responded = state.status is Status.OK
            if has_responded and not state.limbo and (has_compared or not self._everything):
                return self.result()
            if not has_responded and not (self._everything and state.status is Status.LIMBO):
                raise CannotCompare(status_text(state))
            await self._compare()
            has_compared = True
            if self._copies.unsupplied:
                return self.result(self._copies.unsupplied_text())
            if not has_responded:
                raise CannotCompare(status_text(state))
            if not state.limbo:
                continue  # the comparison may have put the ledger in limbo
            cleared = await self._cluster.bookies.clear_limbo(
                *where, state.revision, token=self._token
            )
            if cleared.status is Status.OK:
                return self.result()
            if cleared.status is not Status.LIMBO:
                raise CannotCompare(status_text(cleared))
        raise CannotCompare("the bookie found more damage while the ledger was compared")

    async def _compare(self) -> None:
        self._copies.compared = 0
        for entries, slot in entries_kept(self._record, self._bookie_id, self._last_entry):
            await self._copies.bring_back(entries, slot)
