"""The interface of the entry index for the storage engine: the location of each entry, and each
ledger's state; and the states in memory, with changes that the indexes do not have yet
(`LedgerStates`).

Always true of an index:
- a put, move or deletion is visible when the call returns, and durable when the next `sync`
  returns. Before the sync a crash may undo any part of it: then the journal has the change;
- a look-up of a synced key returns its value, or raises: it never returns "absent";
- a later put of the same key replaces the earlier one;
- any failure is DiskFailed. A failed write or sync is final: a later sync would prove nothing.
docs/formats.md pictures the keys.

Always true of states:
- each change gets a higher revision: of two copies of a state, the copy with the higher revision is
  the later one;
- a change that was made to an older copy undoes no change made since (`merge_by_revision`);
- states of a directory that missed the end of an earlier run are outdated, whatever their revisions
  (`merge_outdated`). If only such a directory has a ledger's state, later changes of the state,
  perhaps a fence, were forgotten.
"""

import enum
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from bookie_server.api.entry import NO_ENTRY
from bookie_server.disk.interface import DiskFailed
from spark_ledger import errors
from spark_ledger.metadata.ledger_record import Verifiers, shallow

EVERY_LEDGER = -1  # the limbo of the state with this id holds for all ledgers of this bookie


class Location(NamedTuple):
    """The location of entry `entry_id` of `ledger_id`: its record starts at byte `position` of
    entry log `log_id`, and the entry (header and payload) has `entry_bytes` bytes."""

    ledger_id: int
    entry_id: int
    log_id: int
    position: int
    entry_bytes: int


class LimboReason(enum.StrEnum):
    """Why a missing entry of a ledger counts as unknown here; each value is worse than the value
    before.

    The reason only gets worse (`worse_reason`), until ClearLimbo sets it back to NONE, after the
    ledger's entries were compared with the other copies.
    """

    NONE = ""
    TORN = "torn"
    """Entries that were not synced when the node last died may be missing."""
    LOST = "lost"
    """Acknowledged entries may be missing."""


def worse_reason(first: LimboReason, second: LimboReason) -> LimboReason:
    """The reason that is later in LimboReason."""
    return max(first, second, key=_REASONS.index)


