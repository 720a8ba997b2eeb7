"""A moment as a user writes it, milliseconds since 1970 or ISO text, and the rows since then.

Always true: text without an offset is UTC, so the same text is the same moment on every machine; a
moment before 1970 or beyond the year 9999 is refused. Parts of a millisecond are rounded up: a read
that starts at a moment has no row from before it. The time of a row is that of its commit, by the
metadata store's clock; no row that was committed at or after a moment is missed.
"""

import datetime
from collections.abc import Mapping

from spark_ledger.topic.intervals import Chunk
from spark_ledger.topic.seek_target import CommittedSince, chunks_needed, offset_since
from spark_ledger.topic.state import UNREAD, Tables, TopicState

MS_MAX = 253_402_300_799_999
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MS = datetime.timedelta(milliseconds=1)


def millis_of(value: object) -> int | None:
    """Milliseconds since 1970 of a number of them or of a text; None if it is no moment."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else _iso(text)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MS_MAX:
        return None
    return value


def as_text(millis: int) -> str:
    """For messages: the moment in UTC."""
    return (_EPOCH + millis * _MS).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def chunks_to_look_up(state: TopicState, wanted: Mapping[int, int]) -> list[Chunk]:
    """The chunks that `look_up` must have read."""
    moments = dict.fromkeys(wanted.values())
    found = (chunks_needed(state, CommittedSince(millis)) for millis in moments)
    return list(dict.fromkeys(chunk for some in found for chunk in some))


def look_up(state: TopicState, wanted: Mapping[int, int], read: Tables = UNREAD) -> dict[int, int]:
    """For each partition of `wanted` the first offset committed at or after its milliseconds; one
    without such a row is left out. Rows of a live segment, which no commit has yet, count as
    committed now."""
    found = {}
    for partition, millis in wanted.items():
        held = state.partitions[partition]
        offset = offset_since(held, millis, read)
        if offset < held.end_offset or held.live is not None:
            found[partition] = offset
    return found


def _iso(text: str) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return -((_EPOCH - moment) // _MS)
    except (ValueError, OverflowError):
        return None
