"""A moment as a user writes it: milliseconds since 1970 or ISO text.

Always true: text without an offset is UTC, so the same text is the same moment on every machine; a
moment before 1970 or beyond the year 9999 is refused. Parts of a millisecond are rounded up: a read
that starts at a moment has no row from before it.
"""

import datetime

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


def _iso(text: str) -> int | None:
    try:
        moment = datetime.datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return -((_EPOCH - moment) // _MS)
    except (ValueError, OverflowError):
        return None