_REASONS = tuple(LimboReason)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a bookie keeps of a ledger besides its entries, and must not forget.

    fenced: normal adds are refused, for ever. explicit_lac: the highest LAC written by WriteLac.
    limbo: why entries may have been lost here; NONE if no entry was lost.
    deleted: the ledger is buried (a tombstone).
    met: the ledger's record was read at first contact (False only after damage of the journal).
    creation: the creator token of the record that was read at first contact; another token shows
    that the id was given out again after the metadata store went back in time. Empty: unknown.
    directories: ids of the ledger directories that may hold its entries; the last directory takes
    new entries. given_up: ids of lost directories, each with the revision from which on its entries
    of the ledger are garbage.
    revision: rises with each change.
    """

    ledger_id: int
    verifiers: Verifiers | None = None
    durability: str = "synced"
    fenced: bool = False
    explicit_lac: int = NO_ENTRY
    limbo: LimboReason = LimboReason.NONE
    deleted: bool = False
    met: bool = True
    directories: tuple[str, ...] = ()
    given_up: tuple[tuple[str, int], ...] = ()
    revision: int = 0
    creation: str = ""


def merge_by_revision(first: LedgerState, second: LedgerState) -> LedgerState:
    """The state of a ledger, from two copies. The copy with the later revision counts, with these
    exceptions: a fence, a tombstone and an explicit LAC of either copy stay, and a directory of the
    earlier copy stays unless the later copy gave it up."""
    late, early = (first, second) if first.revision >= second.revision else (second, first)
    limbo = late.limbo
    if first.revision == second.revision:
        limbo = worse_reason(first.limbo, second.limbo)
    with_record = late if late.met or not early.met else early
    given_up = dict(sorted((*early.given_up, *late.given_up), key=itemgetter(1)))
    kept_directories = [
        directory
        for directory in early.directories
        if directory not in late.directories and given_up.get(directory, 0) <= early.revision
    ]
    return replace(
        late,
        verifiers=with_record.verifiers,
        durability=with_record.durability,
        met=with_record.met,
        creation=late.creation or early.creation,
        fenced=late.fenced or early.fenced,
        explicit_lac=max(late.explicit_lac, early.explicit_lac),
        limbo=limbo,
        deleted=late.deleted or early.deleted,
        directories=(*kept_directories, *late.directories),
        given_up=tuple(sorted(given_up.items())),
    )


class IndexDamaged(DiskFailed):
    """Bytes of the index are damaged."""


def merge_outdated(present: LedgerState, outdated: LedgerState) -> LedgerState:
    """A ledger's state from `present` and from the state in a directory that missed the end of an
    earlier run.

    A fence, a tombstone and an explicit LAC of either state stay, and a directory that was given up
    stays given up. For all other fields `present` counts. If `outdated` has the higher revision,
    it had changes that no other directory has. Then either limbo may be the later one, so the worse
    limbo counts.
    """
    both = merge_by_revision(present, replace(outdated, revision=0))
    if outdated.revision < present.revision:
        return both
    return replace(both, limbo=worse_reason(present.limbo, outdated.limbo))


class BadIndexRecord(ValueError):
    """Bytes that do not parse as a record of the index."""


ENTRY_PREFIX, LEDGER_PREFIX, LOG_PREFIX = b"e", b"l", b"p"
_ENTRY_KEY = struct.Struct(">cqq")
_LEDGER_KEY = struct.Struct(">cq")
_LOG_KEY = struct.Struct(">cQ")
_ENTRY_VALUE = struct.Struct("<QQI")
_LOG_VALUE = struct.Struct("<Q")


def entry_key(ledger_id: int, entry_id: int) -> bytes:
    """17 bytes, big-endian, so that keys sort by (ledger, entry). Both ids are 0 or more."""
    return _ENTRY_KEY.pack(ENTRY_PREFIX, ledger_id, entry_id)


def ledger_key(ledger_id: int) -> bytes:
    """9 bytes; the key of EVERY_LEDGER sorts last."""
    return _LEDGER_KEY.pack(LEDGER_PREFIX, ledger_id)


def log_key(log_id: int) -> bytes:
    """9 bytes."""
    return _LOG_KEY.pack(LOG_PREFIX, log_id)


def encode_log_mark(position: int) -> bytes:
    """The 8 bytes under `log_key`."""
    return _LOG_VALUE.pack(position)


def decode_log_mark(key: bytes, value: bytes) -> tuple[int, int]:
    """Log id and position. Raises BadIndexRecord when key or value have another size."""
    try:
        return int(_LOG_KEY.unpack(key)[1]), int(_LOG_VALUE.unpack(value)[0])
    except struct.error as error:
        raise BadIndexRecord(f"not a log's mark: {error}") from error


def encode_location(location: Location) -> bytes:
    """The 20 bytes under `entry_key`: log id, position, entry bytes."""
    return _ENTRY_VALUE.pack(location.log_id, location.position, location.entry_bytes)


def encode_locations(locations: Sequence[Location]) -> Iterator[tuple[bytes, bytes]]:
    """`entry_key` and `encode_location` of each location, column by column."""
    ledger_ids, entry_ids, *fields = zip(*locations, strict=True)
    keys = map(_ENTRY_KEY.pack, repeat(ENTRY_PREFIX), ledger_ids, entry_ids)
    return zip(keys, map(_ENTRY_VALUE.pack, *fields), strict=True)


def decode_location(key: bytes, value: bytes) -> Location:
    """Raises BadIndexRecord when key or value have another size."""
    try:
        return Location(*_ENTRY_KEY.unpack(key)[1:], *_ENTRY_VALUE.unpack(value))
    except struct.error as error:
        raise BadIndexRecord(f"not an entry's location: {error}") from error


def encode_ledger_state(state: LedgerState) -> bytes:
    """JSON with sorted keys; also the body of the journal's ledger record."""
    plain = shallow(state)
    plain["verifiers"] = None if state.verifiers is None else shallow(state.verifiers)
    if not state.given_up:
        del plain["given_up"]
    if not state.creation:
        del plain["creation"]
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode_ledger_state(value: bytes) -> LedgerState:
    """Raises BadIndexRecord when the bytes are no ledger state."""
    try:
        plain: dict[str, Any] = json.loads(value)
        if plain["verifiers"] is not None:
            plain["verifiers"] = Verifiers(**plain["verifiers"])
        if isinstance(plain["limbo"], bool):  # written before limbo had reasons
            plain["limbo"] = "lost" if plain["limbo"] else ""
        plain["limbo"] = LimboReason(plain["limbo"])
        plain["directories"] = tuple(plain.get("directories", ()))
        plain["given_up"] = tuple((name, at) for name, at in plain.get("given_up", ()))
        return LedgerState(**plain)
    except errors.MALFORMED as error:
        raise BadIndexRecord(f"not a ledger state: {error}") from error


