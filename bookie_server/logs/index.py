"""The entry index as the storage engine sees it: the location of each entry, and each ledger's
state; and the states in memory, with changes that the indexes do not have yet (`LedgerStates`).

Always true of an index: a put, move or deletion is visible when the call returns and durable when
the next `sync` returns (before that all or a part of it may be lost: the journal covers it); a
look-up finds what was synced, or fails: the index never denies it; a later put of the same key
replaces the earlier one; any failure is DiskFailed, and a failure of a write or sync is final: a
sync that follows it would prove nothing. docs/formats.md pictures the keys.

Always true of states: each change gets a higher revision, so of two copies of a state the one with
the higher revision is later; a change made from an older copy takes back nothing that came in
between (`merged`). The states of a directory that was away are older, whatever their revisions
(`brought_back`); if only such a directory has a ledger's state, later changes of it were forgotten:
a fence, say.
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

EVERY_LEDGER = -1  # the state with this id holds for all ledgers that this bookie may have served


class Location(NamedTuple):
    """Entry `entry_id` of `ledger_id`: a record that starts at byte `position` of entry log
    `log_id` and carries `entry_bytes` bytes of entry (header and payload)."""

    ledger_id: int
    entry_id: int
    log_id: int
    position: int
    entry_bytes: int


class LimboReason(enum.StrEnum):
    """Why a ledger's negatives are unknown here; each reason leaves more unknown than those above
    it.

    Moves: NONE -> TORN -> LOST, NONE -> LOST as entries are doubted (`worse`); ClearLimbo alone
    takes a ledger back to NONE, after its entries were compared with the other copies.
    """

    NONE = ""
    TORN = "torn"
    """Entries that were not synced when the node last died may be gone."""
    LOST = "lost"
    """Acknowledged entries may be gone."""


def worse(first: LimboReason, second: LimboReason) -> LimboReason:
    """The reason that leaves more unknown."""
    return max(first, second, key=_REASONS.index)


_REASONS = tuple(LimboReason)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a bookie keeps of a ledger besides its entries, and must not forget.

    fenced: normal adds are refused, for ever. explicit_lac: highest LAC written by WriteLac.
    limbo: why entries may have been lost here, if they may.
    deleted: a tombstone.
    met: the verifiers were read from the metadata (False only when the journal was damaged).
    creation: the creator token of the record that was read then; another token shows that the id
    was given out again after the metadata store went back in time. Empty: unknown.
    directories: ids of the ledger directories that may hold its entries; the last one takes new
    entries. given_up: ids of directories that were lost and are not missed any more, each with the
    revision from which on its entries of the ledger are garbage.
    revision: counted up with each change; of two states the higher revision is the later one.
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


def merged(first: LedgerState, second: LedgerState) -> LedgerState:
    """One state made of two of a ledger: the later revision is right, but it takes back nothing
    that was ever set for good (fence, tombstone, explicit LAC), and a directory with entries only
    if it gave that directory up."""
    late, early = (first, second) if first.revision >= second.revision else (second, first)
    limbo = late.limbo
    if first.revision == second.revision:
        limbo = worse(first.limbo, second.limbo)
    met = late if late.met or not early.met else early
    given_up = dict(sorted((*early.given_up, *late.given_up), key=itemgetter(1)))
    forgotten = [
        directory
        for directory in early.directories
        if directory not in late.directories and given_up.get(directory, 0) <= early.revision
    ]
    return replace(
        late,
        verifiers=met.verifiers,
        durability=met.durability,
        met=met.met,
        creation=late.creation or early.creation,
        fenced=late.fenced or early.fenced,
        explicit_lac=max(late.explicit_lac, early.explicit_lac),
        limbo=limbo,
        deleted=late.deleted or early.deleted,
        directories=(*forgotten, *late.directories),
        given_up=tuple(sorted(given_up.items())),
    )


class IndexDamaged(DiskFailed):
    """The index found bytes of its own that cannot be right."""


def brought_back(present: LedgerState, away: LedgerState) -> LedgerState:
    """A ledger's state made of `present` and of `away`, the state in a directory that was away.

    Nothing that was ever set for good is taken back, and a directory given up stays given up. Else
    `present` is right even if `away` has the higher revision, which then counts changes that were
    never flushed to the other directories. In that case either limbo may be the later one, and the
    worse counts.
    """
    both = merged(present, replace(away, revision=0))
    if away.revision < present.revision:
        return both
    return replace(both, limbo=worse(present.limbo, away.limbo))


class BadIndexRecord(ValueError):
    """Bytes that do not parse as a record of the index."""


ENTRY_PREFIX, LEDGER_PREFIX, LOG_PREFIX = b"e", b"l", b"p"
_ENTRY_KEY = struct.Struct(">cqq")
_LEDGER_KEY = struct.Struct(">cq")
_LOG_KEY = struct.Struct(">cQ")
_ENTRY_VALUE = struct.Struct("<QQI")
_LOG_VALUE = struct.Struct("<Q")


def entry_key(ledger_id: int, entry_id: int) -> bytes:
    """17 bytes, big-endian, so that keys sort by (ledger, entry); neither is ever negative."""
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
    """`entry_key` and `encode_location` of each location, without a step of Python for each."""
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
        """An entry put again has the new location."""

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        """Each (old, new): the entry gets the new location, if it still had the old one."""

    async def get(self, ledger_id: int, entry_id: int) -> Location | None: ...

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        """Locations of the entries that exist between first and last, both included, ascending.

        Ends early after the location whose entry brings their sum to `max_bytes` or more.
        """

    async def among(
        self, ledger_id: int, entry_ids: Sequence[int], max_bytes: int
    ) -> list[Location]:
        """As `range`, of the ascending `entry_ids` that exist; at least one id is given."""

    async def last(self, ledger_id: int) -> int | None:
        """The highest entry id of the ledger."""

    async def ledger_ids(self) -> list[int]:
        """Every ledger that has a location here, ascending."""

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        """Forget the locations of these entries."""

    async def delete_ledger(self, ledger_id: int) -> None:
        """Forget the locations of its entries; its state stays."""

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None: ...

    async def delete_states(self, ledger_ids: Sequence[int]) -> None: ...

    async def ledgers(self) -> list[LedgerState]:
        """Every ledger state, by ledger id."""

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        """By direct log: the position from which on it may hold records that the index lacks; None:
        the index has all of them. Never durable before earlier puts are."""

    async def marked_logs(self) -> dict[int, int]:
        """The marks that are not None, by log id, ascending."""

    async def sync(self) -> None:
        """All earlier changes are durable when it returns."""

    async def close(self) -> None:
        """Promises nothing about changes that were not synced."""


class IndexChanges(NamedTuple):
    """What a flush brings to every index. It deletes the states of `forgotten` ledgers first."""

    states: list[LedgerState]
    forgotten: list[int]


class LedgerStates:
    """States by ledger id."""

    def __init__(self) -> None:
        self._states: dict[int, LedgerState] = {}
        self._dirty: dict[int, None] = {}
        self._forgotten: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._states) - (EVERY_LEDGER in self._states)

    def get(self, ledger_id: int) -> LedgerState | None:
        return self._states.get(ledger_id)

    def all(self) -> list[LedgerState]:
        """Of every ledger, and of EVERY_LEDGER, by id."""
        return [self._states[ledger_id] for ledger_id in sorted(self._states)]

    def set(self, state: LedgerState) -> LedgerState:
        """Take a new change. Returns the state with its revision."""
        current = self._states.get(state.ledger_id)
        if current is not None and state.revision < current.revision:
            state = merged(state, current)
        return self.restore(replace(state, revision=state.revision + 1))

    def restore(self, state: LedgerState) -> LedgerState:
        """Take a change of an earlier run, which has its revision already."""
        self._states[state.ledger_id] = state
        self._dirty[state.ledger_id] = None
        self._forgotten.pop(state.ledger_id, None)
        return state

    def forget(self, ledger_id: int) -> None:
        """Remove the ledger's state."""
        if self._states.pop(ledger_id, None) is not None:
            self._dirty.pop(ledger_id, None)
            self._forgotten[ledger_id] = None

    @property
    def has_changes(self) -> bool:
        return bool(self._dirty or self._forgotten)

    def take_changes(self) -> IndexChanges:
        """What changed since the last call."""
        changes = IndexChanges([self._states[i] for i in self._dirty], list(self._forgotten))
        self._dirty, self._forgotten = {}, {}
        return changes

    def load(
        self, copies: Iterable[Iterable[LedgerState]], away: Iterable[Iterable[LedgerState]] = ()
    ) -> None:
        """Merge the states of each index; those of directories that were `away` come separately. A
        state that some index lacks goes to every index with the next flush."""
        every = [{state.ledger_id: state for state in copy} for copy in copies]
        older = [{state.ledger_id: state for state in copy} for copy in away]
        for copy in every:
            for ledger_id, state in copy.items():
                present = self._states.get(ledger_id)
                self._states[ledger_id] = state if present is None else merged(state, present)
        for copy in older:
            for ledger_id, state in copy.items():
                present = self._states.get(ledger_id)
                self._states[ledger_id] = (
                    worst_case(state) if present is None else brought_back(present, state)
                )
        for ledger_id, state in self._states.items():
            if any(copy.get(ledger_id) != state for copy in (*every, *older)):
                self._dirty[ledger_id] = None


def worst_case(state: LedgerState) -> LedgerState:
    """The worst that the state may have become before it was forgotten: fenced, entries lost. A
    tombstone stays as it is: nothing is worse."""
    if state.deleted or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, fenced=True, limbo=LimboReason.LOST)
