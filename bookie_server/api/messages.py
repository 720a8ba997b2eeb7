"""The messages of bookie.proto as plain values, so that code that decides needs no protobuf; and
the ids of the entries that a read requests.

Buffers in messages are views if possible: an entry is one buffer, or several buffers that are
joined once, when the message is encoded. Entry ids ascend, without repetition; consecutive ids are
a `range`, and no function takes longer because a range is long.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from bookie_server.api.entry import NO_ENTRY, Buffer, Entry
from bookie_server.api.status import Status, StopReason

IDENTITY_FILE = "bookie.identity"
"""In each directory of a bookie: a file with one line of text, which has the bookie's id."""
EntryIds = Sequence[int]
"""A range, or a tuple of ids that are not all consecutive."""
Span = tuple[int, int]
"""The first and the last of consecutive ids, both included."""


class Add(NamedTuple):
    """One entry to store. `entry` is a list of buffers; their concatenation is the entry."""

    entry: Sequence[Buffer]
    recovery: bool = False
    token: bytes = b""


class AddRequest(NamedTuple):
    bookie_id: str
    adds: Sequence[Add]


class PackedAddRequest(NamedTuple):
    """An AddRequest of adds that were encoded before, each by codec.encode_add."""

    bookie_id: str
    adds: Sequence[Sequence[Buffer]]


class AddResult(NamedTuple):
    status: Status
    retry_after_ms: int = 0
    reason: str = ""


class AddResponse(NamedTuple):
    results: Sequence[AddResult]


class ReadRequest(NamedTuple):
    bookie_id: str
    ledger_id: int
    first_entry: int
    last_entry: int
    max_bytes: int
    fence: bool = False
    token: bytes = b""
    further: Sequence[Span] = ()
    locations: bool = False
    ahead: Sequence[Span] = ()
    tail_entries: int = 0

    @property
    def spans(self) -> Sequence[Span]:
        """All requested entries. (Of the entries in `ahead`, only locations are requested.)"""
        return ((self.first_entry, self.last_entry), *self.further)


class EntryLocation(NamedTuple):
    """Where the bytes of an entry (header and payload) are: in `file` below the ledger directory
    `directory` of the bookie's host, from `position` on."""

    directory: str
    file: str
    position: int
    entry_bytes: int

    @property
    def end(self) -> int:
        return self.position + self.entry_bytes


class EntryResult(NamedTuple):
    """The status of one entry of a read. With OK also the entry's bytes (header and payload) or, if
    the request permits locations, its location. `checked` is never sent: it is the entry that a
    client has read at this location and checked."""

    status: Status
    entry: Buffer = b""
    location: EntryLocation | None = None
    checked: Entry | None = None


class ReadResponse(NamedTuple):
    status: Status
    results: Sequence[EntryResult] = ()
    last_add_confirmed: int = NO_ENTRY
    stop: StopReason = StopReason.END_OF_RANGE
    retry_after_ms: int = 0
    reason: str = ""
    ahead: Sequence[EntryLocation] = ()
    skipped: int = 0

    def result(self, at: int) -> EntryResult | None:
        """The result of the entry at this place of the request, counted from 0; None if the
        response has no result for the entry."""
        at -= self.skipped
        if 0 <= at < len(self.results):
            return self.results[at]
        if at < 0 or not self.results or self.stop is not StopReason.REST_IS_ABSENT:
            return None
        return self.results[-1] if self.results[-1].status is not Status.OK else None


class ReadStreamRequest(NamedTuple):
    """Credit for bytes of responses; the first message also has the range to read."""

    read: ReadRequest | None = None
    credit_bytes: int = 0


class ReadLacRequest(NamedTuple):
    bookie_id: str
    ledger_id: int
    fence: bool = False
    token: bytes = b""
    previous_lac: int = NO_ENTRY
    wait_ms: int = 0


class ReadLacResponse(NamedTuple):
    status: Status
    last_add_confirmed: int = NO_ENTRY
    fenced: bool = False
    retry_after_ms: int = 0
    reason: str = ""
    taken: int = 0
    """The id after the last entry that the bookie stored, confirmed or not."""


class WriteLacRequest(NamedTuple):
    bookie_id: str
    ledger_id: int
    last_add_confirmed: int
    token: bytes = b""


class WriteLacResponse(NamedTuple):
    status: Status
    retry_after_ms: int = 0
    reason: str = ""