class EntryIndex(Protocol):
    """(ledger, entry) to location, ledger id to state, direct log to mark. All raise DiskFailed."""

    on_damage: Callable[[IndexDamaged], None]
    """Called before IndexDamaged is raised, each time."""

    async def put(self, locations: Sequence[Location]) -> None:
        """Set the location of each entry."""

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        """For each (old, new): set the entry's location to `new` if it is `old`."""

    async def get(self, ledger_id: int, entry_id: int) -> Location | None: ...

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        """Locations of the entries that exist between first and last, both included, ascending.

        Ends early, after the location with which the entries together have `max_bytes` or more.
        """

    async def among(
        self, ledger_id: int, entry_ids: Sequence[int], max_bytes: int
    ) -> list[Location]:
        """As `range`, for the entries among the ascending `entry_ids` that exist. The caller gives
        at least one id."""

    async def last(self, ledger_id: int) -> int | None:
        """The highest entry id of the ledger."""

    async def ledger_ids(self) -> list[int]:
        """Every ledger that has a location here, ascending."""

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        """Forget the locations of these entries."""

    async def delete_ledger(self, ledger_id: int) -> None:
        """Forget the locations of the ledger's entries; the ledger's state stays."""

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None: ...

    async def delete_states(self, ledger_ids: Sequence[int]) -> None: ...

    async def ledgers(self) -> list[LedgerState]:
        """Every ledger state, by ledger id."""

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        """Set the mark of each direct log: from this position on the log may have records that the
        index lacks; None: the index lacks no record. Marks are never durable before earlier puts.
        """

    async def marked_logs(self) -> dict[int, int]:
        """The marks that are not None, by log id, ascending."""

    async def sync(self) -> None:
        """Make all earlier changes durable."""

    async def close(self) -> None:
        """Close the index. Changes that were not synced may be lost."""


class IndexChanges(NamedTuple):
    """Changes of states that a flush writes to every index. The flush deletes the states of the
    `forgotten_ids` first."""

    states: list[LedgerState]
    forgotten_ids: list[int]


class LedgerStates:
    """States by ledger id."""

    def __init__(self) -> None:
        self._states: dict[int, LedgerState] = {}
        self._changed_ids: dict[int, None] = {}
        self._forgotten_ids: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._states) - (EVERY_LEDGER in self._states)

    def get(self, ledger_id: int) -> LedgerState | None:
        return self._states.get(ledger_id)

    def all(self) -> list[LedgerState]:
        """The state of every ledger, and of EVERY_LEDGER, by id."""
        return [self._states[ledger_id] for ledger_id in sorted(self._states)]

    def set(self, state: LedgerState) -> LedgerState:
        """Set a changed state. Returns it with its new revision."""
        current = self._states.get(state.ledger_id)
        if current is not None and state.revision < current.revision:
            state = merge_by_revision(state, current)
        return self.restore(replace(state, revision=state.revision + 1))

    def restore(self, state: LedgerState) -> LedgerState:
        """Set a state of an earlier run; its revision stays."""
        self._states[state.ledger_id] = state
        self._changed_ids[state.ledger_id] = None
        self._forgotten_ids.pop(state.ledger_id, None)
        return state

    def forget(self, ledger_id: int) -> None:
        """Remove the ledger's state."""
        if self._states.pop(ledger_id, None) is not None:
            self._changed_ids.pop(ledger_id, None)
            self._forgotten_ids[ledger_id] = None

    @property
    def has_changes(self) -> bool:
        return bool(self._changed_ids or self._forgotten_ids)

    def take_changes(self) -> IndexChanges:
        """The changes since the last call."""
        changes = IndexChanges(
            [self._states[i] for i in self._changed_ids], list(self._forgotten_ids)
        )
        self._changed_ids, self._forgotten_ids = {}, {}
        return changes

    def load(
        self,
        indexes: Iterable[Iterable[LedgerState]],
        outdated_indexes: Iterable[Iterable[LedgerState]] = (),
    ) -> None:
        """Merge the states of each index. The next flush writes a state that an index lacks to
        every index."""
        current = [{state.ledger_id: state for state in states} for states in indexes]
        outdated = [{state.ledger_id: state for state in states} for states in outdated_indexes]
        for copy in current:
            for ledger_id, state in copy.items():
                present = self._states.get(ledger_id)
                self._states[ledger_id] = (
                    state if present is None else merge_by_revision(state, present)
                )
        for copy in outdated:
            for ledger_id, state in copy.items():
                present = self._states.get(ledger_id)
                self._states[ledger_id] = (
                    fenced_and_lost(state) if present is None else merge_outdated(present, state)
                )
        for ledger_id, state in self._states.items():
            if any(copy.get(ledger_id) != state for copy in (*current, *outdated)):
                self._changed_ids[ledger_id] = None


def fenced_and_lost(state: LedgerState) -> LedgerState:
    """The worst state that later changes, now forgotten, may have made: fenced, entries lost. A
    buried ledger's state stays unchanged."""
    if state.deleted or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, fenced=True, limbo=LimboReason.LOST)
