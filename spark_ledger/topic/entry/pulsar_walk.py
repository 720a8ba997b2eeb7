"""Where the parts of a batch's messages lie, found for many messages at a time. Pure.

    size (4) | SingleMessageMetadata | value | size (4) | SingleMessageMetadata | value | ...

A message begins where the one before ends, so messages can be found one after the other only. Here
they are guessed, all at once, by how one begins, and each is read up to where it says it ends: the
guess is right if from the first byte each ends where the next begins, and the last at the end.
Always true: what `walk` returns is what a decoder of protobuf would find; where it cannot tell
(fields that it does not know, or in another order than their numbers', numbers of more than 49
bits, damage) it raises Odd, and the caller decodes message by message. Properties that are not
asked for are passed over by their size alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PADDING = bytes(16)
"""What a buffer has after its last message, so that eight bytes can be read anywhere in it."""
PROPERTIES_MAX = 64
"""Of a message; those with more are decoded one by one."""
GUESSES_MAX = 16
"""For each message; values that look like many messages are decoded one by one."""

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_PROPERTIES, _KEY, _SIZE = 0x0A, 0x12, 0x18  # tags: a field's number and its kind
_COMPACTED, _EVENT_TIME, _BASE64, _ORDERING_KEY = 0x20, 0x28, 0x30, 0x3A
_SEQUENCE_ID, _NULL_VALUE, _NULL_KEY = 0x40, 0x48, 0x50
_AFTER_SIZE = (
    *(_COMPACTED, _EVENT_TIME, _BASE64, _ORDERING_KEY, _SEQUENCE_ID, _NULL_VALUE, _NULL_KEY),
)
_NAME, _TEXT = 0x0A, 0x12
_DELIMITED = frozenset((_PROPERTIES, _KEY, _ORDERING_KEY, _NAME, _TEXT))
_NO_TAG = 0  # past the last field
_TOO_LONG = 0xFF
_STOPS = np.uint64(0x80808080808080)  # of seven bytes, the bit that says whether one follows
_SEVENS = np.uint64(0x7F7F7F7F7F7F7F)


class Odd(Exception):
    """Messages that are to be decoded one by one."""


@dataclass(frozen=True, slots=True)
class Found:
    """Spans are starts and ends in the buffer; those of a column rise. What a message does not
    have is an empty span, 0 or False; `has_...` says whether it has it."""

    value: tuple[Places, Places]
    null_value: Flags
    key: tuple[Places, Places]
    has_key: Flags
    base64: Flags
    event_ms: Places
    has_sequence_id: Flags
    sequence_id: Places
    properties: Places
    """How many each message has; their names and texts, of all messages in order:"""
    name: tuple[Places, Places]
    text: tuple[Places, Places]


def walk(buffer: bytes, ends: Sequence[tuple[int, int]], *, properties: bool = True) -> Found:
    """The messages in `buffer`, which ends in PADDING. `ends` are rising pairs of how many messages
    there are up to a byte: the ends of batches. Without `properties` these are passed over. Raises
    Odd."""
    messages, total = ends[-1]
    assert len(buffer) == total + len(PADDING), "eight bytes can be read everywhere"
    words = np.ndarray((total + 1,), dtype="<u8", buffer=buffer, strides=(1,))
    begins = _guesses(np.frombuffer(buffer, dtype=np.uint8, count=total), words, messages)
    at = begins + 4
    fields = _Fields(words, at, at + _sizes(words[begins]))
    which, starts, lengths = _properties(fields, kept=properties)
    key, has_key = fields.take(_KEY)
    key_at = fields.span
    has_size = fields.tags == _SIZE
    nexts = fields.ends + np.where(has_size, fields.values, total + 1)
    real = _chain(begins, nexts, messages, total)
    for count, end in ends[:-1]:
        if count < messages and begins[real[count]] != end:
            raise Odd
    if len(real) < len(begins):
        fields, nexts = fields.only(real), nexts[real]
        key, key_at, has_key = key[real], key_at[real], has_key[real]
        number = np.full(len(begins), -1, dtype=np.int64)
        number[real] = np.arange(len(real))
        which, kept = number[which], number[which] >= 0
        which, starts, lengths = which[kept], starts[kept], lengths[kept]
    fields.take(_SIZE)
    found = {tag: fields.take(tag) for tag in _AFTER_SIZE}
    fields.check_ends()
    order = np.argsort(which, kind="stable")
    name, text = _pairs(words, starts[order], lengths[order])
    null_key = found[_NULL_KEY][0] != 0
    return Found(
        value=(fields.ends, nexts),
        null_value=found[_NULL_VALUE][0] != 0,
        key=(key_at, key_at + key),
        has_key=has_key & ~null_key,
        base64=found[_BASE64][0] != 0,
        event_ms=found[_EVENT_TIME][0],
        has_sequence_id=found[_SEQUENCE_ID][1],
        sequence_id=found[_SEQUENCE_ID][0],
        properties=np.bincount(which, minlength=messages),
        name=name,
        text=text,
    )


def _guesses(data: npt.NDArray[np.uint8], words: Words, messages: int) -> Places:
    """Where messages may begin: with a size below 64 KiB of metadata that begins as all does."""
    zero = data == 0
    begins = np.flatnonzero(zero[:-1] & zero[1:])
    first = words[begins]
    tag = (first >> np.uint64(32)) & np.uint64(0xFF)
    may = (tag == _SIZE) | (tag == _KEY) | (tag == _PROPERTIES)
    may &= begins + 4 + _sizes(first) <= len(data)
    found: Places = begins[may]
    if not len(found) or len(found) > GUESSES_MAX * messages:
        raise Odd
    return found


def _sizes(first: Words) -> Places:
    """The size (big-endian) that each of the messages begins with, below 64 KiB."""
    high, low = (first >> np.uint64(8)) & np.uint64(0xFF00), (first >> np.uint64(24))
    return (high | (low & np.uint64(0xFF))).astype(np.int64)


def _chain(begins: Places, nexts: Places, messages: int, total: int) -> Places:
    """Which of the guesses are messages: those that are met from the first byte on."""
    if (
        len(begins) == messages
        and begins[0] == 0
        and nexts[-1] == total
        and bool((nexts[:-1] == begins[1:]).all())
    ):
        return np.arange(messages)
    at = np.minimum(np.searchsorted(begins, nexts), len(begins) - 1)
    hops = np.where(begins[at] == nexts, at, -1)
    if begins[0] != 0:
        raise Odd
    real, one, hop = [0], 0, hops.tolist()
    for _ in range(messages - 1):
        one = hop[one]
        if one < 0:
            raise Odd
        real.append(one)
    if nexts[one] != total:
        raise Odd
    return np.array(real, dtype=np.int64)


class _Fields:
    """The next field of each of many pieces of metadata, which end at `ends`: `tags`, and the
    number that follows the tag, in `values`: a size where the field is delimited."""

    def __init__(self, words: Words, at: Places, ends: Places) -> None:
        self._words = words
        self.ends = ends
        self.at = at
        self.span = at
        """Where what was taken last begins, or would."""
        self.tags, self.values, self._nexts = self._read(at, ends)

    def only(self, which: Places) -> "_Fields":
        made = object.__new__(_Fields)
        made._words = self._words
        for name in ("ends", "at", "span", "tags", "values", "_nexts"):
            setattr(made, name, getattr(self, name)[which])
        return made

    def take(self, tag: int) -> tuple[Places, Flags]:
        """Each field with that tag: its number, 0 where there is none, and whether there is."""
        has = self.tags == tag
        count = int(np.count_nonzero(has))
        if not count:
            self.span = self.at
            return np.zeros(len(has), dtype=np.int64), has
        if count == len(has):
            values, self.span = self.values, self._nexts
            self.at = self.span + values if tag in _DELIMITED else self.span
            self.tags, self.values, self._nexts = self._read(self.at, self.ends)
            return values, has
        values = np.where(has, self.values, 0)
        self.span = np.where(has, self._nexts, self.at)
        self.at = self.span + values if tag in _DELIMITED else self.span
        some = np.flatnonzero(has)
        tags, numbers, nexts = self._read(self.at[some], self.ends[some])
        self.tags[some], self._nexts[some] = tags, nexts
        self.values[some] = numbers
        return values, has

    def check_ends(self) -> None:
        """Whether all is read. Raises Odd."""
        if not bool((self.at == self.ends).all()):
            raise Odd

    def _read(self, at: Places, ends: Places) -> tuple[Places, Places, Places]:
        """The tags at these places, the numbers after them, and where these end."""
        inside = at < ends
        if not bool(inside.any()):
            nothing = np.zeros(len(at), dtype=np.int64)
            return nothing, nothing, at
        words = self._words[np.minimum(at, len(self._words) - 1)]
        tags = (words & np.uint64(0xFF)).view(np.int64)
        tags *= inside  # _NO_TAG past the end
        rest = words >> np.uint64(8)
        if not bool((rest & np.uint64(0x80)).any()):  # numbers of one byte each, as is usual
            return tags, (rest & np.uint64(0x7F)).view(np.int64), at + 2
        stop = ~rest & _STOPS
        below = (stop & (~stop + np.uint64(1))) - np.uint64(1)  # the bits below the first stop
        nexts = at + 2 + (np.bitwise_count(below) >> 3)
        if not bool(stop.all()):
            tags[inside & (stop == 0)] = _TOO_LONG
        return tags, _number(rest & below & _SEVENS).view(np.int64), nexts


def _number(sevens: Words) -> Words:
    """Seven bits of each byte, put together."""
    low, high = np.uint64(0x007F007F007F007F), np.uint64(0x7F007F007F007F00)
    made = (sevens & low) | ((sevens & high) >> np.uint64(1))
    low, high = np.uint64(0x00003FFF00003FFF), np.uint64(0x3FFF00003FFF0000)
    made = (made & low) | ((made & high) >> np.uint64(2))
    low, high = np.uint64(0x000000000FFFFFFF), np.uint64(0x0FFFFFFF00000000)
    return (made & low) | ((made & high) >> np.uint64(4))


def _properties(fields: _Fields, *, kept: bool) -> tuple[Places, Places, Places]:
    """Of each property the message, where it begins, and its size; all are passed over."""
    found: list[tuple[Places, Places, Places]] = []
    rounds = 0
    while bool((fields.tags == _PROPERTIES).any()):
        rounds += 1
        if rounds > PROPERTIES_MAX:
            raise Odd
        sizes, has = fields.take(_PROPERTIES)
        if kept:
            which = np.flatnonzero(has)
            found.append((which, fields.span[which], sizes[which]))
    if not found:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, nothing
    which, starts, sizes = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return which, starts, sizes


def _pairs(
    words: Words, starts: Places, sizes: Places
) -> tuple[tuple[Places, Places], tuple[Places, Places]]:
    """The names and the texts of properties. Raises Odd."""
    if not len(starts):
        return (starts, starts), (starts, starts)
    fields = _Fields(words, starts, starts + sizes)
    name, _ = fields.take(_NAME)
    name_at = fields.span
    text, _ = fields.take(_TEXT)
    text_at = fields.span
    fields.check_ends()
    return (name_at, name_at + name), (text_at, text_at + text)