class ClearLimboRequest(NamedTuple):
    """With `clear`, a request to clear the ledger's limbo; else a request for the limbo."""

    bookie_id: str
    ledger_id: int
    token: bytes = b""
    clear: bool = False
    revision: int = 0


class ClearLimboResponse(NamedTuple):
    status: Status
    limbo: str = ""
    revision: int = 0
    retry_after_ms: int = 0
    reason: str = ""


class StoredRequest(NamedTuple):
    bookie_id: str
    ledger_id: int
    first_entry: int
    last_entry: int
    token: bytes = b""


class StoredResponse(NamedTuple):
    """The `spans` of requested entries that are stored. The bookie looked up no entry after
    `through`."""

    status: Status
    through: int = NO_ENTRY
    spans: Sequence[Span] = ()
    retry_after_ms: int = 0
    reason: str = ""


class InfoRequest(NamedTuple):
    bookie_id: str = ""


class DirectoryInfo(NamedTuple):
    """One directory of a bookie. `role` is "journal" or "ledger"; `failure` is the reason if the
    directory was dropped."""

    path: str
    role: str
    free_bytes: int = 0
    total_bytes: int = 0
    full: bool = False
    failure: str = ""


class InfoResponse(NamedTuple):
    status: Status
    bookie_id: str = ""
    state: str = ""
    reason: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    ledgers: int = 0
    entry_bytes_max: int = 0
    version: str = ""
    directories: Sequence[DirectoryInfo] = ()
    limbo_ledgers: int = 0
    reclaim: str = ""


Request = (
    AddRequest
    | ReadRequest
    | ReadLacRequest
    | WriteLacRequest
    | ClearLimboRequest
    | InfoRequest
    | StoredRequest
)
Response = (
    AddResponse
    | ReadResponse
    | ReadLacResponse
    | WriteLacResponse
    | ClearLimboResponse
    | InfoResponse
    | StoredResponse
)

METHODS: dict[str, tuple[type, type]] = {
    "Add": (AddRequest, AddResponse),
    "Read": (ReadRequest, ReadResponse),
    "ReadLac": (ReadLacRequest, ReadLacResponse),
    "WriteLac": (WriteLacRequest, WriteLacResponse),
    "ClearLimbo": (ClearLimboRequest, ClearLimboResponse),
    "Info": (InfoRequest, InfoResponse),
    "Stored": (StoredRequest, StoredResponse),
}

STREAMS: dict[str, tuple[type, type]] = {"ReadStream": (ReadStreamRequest, ReadResponse)}


def as_entry_ids(ids: Sequence[int]) -> EntryIds:
    """Ascending ids, as a range if they are consecutive."""
    if isinstance(ids, range) and ids.step == 1:
        return ids
    if ids and ids[-1] - ids[0] == len(ids) - 1:
        return range(ids[0], ids[-1] + 1)
    return tuple(ids)


def spans_of(ids: Sequence[int]) -> list[Span]:
    """The ids as spans."""
    if isinstance(ids, range):
        return [(ids[0], ids[-1])] if ids else []
    spans: list[Span] = []
    first = last = -2
    for entry_id in ids:
        if entry_id != last + 1:
            if first >= 0:
                spans.append((first, last))
            first = entry_id
        last = entry_id
    return [*spans, (first, last)] if first >= 0 else spans


def ids_in(spans: Sequence[Span], count_max: int) -> EntryIds:
    """The ids in ascending spans, at most the first `count_max` ids."""
    if len(spans) == 1:
        first, last = spans[0]
        return range(first, min(last, first + count_max - 1) + 1)
    ids: Iterable[int] = chain.from_iterable(range(first, last + 1) for first, last in spans)
    return as_entry_ids(tuple(islice(ids, count_max)))


def ids_from(ids: EntryIds, entry_id: int) -> EntryIds:
    """The ids from `entry_id` on."""
    if isinstance(ids, range):
        return range(max(ids.start, entry_id), ids.stop)
    return as_entry_ids(ids[bisect_left(ids, entry_id) :])


def has_id(ids: EntryIds, entry_id: int) -> bool:
    """Whether `entry_id` is one of the ids."""
    if isinstance(ids, range):
        return entry_id in ids
    at = bisect_left(ids, entry_id)
    return at < len(ids) and ids[at] == entry_id
