"""The actions of a commit on a topic, as values and as JSON.

Always true: an action has absolute offsets only of rows that it takes away or replaces, not of rows
that it adds, so a committer that loses the race for a number commits the action unchanged under the
next number. An action that this version does not know is an error, never skipped (hazard 17).
draft.py decides whether an action may follow on a state; state.py carries the action out.
docs/topics.md shows each action.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import NO_ROWLESS, Rowless
from spark_ledger.topic.log import segments
from spark_ledger.topic.log.segments import CommitTimes, CommitTokens, Segment

Ledgers = tuple[int, ...]
ANY_OPENING = -1


@dataclass(frozen=True, slots=True)
class Append:
    """Adds segments, in this order, at the end of their partitions. May follow on every state."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """From now on offsets [start, end) of a partition are in `segments`, which hold the same rows
    (a merge of small segments). `snapshot`: the commits below this number were folded when the
    action was planned; later commits may only have appended to the partition, or trimmed rows
    before `start`. `dropped` are the ledgers that held these rows. `committed` has for each segment
    the commit times of its rows (the store's clock), which a merge does not change; if `committed`
    is empty, the rows have the time of this commit. `tokens` has for each segment the tokens of the
    commits that made its rows; if `tokens` is empty, the tokens are not known."""

    partition: int
    start: int
    end: int
    segments: tuple[Segment, ...]
    snapshot: int
    dropped: Ledgers = ()
    committed: tuple[CommitTimes, ...] = ()
    tokens: tuple[CommitTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Trim:
    """Takes away the rows below the offset of each (partition, offset). Start offsets only rise: an
    offset at or below the partition's start offset changes nothing."""

    offsets: tuple[tuple[int, int], ...]
    dropped: Ledgers = ()


@dataclass(frozen=True, slots=True)
class Hole:
    """Takes away the rows [start, end) of a partition; the later rows keep their offsets."""

    partition: int
    start: int
    end: int
    dropped: Ledgers = ()


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Takes away all rows and adds `segments`, in one step; the new rows have later offsets than
    the old rows. Refused if another app committed rows at or after commit number `snapshot`."""

    segments: tuple[Segment, ...]
    snapshot: int
    dropped: Ledgers = ()


@dataclass(frozen=True, slots=True)
class Grow:
    """The topic has this number of partitions from now on, more than before."""

    partitions: int


@dataclass(frozen=True, slots=True)
class OpenLive:
    """From now on the partition ends in a live segment: the entries from `first_entry` on of a
    ledger that `owner` appends to. `deduplicated`, `rows_before` and `bytes_before` as in
    LiveSegment."""

    partition: int
    ledger_id: int
    metadata_version: int
    owner: str
    epoch: int
    deduplicated: bool = False
    first_entry: int = 0
    rows_before: int = 0
    bytes_before: int = 0


@dataclass(frozen=True, slots=True)
class SealLive:
    """Ends the live segment that commit `opened` began in this ledger (ANY_OPENING: the only live
    segment that the ledger had). `segment` has the rows of the live segment (None: it has no rows):
    the rows that the owner counted after it stopped, or the rows up to the end in the ledger's
    CLOSED record. For a deduplicated live segment `producers` has the producers of the messages, by
    name, each with its last sequence id in the segment; the producer that sent last is at the end.
    `rowless` are the offsets of the segment that have no row, counted from the segment's first
    offset: of a message in chunks only the last chunk has a row."""

    partition: int
    ledger_id: int
    segment: Segment | None
    producers: tuple[tuple[str, int], ...] = ()
    opened: int = ANY_OPENING
    rowless: Rowless = NO_ROWLESS


@dataclass(frozen=True, slots=True)
class Terminate:
    """The topic takes no more rows; it can be read, trimmed, merged and deleted."""


Action = Append | Replace | Trim | Hole | Overwrite | Grow | OpenLive | SealLive | Terminate


def segments_of(action: Action) -> tuple[Segment, ...]:
    """The segments that the action adds."""
    if isinstance(action, SealLive):
        return () if action.segment is None else (action.segment,)
    if isinstance(action, Append | Replace | Overwrite):
        return action.segments
    return ()


RowsOfTopics = Mapping[str, frozenset[int]]
"""By topic id the partitions that get rows."""

CheckQuotas = Callable[[RowsOfTopics], Awaitable[None]]
"""Raises an error if the backlog quota of a partition refuses more rows."""


def adds_rows(action: Action) -> bool:
    """Whether the action adds rows, or lets an owner add rows: a terminated topic refuses such an
    action."""
    return isinstance(action, Append | Overwrite | OpenLive)


def dropped_of(action: Action) -> Ledgers:
    """The ledgers from which the action takes rows away, in the state from which the action was
    planned. Segments may still refer to some of these ledgers after the action."""
    if isinstance(action, Replace | Trim | Hole | Overwrite):
        return action.dropped
    return ()


def to_json(action: Action) -> dict[str, Any]:
    return {"action": _NAMES[type(action)], **_TO_JSON[type(action)](action)}


def name_of(action: Action) -> str:
    """The action's name in a commit."""
    return _NAMES[type(action)]


def from_json(plain: Mapping[str, Any]) -> Action:
    """Raises errors.UnsupportedFormat for an action that this version does not know; KeyError,
    TypeError or ValueError if `plain` is not an action."""
    build = _FROM_JSON.get(plain["action"])
    if build is None:
        raise errors.UnsupportedFormat(f"a commit holds the unknown action '{plain['action']}'")
    return build(plain)


_NAMES: dict[type, str] = {
    Append: "append",
    Replace: "replace",
    Trim: "trim",
    Hole: "hole",
    Overwrite: "overwrite",
    Grow: "grow",
    OpenLive: "open",
    SealLive: "seal",
    Terminate: "terminate",
}

_TO_JSON: dict[type, Callable[[Any], dict[str, Any]]] = {
    Append: lambda a: {"segments": _segments(a.segments)},
    Replace: lambda a: {
        "partition": a.partition,
        "rows": [a.start, a.end],
        "segments": _segments(a.segments),
        "snapshot": a.snapshot,
        "dropped": list(a.dropped),
        "committed": [[list(run) for run in times] for times in a.committed],
        **({"tokens": [[list(run) for run in runs] for runs in a.tokens]} if a.tokens else {}),
    },
    Trim: lambda a: {
        "offsets": {str(partition): offset for partition, offset in a.offsets},
        "dropped": list(a.dropped),
    },
    Hole: lambda a: {
        "partition": a.partition,
        "rows": [a.start, a.end],
        "dropped": list(a.dropped),
    },
    Overwrite: lambda a: {
        "segments": _segments(a.segments),
        "snapshot": a.snapshot,
        "dropped": list(a.dropped),
    },
    Grow: lambda a: {"partitions": a.partitions},
    OpenLive: lambda a: {
        "partition": a.partition,
        "ledger": a.ledger_id,
        "version": a.metadata_version,
        "owner": a.owner,
        "epoch": a.epoch,
        **({"deduplicated": True} if a.deduplicated else {}),
        **({"after": [a.first_entry, a.rows_before, a.bytes_before]} if a.first_entry else {}),
    },
    SealLive: lambda a: {
        "partition": a.partition,
        "ledger": a.ledger_id,
        "segment": None if a.segment is None else segments.to_json(a.segment),
        **({"producers": [list(pair) for pair in a.producers]} if a.producers else {}),
        **({"rowless": list(a.rowless)} if a.rowless.number else {}),
        **({"opened": a.opened} if a.opened != ANY_OPENING else {}),
    },
    Terminate: lambda a: {},
}

_FROM_JSON: dict[str, Callable[[Mapping[str, Any]], Action]] = {
    "append": lambda plain: Append(_segments_of_json(plain)),
    "replace": lambda plain: Replace(
        plain["partition"],
        int(plain["rows"][0]),
        int(plain["rows"][1]),
        _segments_of_json(plain),
        plain["snapshot"],
        tuple(plain["dropped"]),
        _runs_of_json(plain.get("committed", ())),
        _runs_of_json(plain.get("tokens", ())),
    ),
    "trim": lambda plain: Trim(
        tuple(sorted((int(p), int(offset)) for p, offset in plain["offsets"].items())),
        tuple(plain["dropped"]),
    ),
    "hole": lambda plain: Hole(
        plain["partition"],
        int(plain["rows"][0]),
        int(plain["rows"][1]),
        tuple(plain["dropped"]),
    ),
    "overwrite": lambda plain: Overwrite(
        _segments_of_json(plain), plain["snapshot"], tuple(plain["dropped"])
    ),
    "grow": lambda plain: Grow(int(plain["partitions"])),
    "open": lambda plain: _open_of_json(plain),
    "seal": lambda plain: SealLive(
        plain["partition"],
        plain["ledger"],
        None if plain["segment"] is None else segments.from_json(plain["segment"]),
        tuple((str(name), int(last)) for name, last in plain.get("producers", ())),
        int(plain.get("opened", ANY_OPENING)),
        Rowless(*map(int, plain.get("rowless", NO_ROWLESS))),
    ),
    "terminate": lambda plain: Terminate(),
}


def _open_of_json(plain: Mapping[str, Any]) -> OpenLive:
    first_entry, rows_before, bytes_before = map(int, plain.get("after", (0, 0, 0)))
    segments.check_rows_before(first_entry, rows_before)
    return OpenLive(
        *(plain["partition"], plain["ledger"], plain["version"], plain["owner"], plain["epoch"]),
        bool(plain.get("deduplicated", False)),
        *(first_entry, rows_before, bytes_before),
    )


def _runs_of_json(
    plain: Sequence[Sequence[Sequence[int]]],
) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple((int(rows), int(value)) for rows, value in runs) for runs in plain)


def _segments(added: tuple[Segment, ...]) -> list[dict[str, Any]]:
    return [segments.to_json(segment) for segment in added]


def _segments_of_json(plain: Mapping[str, Any]) -> tuple[Segment, ...]:
    return tuple(segments.from_json(segment) for segment in plain["segments"])
