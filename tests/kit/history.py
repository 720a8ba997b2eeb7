"""Promises about logs, reads of logs, and one judgement of both: the same in the simulation, after
kills of real processes, and for the list of exactly-once cases.

A *log* is anything with places: a topic's rows (a place is partition and offset), a ledger's
entries. A *promise* is a value that a client knows to be in the log: it was acknowledged, or is in
a commit that returned. Values are unique, so each is promised once. A *read* is the values that a
reader got, place by place.

    history = History()
    history.promised("orders", "row 7", at=3.0, lane="k1")
    history.read("orders", [((0, 0), "row 7")], begun=4.0, whole=True)
    history.check()

What `check` requires, of each log:
- *moved*: a place holds one value for ever, in every promise and every read;
- *gap*: a whole read has every offset of a partition from its first (or from its start) on;
- *lost*: a whole read has every value that was promised before it began and was not let go;
- *doubled*: no read has a value at two places;
- *unknown*: every value read was promised or attempted; an attempted value may be there or not;
- *order*: the values of a lane are in each partition in the order in which they were promised.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

NAMED_MAX = 5

Place = tuple[Any, int]
"""Partition and offset; for a ledger 0 and the entry id. Partitions of a log can be sorted."""


class HistoryBroken(AssertionError):
    """`kind` is one of the kinds above, `log` the name of the log."""

    def __init__(self, kind: str, log: str, what: str) -> None:
        super().__init__(f"{log}: {kind}: {what}")
        self.kind = kind
        self.log = log


@dataclass(frozen=True, slots=True)
class Promise:
    """`place`: the value's place, if the client learned it. Among the values of one `lane` order
    counts, by `number`."""

    at: float
    place: Place | None = None
    lane: Hashable = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """`whole`: the reader asked for the whole log; `start`: each partition begins there."""

    rows: Mapping[Place, Hashable]
    begun: float
    whole: bool
    start: int | None = None


@dataclass(slots=True)
class _Log:
    promises: dict[Hashable, Promise] = field(default_factory=dict)
    attempted: dict[Hashable, None] = field(default_factory=dict)
    gone: dict[Hashable, None] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)


class History:
    """The history of any number of logs, by name. All times are of one clock."""

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    def promised(
        self,
        log: str,
        value: Hashable,
        *,
        at: float = 0.0,
        place: Place | None = None,
        lane: Hashable = None,
    ) -> None:
        """Note that a client knows that the value is in the log: it is the next one of its
        lane."""
        promises = self._log(log).promises
        promises[value] = Promise(at, place, lane, len(promises))

    def attempted(self, log: str, values: Iterable[Hashable]) -> None:
        """Note values whose outcome no client knows: each may be there, once, or not."""
        self._log(log).attempted.update(dict.fromkeys(values))

    def let_go(self, log: str, values: Iterable[Hashable]) -> None:
        """Note values that were trimmed, replaced or deleted: a read may lack them."""
        self._log(log).gone.update(dict.fromkeys(values))

    def read(
        self,
        log: str,
        rows: Iterable[tuple[Place, Hashable]],
        *,
        begun: float = 0.0,
        whole: bool = True,
        start: int | None = None,
    ) -> None:
        """Note the rows that a reader got, which asked at `begun`. Raises HistoryBroken for a place
        that was given twice."""
        values: dict[Place, Hashable] = {}
        for place, value in rows:
            if place in values:
                raise HistoryBroken("doubled", log, f"{place} was given twice in one read")
            values[place] = value
        self._log(log).reads.append(Read(values, begun, whole, start))

    def check(self) -> None:
        """Raises HistoryBroken for the first thing that is wrong."""
        for name, log in self._logs.items():
            _check_places(name, log)
            for read in log.reads:
                _check_values(name, log, read)
                _check_order(name, log.promises, read)
                if read.whole:
                    _check_dense(name, read)

    def _log(self, name: str) -> _Log:
        return self._logs.setdefault(name, _Log())


def _check_places(name: str, log: _Log) -> None:
    first = {p.place: value for value, p in log.promises.items() if p.place is not None}
    for read in log.reads:
        for place, value in read.rows.items():
            was = first.setdefault(place, value)
            if was != value:
                what = f"{place} held {shown(was)}, and then {shown(value)}"
                raise HistoryBroken("moved", name, what)


def _check_values(name: str, log: _Log, read: Read) -> None:
    times = Counter(read.rows.values())
    doubled = [value for value, count in times.items() if count > 1]
    if doubled:
        raise HistoryBroken("doubled", name, _some(doubled))
    unknown = [v for v in times if v not in log.promises and v not in log.attempted]
    if unknown:
        raise HistoryBroken("unknown", name, _some(unknown))
    if read.whole:
        due = [v for v, promise in log.promises.items() if promise.at <= read.begun]
        lost = [v for v in due if v not in times and v not in log.gone]
        if lost:
            raise HistoryBroken("lost", name, _some(lost))


def _check_order(name: str, promises: Mapping[Hashable, Promise], read: Read) -> None:
    last: dict[Hashable, tuple[int, Hashable]] = {}
    for place in sorted(read.rows):
        value = read.rows[place]
        promise = promises.get(value)
        if promise is None or promise.lane is None:
            continue
        lane = (place[0], promise.lane)
        number, before = last.get(lane, (-1, None))
        if promise.number < number:
            raise HistoryBroken(
                "order", name, f"{shown(value)} at {place} is after {shown(before)}"
            )
        last[lane] = (promise.number, value)


def _check_dense(name: str, read: Read) -> None:
    before: Place | None = None
    for place in sorted(read.rows):
        first = before is None or before[0] != place[0]
        due = read.start if first else before[1] + 1  # type: ignore[index]
        if due is not None and place[1] != due:
            raise HistoryBroken("gap", name, f"{place} comes where offset {due} belongs")
        before = place


def _some(values: list[Hashable]) -> str:
    named = ", ".join(shown(value) for value in values[:NAMED_MAX])
    return f"{len(values)}, the first are {named}"
