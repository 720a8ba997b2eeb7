"""Bookies by the names that people follow: b1, and b1', b1'' after their disk was lost."""

import re
from collections.abc import Iterable

_BOOKIE = re.compile(r"\b0{8}-0{4}-0{4}-0{4}-0{7}(\d\d)(\d{3})\b")


def named(text: str) -> str:
    """Bookie ids in the text as b1, b2, b2' ..."""
    return _BOOKIE.sub(lambda found: f"b{int(found[2])}" + "'" * (int(found[1]) - 1), text)


def listed(bookie_ids: Iterable[str]) -> str:
    """Their names: "b1", "b1 and b2", "b1, b2 and b3"; of one at least."""
    *others, last = map(named, bookie_ids)
    return f"{', '.join(others)} and {last}" if others else last
