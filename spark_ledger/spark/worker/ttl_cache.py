"""What a process remembers for a while, so that a thousand small tasks do not ask a thousand times.

Always true: nothing is given out after its time, or once it was forgotten; of more than
`entries_max` the oldest go first.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRIES_MAX = 2048  # of about a KiB each


class TtlCache(Generic[K, V]):
    """Each value for `seconds` since it was put. For one thread."""

    def __init__(self, seconds: float, entries_max: int = ENTRIES_MAX) -> None:
        self._seconds = seconds
        self._entries_max = entries_max
        self._held: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def get(self, key: K) -> V | None:
        found = self._held.get(key)
        return found[0] if found is not None and found[1] > time.monotonic() else None

    def put(self, key: K, value: V) -> V:
        self._held.pop(key, None)
        self._held[key] = (value, time.monotonic() + self._seconds)
        if len(self._held) > self._entries_max:
            self._held.popitem(last=False)
        return value

    def forget(self, which: Callable[[V], bool]) -> None:
        """Give out none of these any more."""
        for key in [key for key, (value, _) in self._held.items() if which(value)]:
            del self._held[key]
