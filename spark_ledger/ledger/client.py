"""The async client of a cluster's ledgers: create, open, recover, delete, list.

Always true: one LedgerStore belongs to one event loop; every write to a ledger's record goes
through records.py; opening with recovery is the only way to take a ledger over.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory, BookieInfo
from spark_ledger.config import ClientConfig
from spark_ledger.errors import (
    BadConfig,
    ClientClosed,
    DataUnavailable,
    NoSuchLedger,
    NotEnoughBookies,
    Unavailable,
)
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.placement import Placement, choose
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.ledger.records import IdSpent, LedgerIds, LedgerRecords, VersionedRecord
from spark_ledger.ledger.recovery import Recovered, recover
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.autorecovery import draining_bookies
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, Tokens, derive, verifiers
from spark_ledger.metadata.store import MetadataStore, Operation, StoreError

__all__ = ["LedgerStore", "VersionedRecord"]

NO_CUSTOM_METADATA: Mapping[str, str] = MappingProxyType({})
ENSEMBLE_SIZE_MAX = 1000
DOWN_LIST_S = 1.0  # how long a list of bookies that are down is used


class LedgerStore:
    """All ledgers of one cluster."""

    def __init__(
        self,
        metadata: MetadataStore,
        bookies: BookieClient,
        directory: BookieDirectory,
        config: ClientConfig,
        rng: random.Random,
        placement: Placement = choose,
    ) -> None:
        self.metadata = metadata
        self.config = config
        self._directory = directory
        self._bookies = bookies
        self.cluster = Cluster(LedgerRecords(metadata), bookies, directory, config, rng, placement)
        """Shared by the files of this room, and used by repair."""
        self._ids = LedgerIds(metadata)
        self._writers: WeakValueDictionary[int, AsyncLedgerWriter] = WeakValueDictionary()
        self._down: list[BookieInfo] = []
        """Bookies that were down at the last look, `_down_read_at`, and are not being drained."""
        self._down_read_at = float("-inf")
        self._closed = False

    async def create(
        self,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        *,
        password: bytes = b"",
        custom: Mapping[str, str] = NO_CUSTOM_METADATA,
        intent: str = "",
        topic: str = "",
        durability: str = "synced",
        ledger_id: int | None = None,
        announce_lac: bool = False,
    ) -> AsyncLedgerWriter:
        """Make a ledger on `ensemble_size` writable bookies and return its writer. If there are
        fewer, the ledger also names bookies that are down, as long as an ack quorum of each write
        set is registered.

        Each entry goes to `write_quorum` of its bookies and is acknowledged when `ack_quorum` have
        it on disk. `announce_lac`, for ledgers that are tailed: when appends pause, the writer
        writes an explicit LAC, from which readers learn of the last entry. Waits a moment for
        bookies that are about to register.
        Raises BadConfig (quorums, placement), NotEnoughBookies, Unavailable; for a given
        `ledger_id`, LedgerError if another ledger has it, IdSpent if a ledger of this id may have
        been made already: give another id.
        """
        try:
            quorum, tokens = Quorum(ensemble_size, write_quorum, ack_quorum), derive(password)
        except ValueError as wrong:
            raise BadConfig(str(wrong), "Choose quorums in that order.") from None
        if ensemble_size > ENSEMBLE_SIZE_MAX:
            raise BadConfig(
                f"ensemble_size {ensemble_size} is more than {ENSEMBLE_SIZE_MAX}",
                "Choose a smaller one: a ledger's record names each of its bookies.",
            )
        purpose = {"intent": intent, "topic": topic, "durability": durability}
        with self._while_open():
            record = await self._new_record(
                ledger_id, quorum, tokens, custom=dict(custom), **purpose
            )
            while True:
                try:
                    created = await self.cluster.records.create(record)
                    return self._writer(created, tokens, announce_lac)
                except IdSpent:
                    if ledger_id is not None:
                        raise
                    record = replace(record, ledger_id=await self._ids.next(self.invalidations))

    async def create_several(
        self,
        ledger_ids: Sequence[int],
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        *,
        intent: str,
        topic: str,
        durability: str,
        announce_lac: bool = False,
    ) -> list[AsyncLedgerWriter]:
        """Make ledgers with these ids as `create` does, by one write to the metadata store. All
        their records must fit into that write. Raises as `create`."""
        quorum, tokens = Quorum(ensemble_size, write_quorum, ack_quorum), derive(b"")
        purpose = {"intent": intent, "topic": topic, "durability": durability}
        with self._while_open():
            records = [
                await self._new_record(ledger_id, quorum, tokens, **purpose)
                for ledger_id in ledger_ids
            ]
            created = await self.cluster.records.create_several(records)
            return [self._writer(versioned, tokens, announce_lac) for versioned in created]

    async def _new_record(
        self, ledger_id: int | None, quorum: Quorum, tokens: Tokens, **purpose: Any
    ) -> LedgerRecord:
        """The record of a new ledger. Its creator token is random: if the outcome of the write is
        unknown, the token shows whether this client made the record. Raises what `create` raises.
        """
        if ledger_id is None:
            ledger_id = await self._ids.next(self.invalidations)
        try:
            ensemble = await self._new_ensemble(quorum)
        except NotEnoughBookies:  # while the store is held no bookie registers: raise that instead
            with suppress(StoreError):
                await ClusterGuard(self.metadata).refresh()
            raise
        return LedgerRecord(
            ledger_id=ledger_id,
            ensemble_size=quorum.ensemble_size,
            write_quorum=quorum.write_quorum,
            ack_quorum=quorum.ack_quorum,
            fragments=(Fragment(0, ensemble),),
            creator=f"{self.cluster.rng.getrandbits(128):032x}",
            verifiers=verifiers(tokens),
            **purpose,
        )

    def _writer(
        self, created: VersionedRecord, tokens: Tokens, announce_lac: bool
    ) -> AsyncLedgerWriter:
        """The writer of a ledger that was just made."""

        async def recovered(ledger_id: int) -> VersionedRecord:
            return (await recover(self.cluster, ledger_id, tokens)).versioned

        writer = AsyncLedgerWriter(self.cluster, created, tokens, recovered, announce_lac)
        self._writers[writer.ledger_id] = writer
        return writer

    async def open(
        self,
        ledger_id: int,
        *,
        recover: bool,
        password: bytes = b"",
        min_version: int | None = None,
        small: bool = False,
    ) -> AsyncLedgerReader:
        """A reader of the ledger. With `recover` the ledger is fenced and closed first: its
        writer can add nothing more, and the reader sees every entry that the ledger will ever have.
        `small`: its entries are small, so the last of them are read with the fence.

        Without `recover` the record is not older than this call or, with `min_version`, than that
        version. Raises what `recover` and `record` raise.
        """
        tokens = derive(password)
        if recover:
            recovered = await self._recovered(ledger_id, tokens, small=small)
        else:
            recovered = Recovered(await self._record_since(ledger_id, min_version))
        return AsyncLedgerReader(self.cluster, recovered.versioned, tokens, recovered.entries)

    async def recover(
        self,
        ledger_id: int,
        *,
        password: bytes = b"",
        gone: Set[str] = frozenset(),
        tokens: Tokens | None = None,
    ) -> VersionedRecord:
        """Fence and close the ledger; the result is the same however often, and by however many
        clients, it is recovered.

        `gone`: ids of the bookies that the caller declares gone. If the end cannot be decided
        otherwise, entries that only these bookies may have are given up: a wrong declaration may
        lose acknowledged entries. `tokens`: the cluster's tokens, in the place of the password's.
        Raises DataUnavailable when the end cannot be decided now (the ledger stays IN_RECOVERY: try
        again), NotEnoughBookies, Unauthorized, NoSuchLedger, Unavailable.
        """
        return (await self._recovered(ledger_id, tokens or derive(password), gone)).versioned

    async def _recovered(
        self, ledger_id: int, tokens: Tokens, gone: Set[str] = frozenset(), *, small: bool = False
    ) -> Recovered:
        with self._while_open():
            return await recover(self.cluster, ledger_id, tokens, gone, small=small)

    async def record(self, ledger_id: int, *, fresh: bool = False) -> VersionedRecord:
        """The ledger's record; with `fresh` not older than this call.

        Raises NoSuchLedger, Unavailable.
        """
        with self._while_open():
            return await self.cluster.records.read(ledger_id, fresh=fresh)

    async def delete(self, ledger_id: int, only_if: Sequence[Operation] = ()) -> bool:
        """Delete a CLOSED ledger. True also if it is gone already; False if a condition of
        `only_if`, which the same multi checks, does not hold.

        Raises LedgerNotClosed, Unavailable.
        """
        with self._while_open():
            return await self.cluster.records.delete(ledger_id, only_if)

    async def list(self) -> AsyncIterator[int]:
        """Ids of all ledgers, ascending. Raises Unavailable."""
        with self._while_open():
            async for ledger_id in self.cluster.records.list():
                yield ledger_id

    @property
    def invalidations(self) -> int:
        """When this number changes, ids that were allocated before must not be used
        (ClusterGuard.invalidations)."""
        return self.cluster.records.guard.invalidations

    async def allocate_ids(self, count: int) -> range:
        """`count` consecutive ledger ids that no other caller gets. Raises Unavailable."""
        with self._while_open():
            return await self._ids.allocate(count)

    async def close(self) -> None:
        """Give up connections and the session. Open writers are abandoned: their pending adds
        fail, their ledgers stay open until a recovery. Calls that are under way end with
        ClientClosed, as does every later call."""
        self._closed = True
        for writer in [*self._writers.values()]:
            writer.abandon(ClientClosed())
        for end in [*self.cluster.at_close.values()]:
            end(ClientClosed())
        await self._directory.close()
        await self._bookies.close()
        await self.metadata.close()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Around each use of the connections. Raises ClientClosed if the client was closed before
        or during the use."""
        if self._closed:
            raise ClientClosed
        try:
            yield
        except (Unavailable, DataUnavailable) as failure:
            if self._closed:
                raise ClientClosed from failure
            raise

    async def _record_since(self, ledger_id: int, min_version: int | None) -> VersionedRecord:
        """The record, of `min_version` at least. The store has this version, but a session may not
        see it yet: a missing record, too, is believed only after a sync."""
        if min_version is not None:
            with suppress(NoSuchLedger):
                versioned = await self.record(ledger_id)
                if versioned.version >= min_version:
                    return versioned
        return await self.record(ledger_id, fresh=True)

    # -- choosing an ensemble -----------------------------------------------------------------

    async def check_registered(self, ensemble_size: int, what: str) -> None:
        """Check that `ensemble_size` bookies are registered now, writable or not. Asks the metadata
        store only if this client's list has fewer. The error's text begins with `what`, which names
        the ledgers' user.

        Raises NotEnoughBookies, Unavailable.
        """
        if len(self._registered()) >= ensemble_size:
            return
        with self._while_open():
            try:
                await self._directory.refresh()
            except StoreError as failure:
                raise Unavailable(f"the bookies cannot be listed: {failure!r}") from failure
        registered = len(self._registered())
        if registered < ensemble_size:
            remedy = f"Start {ensemble_size - registered} more"
            if registered:
                remedy += f", or choose an ensemble size of {registered} or less"
            raise NotEnoughBookies(
                f"{what} would need {ensemble_size} bookies, and {registered} are registered",
                f"{remedy}.",
                needed=ensemble_size,
                registered=registered,
            )

    def _registered(self) -> set[str]:
        bookies = (*self._directory.writable(), *self._directory.readonly())
        return {bookie.id for bookie in bookies}

    async def _new_ensemble(self, quorum: Quorum) -> tuple[str, ...]:
        """A bookie for each slot: if possible bookies that responded lately; one that is down only
        if there are too few others.

        Raises NotEnoughBookies, BadConfig, Unavailable.
        """
        chosen = self._place(quorum)
        if len(chosen) < quorum.ensemble_size and self._has_recent_down_list():
            chosen = self._fill_with_down(quorum, chosen)
        if len(chosen) < quorum.ensemble_size:
            chosen = await self._place_later(quorum)
        return tuple(chosen[slot] for slot in range(quorum.ensemble_size))

    def _place(self, quorum: Quorum) -> Mapping[int, str]:
        slots = range(quorum.ensemble_size)
        return self.cluster.place(quorum, slots, self._directory.writable(), {})

    def _fill_with_down(self, quorum: Quorum, chosen: Mapping[int, str]) -> Mapping[int, str]:
        """The ensemble `chosen`, its empty slots filled with bookies that are down, if every write
        set keeps an ack quorum of registered bookies. The ledger is then in the same state as if
        these bookies had stopped after it was made: its writer asks them again or replaces them."""
        members = {slot: self._directory.info(bookie) for slot, bookie in chosen.items()}
        slots = [slot for slot in range(quorum.ensemble_size) if slot not in chosen]
        if len(slots) > quorum.write_quorum - quorum.ack_quorum:
            return chosen
        down = [bookie for bookie in self._down if not self._directory.is_registered(bookie.id)]
        for candidates in (down[: len(slots)], down):  # if racks allow it, the last that went down
            filled = self.cluster.place(quorum, slots, candidates, members)
            if len(filled) == len(slots):
                return {**chosen, **filled}
        return chosen

    async def _read_down(self) -> None:
        """Read which bookies are down and not being drained. Raises StoreError."""
        draining_ids = await draining_bookies(self.metadata)
        down = await self._directory.read_down()
        self._down = [bookie for bookie in down if bookie.id not in draining_ids]
        self._down_read_at = asyncio.get_running_loop().time()

    def _has_recent_down_list(self) -> bool:
        """Whether the list of bookies that are down was read within DOWN_LIST_S: hundreds of
        ledgers may be made at once."""
        return asyncio.get_running_loop().time() - self._down_read_at < DOWN_LIST_S

    async def _place_later(self, quorum: Quorum) -> Mapping[int, str]:
        """Choose again, also among bookies that are down. If that is not enough, choose again
        whenever a bookie registers, for as long as a restart may take. Raise at once if no further
        bookie can register, because all bookies that ever registered are writable."""
        changed = asyncio.Event()
        self._directory.add_listener(changed.set)
        try:
            await self._directory.refresh()
            grace_s = min(self.config.spare_grace_s, self.config.add_timeout_s / 2)
            async with asyncio.timeout(grace_s):
                while len(chosen := self._place(quorum)) < quorum.ensemble_size:
                    await self._read_down()
                    chosen = self._fill_with_down(quorum, chosen)
                    if len(chosen) == quorum.ensemble_size:
                        break
                    ever_registered = await self._directory.count_ever_registered()
                    if ever_registered < quorum.ensemble_size or ever_registered <= len(
                        self._directory.writable()
                    ):
                        raise self._not_enough_error(quorum)
                    await changed.wait()
                    changed.clear()
                return chosen
        except StoreError as failure:
            raise Unavailable(f"the bookies cannot be listed: {failure!r}") from failure
        except TimeoutError:
            raise self._not_enough_error(quorum) from None
        finally:
            self._directory.remove_listener(changed.set)

    def _not_enough_error(self, quorum: Quorum) -> NotEnoughBookies:
        size, describe = quorum.ensemble_size, self.cluster.describe
        writable = [bookie.id for bookie in self._directory.writable()]
        others = self._directory.ids_with_address(writable)
        text = f"a ledger needs {size} writable bookies, there are {len(writable)}"
        remedy = self.cluster.remedy_for(others)
        if self.config.racks == "hard":
            text += (
                f'; with racks = "hard" any {quorum.write_quorum} neighbours of them must be on'
                f" different racks, there are {self._racks()}"
            )
            if len(writable) >= size:
                remedy = 'Start bookies on more racks, or set racks = "soft".'
        elif len(writable) >= size:
            remedy = "Correct the policy, or start bookies that it takes."
            text += f"; placement = {self.config.placement!r} takes too few of them"
        if writable:
            text += f"; writable: {'; '.join(map(describe, writable))}"
        if others:
            text += f"; not writable: {'; '.join(map(describe, others))}"
        return NotEnoughBookies(text, remedy, needed=size, writable=writable)

    def _racks(self) -> str:
        """The racks of the writable bookies for an error text: "none" or "r1, r2"."""
        racks = dict.fromkeys(bookie.rack for bookie in self._directory.writable())
        names = [rack for rack in sorted(racks) if rack]
        return ", ".join(names) if names else "none (no bookie has `rack` set)"
