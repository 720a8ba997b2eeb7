"""Which entries of a ledger a read is about: ascending ids, neighbours as a `range`.

Always true: ids rise, each comes once; ids that are neighbours are a `range`, the common case, and
nothing here takes longer because a range is long.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain, islice

EntryIds = Sequence[int]
"""A range, or a tuple of ids that are not all neighbours."""
Span = tuple[int, int]
"""The first and the last of neighbours, both included."""


def neat(ids: Sequence[int]) -> EntryIds:
    """Ascending ids, as a range where they are neighbours."""
    if isinstance(ids, range) and ids.step == 1:
        return ids
    if ids and ids[-1] - ids[0] == len(ids) - 1:
        return range(ids[0], ids[-1] + 1)
    return tuple(ids)


def spans_of(ids: Sequence[int]) -> list[Span]:
    """The neighbours among them."""
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
    """The ids in spans that rise, the first `count_max` of them."""
    if len(spans) == 1:
        first, last = spans[0]
        return range(first, min(last, first + count_max - 1) + 1)
    every: Iterable[int] = chain.from_iterable(range(first, last + 1) for first, last in spans)
    return neat(tuple(islice(every, count_max)))


def since(ids: EntryIds, entry_id: int) -> EntryIds:
    """Those from `entry_id` on."""
    if isinstance(ids, range):
        return range(max(ids.start, entry_id), ids.stop)
    return neat(ids[bisect_left(ids, entry_id) :])


def has(ids: EntryIds, entry_id: int) -> bool:
    """Whether it is among them."""
    if isinstance(ids, range):
        return entry_id in ids
    at = bisect_left(ids, entry_id)
    return at < len(ids) and ids[at] == entry_id
