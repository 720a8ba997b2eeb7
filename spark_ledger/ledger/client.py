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
from spark_ledger.ledger.recovery import recover
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.metadata.autorecovery import draining
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, Tokens, derive, verifiers
from spark_ledger.metadata.store import MetadataStore, Operation, StoreError

__all__ = ["LedgerStore", "VersionedRecord"]

NOTHING: Mapping[str, str] = MappingProxyType({})
ENSEMBLE_SIZE_MAX = 1000
AWAY_KNOWN_S = 1.0


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
        """What the parts of the ledger share; for repair, which works beside them."""
        self._ids = LedgerIds(metadata)
        self._writers: WeakValueDictionary[int, AsyncLedgerWriter] = WeakValueDictionary()
        self._away: list[BookieInfo] = []
        """Bookies that are not registered, and may be back."""
        self._away_s = float("-inf")
        self._closed = False

    async def create(
        self,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        *,
        password: bytes = b"",
        custom: Mapping[str, str] = NOTHING,
        intent: str = "",
        topic: str = "",
        durability: str = "synced",
        ledger_id: int | None = None,
        announce_lac: bool = False,
    ) -> AsyncLedgerWriter:
        """Make a ledger on `ensemble_size` writable bookies and return its writer. Where there are
        fewer it names bookies that are away, as long as an ack quorum is there for each entry.

        Each entry goes to `write_quorum` of them and is acknowledged when `ack_quorum` have it
        on disk. `announce_lac`: readers are told of the last entry when appends pause: for
        ledgers that are tailed (a task's ledger is not: its commit tells what it holds). Waits a
        moment for bookies that are about to register.
        Raises BadConfig (quorums, placement), NotEnoughBookies, Unavailable; of a given `ledger_id`
        LedgerError if it is taken, IdSpent if it may have been made already: give another.
        """
        try:
            quorum, tokens = Quorum(ensemble_size, write_quorum, ack_quorum), derive(password)
        except ValueError as wrong:
            raise BadConfig(str(wrong), "Choose quorums in that order.") from None
        if ensemble_size > ENSEMBLE_SIZE_MAX:
            raise BadConfig(
                f"ensemble_size {ensemble_size} is more than {ENSEMBLE_SIZE_MAX}",
                "Choose a smaller one: a ledger's record names every bookie of it.",
            )
        purpose = {"intent": intent, "topic": topic, "durability": durability}
        with self._while_open():
            record = await self._new_record(
                ledger_id, quorum, tokens, custom=dict(custom), **purpose
            )
            while True:
                try:
                    known = await self.cluster.records.create(record)
                    return self._writer(known, tokens, announce_lac)
                except IdSpent:
                    if ledger_id is not None:
                        raise
                    record = replace(record, ledger_id=await self._ids.next(self.breaks))

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
        """Ledgers of these ids as `create` makes each, by one write to the metadata store; no more
        than fit into it. Raises as `create`."""
        quorum, tokens = Quorum(ensemble_size, write_quorum, ack_quorum), derive(b"")
        purpose = {"intent": intent, "topic": topic, "durability": durability}
        with self._while_open():
            records = [await self._new_record(one, quorum, tokens, **purpose) for one in ledger_ids]
            made = await self.cluster.records.create_several(records)
            return [self._writer(known, tokens, announce_lac) for known in made]

    async def _new_record(
        self, ledger_id: int | None, quorum: Quorum, tokens: Tokens, **purpose: Any
    ) -> LedgerRecord:
        """Of a new ledger; by its creator, which is drawn, it is known again where the write's
        outcome is not. Raises what `create` raises."""
        if ledger_id is None:
            ledger_id = await self._ids.next(self.breaks)
        try:
            ensemble = await self._new_ensemble(quorum)
        except NotEnoughBookies:  # none registers while the metadata store is held
            with suppress(StoreError):
                await ClusterGuard(self.metadata).look()
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
        self, known: VersionedRecord, tokens: Tokens, announce_lac: bool
    ) -> AsyncLedgerWriter:
        """Of a ledger that was just made."""
        writer = AsyncLedgerWriter(
            self.cluster,
            known,
            tokens,
            lambda own: recover(self.cluster, own, tokens),
            announce_lac,
        )
        self._writers[writer.ledger_id] = writer
        return writer

    async def open(
        self,
        ledger_id: int,
        *,
        recover: bool,
        password: bytes = b"",
        min_version: int | None = None,
    ) -> AsyncLedgerReader:
        """A reader of the ledger. With `recover` the ledger is fenced and closed first: its
        writer can add nothing more, and the reader sees all there ever will be.

        Without, the record is as fresh as this call or, with `min_version`, at least of that
        version. Raises what `recover` and `record` raise.
        """
        if recover:
            known = await self.recover(ledger_id, password=password)
        else:
            known = await self._record_since(ledger_id, min_version)
        return AsyncLedgerReader(self.cluster, known, derive(password))

    async def recover(
        self,
        ledger_id: int,
        *,
        password: bytes = b"",
        gone: Set[str] = frozenset(),
        tokens: Tokens | None = None,
    ) -> VersionedRecord:
        """Fence and close the ledger; the same result however often and by whomever.

        `gone`: ids of bookies that will never respond again, by the word of the caller: where only
        they stand between torn bookies and a decision, what only they may have is given up. Data of
        theirs that was acknowledged may be lost by a wrong word here, and by nothing else.
        `tokens`: the cluster's own, in the place of the password's.
        Raises DataUnavailable when its end cannot be decided now (it stays IN_RECOVERY: try
        again), NotEnoughBookies, Unauthorized, NoSuchLedger, Unavailable.
        """
        with self._while_open():
            return await recover(self.cluster, ledger_id, tokens or derive(password), gone)

    async def record(self, ledger_id: int, *, fresh: bool = False) -> VersionedRecord:
        """The ledger's record; with `fresh` not older than this call.

        Raises NoSuchLedger, Unavailable.
        """
        with self._while_open():
            return await self.cluster.records.read(ledger_id, fresh=fresh)

    async def delete(self, ledger_id: int, only_if: Sequence[Operation] = ()) -> bool:
        """Delete a CLOSED ledger; one that is gone already is success. False: a condition of
        `only_if`, which is judged in the same multi, does not hold.

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
    def breaks(self) -> int:
        """Once it is another number, ids that were allocated before are not to be used
        (ClusterGuard.breaks)."""
        return self.cluster.records.guard.breaks

    async def allocate_ids(self, count: int) -> range:
        """`count` consecutive ledger ids that no other caller gets. Raises Unavailable."""
        with self._while_open():
            return await self._ids.allocate(count)

    async def close(self) -> None:
        """Give up connections and the session. Writers that are open are abandoned: what they
        have pending fails, their ledgers stay open until a recovery. What is under
        way ends with ClientClosed, as does every later call."""
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
        """For what needs the connections. Raises ClientClosed when they were given up, then or
        before."""
        if self._closed:
            raise ClientClosed
        try:
            yield
        except (Unavailable, DataUnavailable) as failure:
            if self._closed:
                raise ClientClosed from failure
            raise

    async def _record_since(self, ledger_id: int, min_version: int | None) -> VersionedRecord:
        """The record, of `min_version` at least. Of the caller's word that it has such a version
        a session may see nothing yet: no record, too, is believed after a sync only."""
        if min_version is not None:
            with suppress(NoSuchLedger):
                known = await self.record(ledger_id)
                if known.version >= min_version:
                    return known
        return await self.record(ledger_id, fresh=True)

    # -- choosing an ensemble -----------------------------------------------------------------

    async def check_registered(self, ensemble_size: int, what: str) -> None:
        """Whether there are so many bookies now, writable or not; `what` is to have ledgers of
        them. Asks the metadata store only if memory knows of fewer.

        Raises NotEnoughBookies, Unavailable.
        """
        if len(self._registered()) >= ensemble_size:
            return
        with self._while_open():
            try:
                await self._directory.refresh()
            except StoreError as failure:
                raise Unavailable(f"the bookies cannot be listed: {failure!r}") from failure
        there = len(self._registered())
        if there < ensemble_size:
            remedy = f"Start {ensemble_size - there} more"
            if there:
                remedy += f", or choose an ensemble size of {there} or less"
            raise NotEnoughBookies(
                f"{what} would need {ensemble_size} bookies, and {there} are registered",
                f"{remedy}.",
                needed=ensemble_size,
                registered=there,
            )

    def _registered(self) -> set[str]:
        return {one.id for one in (*self._directory.writable(), *self._directory.readonly())}

    async def _new_ensemble(self, quorum: Quorum) -> tuple[str, ...]:
        """A bookie for each slot, preferably such that responded lately, and one that is away only
        for want of others.

        Raises NotEnoughBookies, BadConfig, Unavailable.
        """
        chosen = self._place(quorum)
        if len(chosen) < quorum.ensemble_size and self._is_away_known():
            chosen = self._with_away(quorum, chosen)
        if len(chosen) < quorum.ensemble_size:
            chosen = await self._place_later(quorum)
        return tuple(chosen[slot] for slot in range(quorum.ensemble_size))

    def _place(self, quorum: Quorum) -> Mapping[int, str]:
        slots = range(quorum.ensemble_size)
        return self.cluster.place(quorum, slots, self._directory.writable(), {})

    def _with_away(self, quorum: Quorum, chosen: Mapping[int, str]) -> Mapping[int, str]:
        """The ensemble with bookies that are away in the slots left, if every write set keeps an
        ack quorum of registered bookies. The state is that of a ledger whose bookies left just
        after it was made: its writer asks them again, replaces them, and repair copies to them."""
        members = {slot: self._directory.told(bookie) for slot, bookie in chosen.items()}
        slots = [slot for slot in range(quorum.ensemble_size) if slot not in chosen]
        if len(slots) > quorum.write_quorum - quorum.ack_quorum:
            return chosen
        away = [bookie for bookie in self._away if not self._directory.is_registered(bookie.id)]
        for candidates in (away[: len(slots)], away):  # the last to leave, if racks allow it
            filled = self.cluster.place(quorum, slots, candidates, members)
            if len(filled) == len(slots):
                return {**chosen, **filled}
        return chosen

    async def _look_who_is_away(self) -> None:
        """Raises StoreError."""
        going = await draining(self.metadata)
        away = await self._directory.away()
        self._away = [bookie for bookie in away if bookie.id not in going]
        self._away_s = asyncio.get_running_loop().time()

    def _is_away_known(self) -> bool:
        """Whether it was looked a moment ago: hundreds of ledgers may be made at once."""
        return asyncio.get_running_loop().time() - self._away_s < AWAY_KNOWN_S

    async def _place_later(self, quorum: Quorum) -> Mapping[int, str]:
        """Choose again, with bookies that are away where that is enough; else as bookies register,
        for the grace that a restart is given, if there are bookies that might: as many as ever
        registered are no reason to wait."""
        changed = asyncio.Event()
        self._directory.add_listener(changed.set)
        try:
            await self._directory.refresh()
            grace_s = min(self.config.spare_grace_s, self.config.add_timeout_s / 2)
            async with asyncio.timeout(grace_s):
                while len(chosen := self._place(quorum)) < quorum.ensemble_size:
                    await self._look_who_is_away()
                    chosen = self._with_away(quorum, chosen)
                    if len(chosen) == quorum.ensemble_size:
                        break
                    known = await self._directory.known()
                    if known < quorum.ensemble_size or known <= len(self._directory.writable()):
                        raise self._not_enough(quorum)
                    await changed.wait()
                    changed.clear()
                return chosen
        except StoreError as failure:
            raise Unavailable(f"the bookies cannot be listed: {failure!r}") from failure
        except TimeoutError:
            raise self._not_enough(quorum) from None
        finally:
            self._directory.remove_listener(changed.set)

    def _not_enough(self, quorum: Quorum) -> NotEnoughBookies:
        size, describe = quorum.ensemble_size, self.cluster.describe
        writable = [bookie.id for bookie in self._directory.writable()]
        others = self._directory.heard_of(writable)
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
            text += f", of which placement = {self.config.placement!r} takes too few"
        if writable:
            text += f"; writable: {'; '.join(map(describe, writable))}"
        if others:
            text += f"; not writable: {'; '.join(map(describe, others))}"
        return NotEnoughBookies(text, remedy, needed=size, writable=writable)

    def _racks(self) -> str:
        """The racks of the writable bookies for an error text: "none" or "r1, r2"."""
        racks = dict.fromkeys(bookie.rack for bookie in self._directory.writable())
        known = [rack for rack in sorted(racks) if rack]
        return ", ".join(known) if known else "none (no bookie has `rack` set)"
