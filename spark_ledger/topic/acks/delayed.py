"""Which messages of a partition are delayed until when, in the records of its ack ledger.

Always true: a record is a hint. A message has its time in its own metadata, so a missing or damaged
record costs a read, and nothing else. To owners of versions without delays, a record looks like the
state of a subscription that cannot exist: they keep the record until they look that subscription up
in the metadata store. Each write of changes has only the messages that were added since the last
write; a snapshot (entries.py) has the whole index. While no subscription here delays messages, the
owner carries the records on: it keeps messages that are not due and that a subscription may get.

The record's name is DELAYED, its rows are empty, and its token is PREFIX and, in base64,

    0       4              12            20              21           22
    +-------+--------------+-------------+---------------+------------+---------+------+
    | count | first offset | first due   | offsets' size | dues' size | offsets | dues |
    +-------+--------------+-------------+---------------+------------+---------+------+

`offsets` has the distance of each offset from the one before (the first is 0, the others above 0);
`dues` has times after `first due`, in ms. These numbers are unsigned and little-endian, of 1, 2, 4
or 8 bytes each: `offsets' size` and `dues' size`.
"""

import base64
import binascii
import logging
import struct
from collections.abc import Callable, Iterator, MutableMapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from spark_ledger.topic.acks.entries import AckKey, AckRecord, AckState

DELAYED = "delayed messages"
PREFIX = "delayed:"
"""No owner's token begins so, because owners' tokens are random."""
ROWS_MAX = 3_000
"""The most messages of a record, whose token has 64 KiB at most."""
_HEAD = struct.Struct("<IqqBB")
_SIZES = (1, 2, 4, 8)
_NUMBER_END = 1 << 62
_DISTANCE_END = 1 << 48
DUE_MS_MAX = _DISTANCE_END - 1
"""A later time, of the year 10889 and after, is stored as this time."""

Numbers = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


class DelayedRows(NamedTuple):
    """Offsets, rising, and when their messages are due, in ms since the epoch."""

    offsets: Numbers
    dues_ms: Numbers


class DelaySource(Protocol):
    """The delay index of a partition, in memory."""

    on_added: Callable[[], None]
    """Called after a message was added."""

    @property
    def bytes(self) -> int: ...

    def load(self, rows: DelayedRows) -> bool:
        """Add these messages, which the ledger has. All other messages of the index count as added
        since the last write; returns whether there are others."""

    def take_added(self) -> DelayedRows:
        """The messages that were added since the last call."""

    def take_all(self) -> DelayedRows:
        """All messages; none of them counts as added any more."""

    def forget_unused(self, now_ms: int, lowest: int) -> None:
        """Forget the messages that are due or below `lowest`, unless a subscription here holds
        them."""


class DelayRecords:
    """The delayed messages in the ack ledger of a partition, at the partition's owner. `on_dirty`
    is called when something is to be written."""

    def __init__(self, on_dirty: Callable[[], None]) -> None:
        self.is_dirty = False
        self._on_dirty = on_dirty
        self._source: DelaySource | None = None
        self._carried: list[AckRecord] = []  # of earlier owners, until a source gets them

    def take_from(self, states: MutableMapping[AckKey, AckState]) -> None:
        """Take the records out of the states that this owner read when it took over."""
        for key in [key for key in states if key.name == DELAYED and key.token.startswith(PREFIX)]:
            state = states.pop(key)
            self._carried.append(_record(key, state.owner_epoch))

    def keep(self, source: DelaySource) -> None:
        """From now on `source` has the index. First it gets the messages that the ledger has."""
        if source is self._source:
            return
        rows = decoded(self._carried)
        self._carried.clear()
        self._source, source.on_added = source, self.changed
        if source.load(rows):
            self.changed()

    def forget_from(self, end: int) -> None:
        """The messages from `end` on do not exist any more, and other messages get their offsets.
        Called before `keep`."""
        if self._carry(lambda rows: rows.offsets < end):
            self.changed()

    def forget_unused(self, now_ms: int, lowest: int) -> None:
        """Messages that are due or below `lowest` need no record any more."""
        self._carry(lambda rows: (rows.dues_ms > now_ms) & (rows.offsets >= lowest))
        if self._source is not None:
            self._source.forget_unused(now_ms, lowest)

    def _carry(self, is_kept: Callable[[DelayedRows], npt.NDArray[np.bool_]]) -> bool:
        """Carry on only messages for which `is_kept` is true. Returns whether a message was
        dropped."""
        if not self._carried:
            return False
        rows = decoded(self._carried)
        kept = is_kept(rows)
        if kept.all():
            return False
        kept_rows = DelayedRows(rows.offsets[kept], rows.dues_ms[kept])
        self._carried = list(encoded(kept_rows, self._carried[0].owner_epoch))
        return True

    def changed(self) -> None:
        if not self.is_dirty:
            self.is_dirty = True
            self._on_dirty()

    @property
    def bytes(self) -> int:
        """About how much memory the index takes."""
        carried = sum(len(record.key.token) for record in self._carried)
        return carried + (0 if self._source is None else self._source.bytes)

    def records(self, owner_epoch: int, bytes_max: float, *, is_whole: bool) -> Iterator[AckRecord]:
        """The records of a write: of the messages that were added since the last write began, or of
        all messages (`is_whole`). No records if the index takes more than `bytes_max`."""
        self.is_dirty = False
        if self.bytes > bytes_max:
            return
        if is_whole:
            yield from self._carried
        if self._source is not None:
            rows = self._source.take_all() if is_whole else self._source.take_added()
            yield from encoded(rows, owner_epoch)


