"""The entry index as the storage engine sees it: where each entry lies, and each ledger's state;
and what is known of ledgers that the indexes do not have yet (`LedgerStates`).

Always true of an index: what was put, moved or deleted is visible when the call returns and durable
when the next `sync` returns (before that it may be lost, in part too: the journal covers it); what
was synced is found again, or the index fails: it never denies it; a later put of the same key
replaces the earlier one; any failure is DiskFailed, and one of a write or sync is final: a sync
that follows it would be no proof. docs/formats.md pictures the keys.

Always true of states: each change gets a higher revision, so of two copies of a state the later is
known; a change made from an older copy takes back nothing that came in between (`merged`). What
a directory says that was away is older, whatever its revisions (`brought_back`); of a ledger that
only such a one knows, what came meanwhile was forgotten: a fence, say.
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
from spark_ledger.metadata.ledger_record import Verifiers, shallow

EVERY_LEDGER = -1  # a state with this id speaks of all ledgers this bookie may have served


class Location(NamedTuple):
    """Entry `entry_id` of `ledger_id`: a record that starts at byte `position` of entry log
    `log_id` and carries `entry_bytes` bytes of entry (header and payload)."""

    ledger_id: int
    entry_id: int
    log_id: int
    position: int
    entry_bytes: int


class LimboReason(enum.StrEnum):
    """Why a ledger's negatives are unknown here; the later one, the more is unknown.

    Moves: NONE -> TORN -> LOST, NONE -> LOST as entries are doubted (`worse`); ClearLimbo alone
    takes a ledger back to NONE, after its entries were compared with the other copies.
    """

    NONE = ""
    TORN = "torn"
    """What was not synced when the node last died may be gone."""
    LOST = "lost"
    """Acknowledged entries may be gone."""


def worse(one: LimboReason, other: LimboReason) -> LimboReason:
    """The reason that leaves more unknown."""
    return max(one, other, key=_REASONS.index)


_REASONS = tuple(LimboReason)


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a bookie knows of a ledger besides its entries, and must not forget.

    fenced: normal adds are refused, for ever. explicit_lac: highest LAC written by WriteLac.
    limbo: why entries may have been lost here, if they may.
    deleted: a tombstone.
    met: the verifiers were read from the metadata (not so only when the journal was damaged).
    creation: the creator token of the record that was read then, by which it is seen that the id
    was given out again after the metadata store went back in time; empty: not known.
    directories: ids of the ledger directories that may hold entries of it; the last one takes new
    ones. given_up: ids of those that were lost and are not missed any more, each with the revision
    from which on what it may hold of the ledger is garbage.
    revision: counted up with each change, so that of two states the later one is known.
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


def merged(one: LedgerState, other: LedgerState) -> LedgerState:
    """What two states of a ledger say together: the later revision is right, and nothing that was
    ever set for good (fence, tombstone, explicit LAC) is taken back; a directory with entries only
    by a later state that gave it up."""
    late, early = (one, other) if one.revision >= other.revision else (other, one)
    limbo = late.limbo
    if one.revision == other.revision:
        limbo = worse(one.limbo, other.limbo)
    met = late if late.met or not early.met else early
    given_up = dict(sorted((*early.given_up, *late.given_up), key=itemgetter(1)))
    forgotten = [
        each
        for each in early.directories
        if each not in late.directories and given_up.get(each, 0) <= early.revision
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
    """The index found that bytes of its own cannot be right."""


def brought_back(known: LedgerState, away: LedgerState) -> LedgerState:
    """What is known of a ledger, and what a directory says of it that was away meanwhile.

    Nothing that was ever set for good is taken back, and a directory given up stays so. Else what
    is known is right even if `away` has the higher revision: that one counted what the others had
    no flush of. Of their reasons to doubt the worse counts then: nobody knows which came later.
    """
    both = merged(known, replace(away, revision=0))
    if away.revision < known.revision:
        return both
    return replace(both, limbo=worse(known.limbo, away.limbo))


class BadIndexRecord(ValueError):
    """Bytes that are no record of the index."""


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
    """`entry_key` and `encode_location` of each, at less than a step of Python for each field."""
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
    except (KeyError, TypeError, ValueError) as error:
        raise BadIndexRecord(f"not a ledger state: {error}") from error


class EntryIndex(Protocol):
    """(ledger, entry) to location, ledger id to state, direct log to mark. All raise DiskFailed."""

    on_damage: Callable[[IndexDamaged], None]
    """Called before IndexDamaged is raised, each time."""

    async def put(self, locations: Sequence[Location]) -> None:
        """An entry put again lies at the new location."""

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        """Each (old, new): the entry lies at the new location, if it still lay at the old one."""

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
        """As `range`, of those of the ascending ids that exist; there is one at least."""

    async def last(self, ledger_id: int) -> int | None:
        """The highest entry id of the ledger."""

    async def ledger_ids(self) -> list[int]:
        """Every ledger that has a location here, ascending."""

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        """Forget where these of its entries lie."""

    async def delete_ledger(self, ledger_id: int) -> None:
        """Forget where its entries lie; its state stays."""

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None: ...

    async def delete_states(self, ledger_ids: Sequence[int]) -> None: ...

    async def ledgers(self) -> list[LedgerState]:
        """Every ledger state, by ledger id."""

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        """By direct log: the position from which on it may hold records that the index lacks; None:
        it holds none. Never durable before what was put earlier is."""

    async def marked_logs(self) -> dict[int, int]:
        """The marks that are positions, by log id, ascending."""

    async def sync(self) -> None:
        """Everything that came before is durable when it returns."""

    async def close(self) -> None:
        """Promises nothing about what was not synced."""


class Changes(NamedTuple):
    """What a flush brings to every index: the forgotten ledgers' states go first."""

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
        """A change of now. Returns it with its revision."""
        known = self._states.get(state.ledger_id)
        if known is not None and state.revision < known.revision:
            state = merged(state, known)
        return self.restore(replace(state, revision=state.revision + 1))

    def restore(self, state: LedgerState) -> LedgerState:
        """A change of an earlier run, which has its revision already."""
        self._states[state.ledger_id] = state
        self._dirty[state.ledger_id] = None
        self._forgotten.pop(state.ledger_id, None)
        return state

    def forget(self, ledger_id: int) -> None:
        """Nothing is known of the ledger any more."""
        if self._states.pop(ledger_id, None) is not None:
            self._dirty.pop(ledger_id, None)
            self._forgotten[ledger_id] = None

    @property
    def has_changes(self) -> bool:
        return bool(self._dirty or self._forgotten)

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes = Changes([self._states[i] for i in self._dirty], list(self._forgotten))
        self._dirty, self._forgotten = {}, {}
        return changes

    def load(
        self, copies: Iterable[Iterable[LedgerState]], away: Iterable[Iterable[LedgerState]] = ()
    ) -> None:
        """What each index says, those of directories that were `away` apart; where one lacks
        something, all are told with the next flush."""
        every = [{state.ledger_id: state for state in copy} for copy in copies]
        older = [{state.ledger_id: state for state in copy} for copy in away]
        for copy in every:
            for ledger_id, state in copy.items():
                known = self._states.get(ledger_id)
                self._states[ledger_id] = state if known is None else merged(state, known)
        for copy in older:
            for ledger_id, state in copy.items():
                known = self._states.get(ledger_id)
                self._states[ledger_id] = (
                    doubted(state) if known is None else brought_back(known, state)
                )
        for ledger_id, state in self._states.items():
            if any(copy.get(ledger_id) != state for copy in (*every, *older)):
                self._dirty[ledger_id] = None


def doubted(state: LedgerState) -> LedgerState:
    """As it may have been when it was forgotten; a tombstone says all there is to say."""
    if state.deleted or state.ledger_id == EVERY_LEDGER:
        return state
    return replace(state, fenced=True, limbo=LimboReason.LOST)
