"""The record of a ledger: the bookies that keep it, its state, and its end.

Always true: a record has at least one fragment; the first begins at entry 0 and first entries
strictly increase; each ensemble has exactly `ensemble_size` different bookies; `last_entry`,
`length_bytes` and `rows` are set if and only if the state is CLOSED. A bookie may be *joining* for
a slot of a fragment: repair writes the slot's copies to this bookie, and no client reads from it
before it has the slot. At most one bookie joins for a slot, and no member of the ensemble joins.

Three tokens derive from a ledger's password: to read, to add, and to fence and recover. Always
true: the record holds verifiers only, from which no token can be computed; without a password there
are no verifiers, and bookies accept any token. A token to recover also grants read and add, because
recovery writes back the entries that it reads.

All records are in the tree of folders below /ledgers. Always true: a listing of the tree begins
with a sync, and is complete or raises an error; folders are never deleted, so a missing folder, or
a name that is no id, means that the tree is broken.
"""

import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore, NoNode, StoreError

FORMAT = 1


class RecordState(Enum):
    OPEN = "OPEN"
    IN_RECOVERY = "IN_RECOVERY"
    CLOSED = "CLOSED"


class BadLedgerRecord(ValueError):
    """A malformed ledger record, or a record of a format that this version does not know."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """From `first_entry` on, slot i of the ensemble is the bookie `ensemble[i]`."""

    first_entry: int
    ensemble: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JoiningBookie:
    """`bookie_id` gets the copies of a slot, and then the slot (repair/slots.py). The slot belongs
    to the fragment that begins at `first_entry`. `token` is a new random text each time that a
    bookie joins: a bookie that left and joined again has another token, and its copies are compared
    again."""

    first_entry: int
    slot: int
    bookie_id: str
    token: str = ""


@dataclass(frozen=True, slots=True)
class Verifiers:
    """The SHA-256 of each token, in hex."""

    read: str
    add: str
    recover: str


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """One ledger. `creator` is a random token: by it the creator recognises its own record after a
    lost response. The ledger was made for this `intent` and `topic`. Both are empty if a user made
    the ledger through LedgerClient: maintenance never deletes it. `custom`: the user's values."""

    ledger_id: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    fragments: tuple[Fragment, ...]
    state: RecordState = RecordState.OPEN
    last_entry: int | None = None
    length_bytes: int | None = None
    rows: int | None = None
    durability: str = "synced"
    creator: str = ""
    intent: str = ""
    topic: str = ""
    verifiers: Verifiers | None = None
    custom: Mapping[str, str] = field(default_factory=dict)
    joining: tuple[JoiningBookie, ...] = ()

    def __post_init__(self) -> None:
        quorums = (self.ensemble_size, self.write_quorum, self.ack_quorum)
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum >= 1:
            raise BadLedgerRecord(f"E >= Qw >= Qa >= 1 does not hold: {quorums}")
        firsts = [fragment.first_entry for fragment in self.fragments]
        if firsts != [0] and (not firsts or firsts[0] != 0 or firsts != sorted(set(firsts))):
            raise BadLedgerRecord(f"first entries of fragments must rise from 0: {firsts}")
        for fragment in self.fragments:
            members = fragment.ensemble
            if not len(set(members)) == len(members) == self.ensemble_size:
                raise BadLedgerRecord(f"an ensemble needs {self.ensemble_size} different bookies")
        ends = (self.last_entry, self.length_bytes, self.rows)
        if (self.state is RecordState.CLOSED) != (None not in ends):
            raise BadLedgerRecord(f"state {self.state.value} with end {ends}")
        if self.joining:
            self._check_joining()

    def _check_joining(self) -> None:
        ensembles = {fragment.first_entry: fragment.ensemble for fragment in self.fragments}
        for joining in self.joining:
            ensemble = ensembles.get(joining.first_entry)
            if ensemble is None or not 0 <= joining.slot < self.ensemble_size:
                raise BadLedgerRecord(f"no fragment has the slot of {joining}")
            if joining.bookie_id in ensemble:
                raise BadLedgerRecord(f"{joining} is in the ensemble already")
        slots = {(joining.first_entry, joining.slot) for joining in self.joining}
        bookies = {(joining.first_entry, joining.bookie_id) for joining in self.joining}
        if min(len(slots), len(bookies)) < len(self.joining):
            raise BadLedgerRecord("two bookies are joining for a slot, or a bookie for two slots")

    @property
    def last_fragment(self) -> Fragment:
        return self.fragments[-1]

    @property
    def closed(self) -> bool:
        return self.state is RecordState.CLOSED

    def fragment_of(self, entry_id: int) -> Fragment:
        """The fragment of the entry: the last fragment that begins at or below `entry_id`."""
        for fragment in reversed(self.fragments):
            if fragment.first_entry <= entry_id:
                return fragment
        raise ValueError(f"entry ids start at 0, got {entry_id}")

    def joining_at(self, first_entry: int, slot: int) -> JoiningBookie | None:
        """The bookie that is joining for that slot, if there is one."""
        for joining in self.joining:
            if (joining.first_entry, joining.slot) == (first_entry, slot):
                return joining
        return None

    def names(self, bookie_id: str) -> bool:
        """Whether the bookie keeps copies by this record, or is joining."""
        return any(bookie_id in fragment.ensemble for fragment in self.fragments) or any(
            bookie_id == joining.bookie_id for joining in self.joining
        )