def encoded(rows: DelayedRows, owner_epoch: int) -> Iterator[AckRecord]:
    for at in range(0, len(rows.offsets), ROWS_MAX):
        offsets = rows.offsets[at : at + ROWS_MAX]
        dues_ms = np.minimum(rows.dues_ms[at : at + ROWS_MAX], DUE_MS_MAX)
        first, first_ms = int(offsets[0]), int(dues_ms.min())
        distances, size = _narrow(np.diff(offsets, prepend=first))
        times, time_size = _narrow(dues_ms - first_ms)
        head = _HEAD.pack(len(offsets), first, first_ms, size, time_size)
        token = PREFIX + base64.b64encode(head + distances + times).decode()
        yield _record(AckKey(DELAYED, token, 0), owner_epoch)


def decoded(records: list[AckRecord]) -> DelayedRows:
    """All messages of the records, each offset once; a malformed record is left out."""
    offsets, dues_ms = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for record in records:
        try:
            part = _decode(record.key.token)
        except ValueError as error:
            _log.error("delayed messages are read again: their record is damaged: %s", error)
            continue
        offsets.append(part.offsets)
        dues_ms.append(part.dues_ms)
    all_offsets, firsts = np.unique(np.concatenate(offsets), return_index=True)
    return DelayedRows(all_offsets, np.concatenate(dues_ms)[firsts])


def _decode(token: str) -> DelayedRows:
    """Raises ValueError."""
    try:
        payload = base64.b64decode(token.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from error
    if len(payload) < _HEAD.size:
        raise ValueError(f"{len(payload)} bytes")
    count, first, first_ms, size, time_size = _HEAD.unpack_from(payload)
    if size not in _SIZES or time_size not in _SIZES or not 0 < count <= ROWS_MAX:
        raise ValueError(f"{count} messages, in {size} and {time_size} bytes each")
    times_at = _HEAD.size + count * size
    if len(payload) != times_at + count * time_size:
        raise ValueError(f"{len(payload)} bytes for {count} messages")
    distances = np.frombuffer(payload, f"<u{size}", count, _HEAD.size)
    times = np.frombuffer(payload, f"<u{time_size}", count, times_at)
    is_rising = distances[0] == 0 and bool(np.all(distances[1:] > 0))
    if not is_rising or max(int(distances.max()), int(times.max())) >= _DISTANCE_END:
        raise ValueError("offsets that do not rise, or a time that is too late")
    if not (0 <= first < _NUMBER_END and 0 <= first_ms < _NUMBER_END):
        raise ValueError(f"offset {first}, due at {first_ms} ms")
    offsets = first + np.cumsum(distances.astype(np.int64))
    return DelayedRows(offsets, first_ms + times.astype(np.int64))


def _record(key: AckKey, owner_epoch: int) -> AckRecord:
    no_position, no_rows = 0, BitMap64()
    return AckRecord(key, owner_epoch, no_position, no_rows, replaces=True)


def _narrow(numbers: Numbers) -> tuple[bytes, int]:
    """The numbers as bytes, in the smallest size of _SIZES that fits all of them; and that size."""
    most = int(numbers.max())
    size = next(size for size in _SIZES if most < 1 << 8 * size)
    return numbers.astype(f"<u{size}").tobytes(), size
