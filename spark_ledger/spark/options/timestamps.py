"""A moment as a user writes it, milliseconds since 1970 or ISO text, and the rows since then.

Always true: text without an offset is a moment in the zone that is given, else in this process's,
which in the driver is the zone that a session of Spark starts with; tasks see a session that was
given another, and refuse to read by such a text (`check_zone`). A moment before 1970 or beyond the
year 9999 is refused. Parts of a millisecond are rounded up: a read that starts at a moment has no
row from before it. The time of a row is that of its commit, by the
metadata store's clock; of one that came by a broker it is that at which it was stored, by the
broker's, which follows it. No row that was committed at or after a moment is missed.
"""

import datetime
from collections.abc import Iterable, Mapping

from spark_ledger.errors import OptionInvalid
from spark_ledger.spark.options.values import Zone
from spark_ledger.topic.log.segment_table import Chunk
from spark_ledger.topic.log.state import UNREAD, Tables, TopicState
from spark_ledger.topic.subscription.seek_target import CommittedSince, chunks_needed, offset_since

MS_MAX = 253_402_300_799_999
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MS = datetime.timedelta(milliseconds=1)


def millis_of(value: object, zone: datetime.tzinfo | None = None) -> int | None:
    """Milliseconds since 1970 of a number of them or of a text; None if it is no moment. `zone` is
    that of a text that says none; None: this process's."""
    if isinstance(value, str):
        text = value.strip()
        number = text.isascii() and text.isdigit() and len(text) < 19
        value = int(text) if number else _iso(text, zone)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MS_MAX:
        return None
    return value


def says_no_zone(value: object) -> bool:
    """Whether it is a text that is a moment in some zone."""
    try:
        return isinstance(value, str) and _parsed(value.strip()).tzinfo is None
    except ValueError:
        return False


def check_zone(
    zoneless: Iterable[tuple[str, int]], session: str | None, *, in_checkpoint: bool = False
) -> None:
    """`zoneless` are texts that say no zone and the milliseconds that they were taken for in the
    driver; `in_checkpoint`: a query's checkpoint begins there already. Raises OptionInvalid if they
    are others in the zone that the session was given."""
    zone = None if session is None else _zone(session)
    begun = ", and start with a new checkpoint: this one begins there" if in_checkpoint else ""
    for text, millis in zoneless if zone is not None else ():
        if millis_of(text, zone) != millis:
            raise OptionInvalid(
                f"the time {text!r} says no zone, and was taken for {as_text(millis)}: Spark does"
                f" not tell a source that the session's is {session}",
                f"Add option timeZone, {session!r}, or say the zone in the text{begun}.",
            )


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
    without such a row is left out. Rows of a segment born live are told apart by its entries alone:
    of one that is sealed the first counts, if any was stored since, of an open one always."""
    found = {}
    for partition, millis in wanted.items():
        held = state.partitions[partition]
        offset = offset_since(held, millis, read)
        if offset < held.end_offset or held.live is not None:
            found[partition] = offset
    return found


def _parsed(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _zone(name: str) -> datetime.tzinfo | None:
    try:
        return Zone().parse("", name)
    except OptionInvalid:  # Spark knows more names than Python
        return None


def _iso(text: str, zone: datetime.tzinfo | None) -> int | None:
    try:
        moment = _parsed(text)
        if moment.tzinfo is None:
            moment = moment.astimezone() if zone is None else moment.replace(tzinfo=zone)
        return -((_EPOCH - moment) // _MS)
    except (ValueError, OverflowError):
        return None