def entries_kept(record: LedgerRecord, bookie_id: str, last_entry: int) -> list[tuple[range, int]]:
    """The entries up to `last_entry` of each fragment that names the bookie, and the bookie's slot
    in that fragment. The bookie keeps the entries for which `should_keep` is true."""
    return [
        (entries, fragment.ensemble.index(bookie_id))
        for fragment, entries in entries_of(record, last_entry)
        if bookie_id in fragment.ensemble and entries
    ]


def entries_of(record: LedgerRecord, last_entry: int) -> list[tuple[Fragment, range]]:
    """Each fragment with its part of 0..last_entry, which may be empty."""
    ends = [fragment.first_entry for fragment in record.fragments[1:]]
    return [
        (fragment, range(fragment.first_entry, min(end, last_entry + 1)))
        for fragment, end in zip(record.fragments, [*ends, last_entry + 1], strict=True)
    ]


def should_keep(record: LedgerRecord, slot: int, entry_id: int) -> bool:
    """Whether the slot is in the entry's write set."""
    return (slot - entry_id) % record.ensemble_size < record.write_quorum


def shallow(value: Any) -> dict[str, Any]:
    """The fields, by name, of a dataclass with slots; not copied, so it costs a tenth of asdict."""
    return {name: getattr(value, name) for name in value.__slots__}


def encode(record: LedgerRecord) -> bytes:
    """JSON with sorted keys, readable with any ZooKeeper client."""
    plain = shallow(record)
    plain["state"] = record.state.value
    plain["verifiers"] = None if record.verifiers is None else shallow(record.verifiers)
    plain["custom"] = dict(record.custom)
    plain["format"] = FORMAT
    plain["fragments"] = [[f.first_entry, list(f.ensemble)] for f in record.fragments]
    joining = [[*shallow(bookie).values()] for bookie in plain.pop("joining")]
    if joining:  # an earlier version refuses a record with this field
        plain["joining"] = joining
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def decode(value: bytes) -> LedgerRecord:
    """Raises BadLedgerRecord when the value is damaged, inconsistent or of another format."""
    try:
        plain: dict[str, Any] = json.loads(value)
        if plain.pop("format") != FORMAT:
            raise BadLedgerRecord("the ledger record is of a format this version does not know")
        plain["state"] = RecordState(plain["state"])
        plain["fragments"] = tuple(
            Fragment(first, tuple(ensemble)) for first, ensemble in plain["fragments"]
        )
        plain["joining"] = tuple(JoiningBookie(*values) for values in plain.get("joining", ()))
        if plain["verifiers"] is not None:
            plain["verifiers"] = Verifiers(**plain["verifiers"])
        return LedgerRecord(**plain)
    except errors.MALFORMED as error:
        raise BadLedgerRecord(f"not a ledger record: {error}") from error


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a client sends with its requests; empty for a ledger without password.
    `repair`: the tokens are repair's credential (autorecovery.py). It is valid for every ledger,
    and no ledger's record has a verifier of it."""

    read: bytes = b""
    add: bytes = b""
    recover: bytes = b""
    repair: bool = False


def derive(password: bytes) -> Tokens:
    """The tokens of a password."""
    if not password:
        return Tokens()
    read, add, recover = (hmac.digest(password, u, "sha256") for u in (b"read", b"add", b"recover"))
    return Tokens(read, add, recover)


def verifiers(tokens: Tokens) -> Verifiers | None:
    """The verifiers of the tokens, for the ledger's record."""
    if not tokens.recover:
        return None
    return Verifiers(*(_digest(token) for token in (tokens.read, tokens.add, tokens.recover)))


def allows(verifiers: Verifiers | None, use: str, token: bytes) -> bool:
    """Whether `token` may be used for `use`: "read", "add" or "recover"."""
    if verifiers is None:
        return True
    accepted = [verifiers.recover, getattr(verifiers, use)]
    return any(hmac.compare_digest(_digest(token), verifier) for verifier in accepted)


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


LEDGER_ID_DIGITS = 19


class BrokenListing(StoreError):
    """The tree is damaged: the ids listed so far are not all ledgers."""


async def ledger_ids(metadata: MetadataStore, root: str = paths.LEDGERS) -> AsyncIterator[int]:
    """The ids of all ledgers, ascending; a ledger that is made or deleted during the listing may be
    in it. For each level of the tree, the names of one folder are in memory. `root` may be the root
    of another such tree.

    Raises StoreError, also BrokenListing: the list is never short.
    """
    await metadata.sync(root)
    folders = [root]
    while folders:
        folder = folders.pop()
        above = folder.removeprefix(root).replace("/", "")
        digits = paths.name_digits(len(above))
        if len(above) + digits == LEDGER_ID_DIGITS:
            for name in await _names(metadata, folder, digits):
                yield int(above + name)
        else:
            below = reversed(await _names(metadata, folder, digits))
            folders += [f"{folder}/{name}" for name in below]


async def _names(metadata: MetadataStore, folder: str, digits: int) -> Sequence[str]:
    """The names in a folder of the tree, each of `digits` digits."""
    try:
        names = await metadata.children(folder)
    except NoNode:  # folders are never deleted
        raise BrokenListing(f"the listing of ledgers is broken: {folder} is missing") from None
    foreign = [name for name in names if not (len(name) == digits and name.isdecimal())]
    if foreign:
        raise BrokenListing(f"the listing of ledgers is broken: {folder} holds {foreign[0]!r}")
    return names
