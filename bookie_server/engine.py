"""The storage engine as the rest of a bookie sees it: one ships, ledger_storage.LedgerStorage.

Always true of an engine:
- what was appended is durable when its future is done, and is found again after any crash;
- what `put` and `set_state` were given is seen at once, and durable with the record the caller
  appends, or with the next flush;
- an entry that it may have had and cannot give is Undeliverable, or its ledger is in `limbo`:
  never merely absent;
- its first failure that leaves it without a journal or without a ledger directory is final.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bookie_server.api.entry import Buffer, EntryHeader
from bookie_server.api.entry_ids import EntryIds
from bookie_server.api.messages import EntryPlace
from bookie_server.directory_store import DirectoryStore
from bookie_server.entry_index import LedgerState
from bookie_server.journal_format import Record
from bookie_server.lanes import Lane


class Undeliverable(NamedTuple):
    """An entry that the index knows and the disk cannot give: it exists, or existed."""

    why: str
    entry_bytes: int


Delivered = Buffer | Undeliverable
Found = Delivered | EntryPlace


class Range(NamedTuple):
    """What a read found: by entry id, ascending; what was asked for up to and including entry
    `known_through` and is not there is not stored, what lies beyond was not looked at."""

    entries: dict[int, Found]
    known_through: int


class StorageEngine(Protocol):
    """Everything runs on one event loop; what is not `async` happens in one step of it."""

    # -- ledgers --

    @property
    def ledger_count(self) -> int: ...

    def state(self, ledger_id: int) -> LedgerState | None: ...

    def states(self) -> list[LedgerState]:
        """What is known of every ledger, and of EVERY_LEDGER, by id."""

    def set_state(self, state: LedgerState) -> LedgerState:
        """Known from now on; durable with the caller's record or the next flush.

        Returns it with its revision and directories: that is what a record must say.
        """

    def limbo(self, ledger_id: int) -> str:
        """Why what is not found of the ledger is unknown: "torn", "lost", or "": it is absent.

        EVERY_LEDGER's limbo, and directories that are not there, are taken into account.
        """

    def quarantine(self, ledger_id: int, entry_id: int, why: str) -> None:
        """The copy of the entry here is bad: its ledger is in limbo "lost" from now on."""

    on_doubt: Callable[[], None]
    """Called when a ledger was quarantined that was not "lost", or `damage` found."""

    on_quarantine: Callable[[int], None]
    """Called with the ledger of each quarantine, also of one that was "lost" already."""

    @property
    def damage(self) -> str:
        """Why the index of the only directory is not to be trusted; else empty."""

    def is_whole(self, state: LedgerState) -> bool:
        """Whether every directory that may hold entries of the ledger is there."""

    def missing(self, state: LedgerState) -> int:
        """Which of the state's directories are not there: bit n for the n-th; 0 if it is whole."""

    def without_missing(self, state: LedgerState) -> LedgerState:
        """The state without directories that are not there: what they had is here again."""

    @property
    def is_complete(self) -> bool:
        """Whether every ledger directory that is known of is there."""

    def in_cache(self, ledger_id: int) -> bool:
        """Whether entries of the ledger are still to be flushed."""

    def dropped(self, ledger_id: int) -> None:
        """The ledger's entries were deleted from the indexes, or are to be compared as they lie on
        disk: the read cache lets go of them."""

    def forget(self, ledger_id: int) -> None:
        """The ledger's state too; nothing of it may be in cache or index."""

    # -- journals --

    def append(
        self, records: Sequence[Record], lane: Lane = Lane.BULK, after: Sequence[int] = ()
    ) -> asyncio.Future[None]:
        """The future is done when the records are durable, and so is what was appended before of
        their ledgers and of the ledgers `after`; in the page-cache lane, when they are written.

        With neither it is a barrier: done when all that was appended before is. Fails with
        JournalFailed. Shield it: cancelling it cancels nothing but the waiting.
        """

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet durable."""

    @property
    def pending_bytes_max(self) -> int:
        """More than so much pending would wait for disk space."""

    @property
    def wait_s(self) -> float:
        """Seconds until there should be room for what was refused."""

    def rescue(self, ledger_id: int) -> list[asyncio.Future[None]]:
        """What is in memory alone of the ledger's entries, for the directory where they were
        written is lost, goes to the journal: done when it is durable there."""

    # -- entries --

    @property
    def flushes(self) -> int:
        """How many have ended; an entry moves from cache to index only in one."""

    @property
    def unflushed_bytes(self) -> int: ...

    def has_room(self, entry_bytes: int, *, reserve: bool = False) -> bool:
        """Whether `put` may be called; `reserve`: recovery's share of the cache too."""

    def put(self, ledger_id: int, entry_id: int, entry: Buffer) -> None:
        """Readable from now on; replaces an earlier copy."""

    def put_all(self, ledger_id: int, entries: dict[int, Buffer], *, reserve: bool = False) -> bool:
        """`put` of entries that nobody has read yet (they lie above all that are stored of the
        ledger, or nobody reads at all), if there is room for all of them; False: nothing was put.
        """

    def compact(self, ledger_id: int, entry_id: int) -> Buffer:
        """Replace the view of an entry just put by a copy, which is returned."""

    def cached(self, ledger_id: int, entry_id: int) -> Buffer | None: ...

    async def last_entry(self, ledger_id: int) -> int | None:
        """The highest entry id stored of the ledger. Raises DiskFailed."""

    async def stored(self, ledger_id: int, first_entry: int, last_entry: int) -> dict[int, None]:
        """Which of the entries are here, as cache and index say; no log is read. Raises DiskFailed
        when an index cannot be read."""

    async def places(self, ledger_id: int, entry_ids: EntryIds) -> Sequence[EntryPlace]:
        """See EntryReader.places."""

    async def read(
        self, ledger_id: int, entry_ids: EntryIds, max_bytes: int, *, places: bool = False
    ) -> Range:
        """Those of the entries that are stored, each checked; stops after the entry that brings
        the bytes to `max_bytes`. With `places` large ones may be told by where they lie, unread.
        Raises DiskFailed when an index cannot be read."""

    async def headers(
        self, ledger_id: int, entry_ids: Sequence[int]
    ) -> dict[int, EntryHeader | Undeliverable]:
        """Of those that are stored; an answer taken while `flushes` moved on may miss one."""

    # -- life --

    @property
    def failures(self) -> dict[str, str]:
        """Directories that were lost, by id: why. The engine goes on with the others."""

    @property
    def stores(self) -> list[DirectoryStore]:
        """The ledger directories that live, for whoever reclaims their space."""

    @property
    def journals_ended(self) -> asyncio.Future[None]:
        """Fails when no journal is left."""

    async def run(self) -> None:
        """Flushes; to be run as a task. Raises DiskFailed when no ledger directory is left."""

    def stop(self) -> None:
        """Let `run` end soon."""

    def hurry(self) -> None:
        """The node stops: what waits for disk space fails instead."""

    async def close(self) -> None:
        """Everything in its final place, journals sealed. Only after `run` has ended.

        Raises JournalFailed, DiskFailed.
        """

    def abandon(self) -> None:
        """End at once, as a crash would."""
