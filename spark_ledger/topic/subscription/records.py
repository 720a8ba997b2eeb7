"""The records of a topic's subscriptions in the metadata store (JSON, readable with any client),
their changes, and the rows that they hold against retention. Pure.

    /topic-ids/<id>/subscriptions                     {}; its version counts changes for trims
    /topic-ids/<id>/subscriptions/<name>              the subscription
    /topic-ids/<id>/subscriptions/<name>/marks/<n>    its positions when the mark was made
    /topic-ids/<id>/subscriptions/<name>/shares/<b>   positions of consumers at broker b

Always true: a position is the first offset that is not consumed. `floor` is never above the
subscription's position; in a partition that `floor` leaves out the position may be any, so all rows
of this partition are held. A record of a later version, or malformed bytes, raise
errors.UnsupportedFormat. docs/topics.md ("Subscriptions") shows the records. Earlier versions named
cursor ledgers of another form "ledger". They ignore a ledger that is named "entries", and go by the
floor.

    (absent) -> LIVE epoch 1           a query creates and opens it
    (absent) -> RELEASED epoch 0       a user creates it, or a query that has no id yet
    LIVE or RELEASED -> LIVE epoch+1   its own query opens it (at once), or another query once its
                                       owner is gone or released it; else LEDGER_SUBSCRIPTION.BUSY
    LIVE -> LIVE, same epoch           its owner moves the position or the cursor ledger
    LIVE -> RELEASED, same epoch       its owner is done
    any -> RELEASED epoch+1            a user seeks; only by force if its owner is alive

A subscription goes from a query to Pulsar's consumers and back in the same way: the new owner sets
its kind, and its position stays the same. What consumers acknowledged beyond the position of the
query that follows them stays acknowledged: `acked_by` names the state in the ack ledgers, until
consumers use the subscription again.

Only the owner of the current epoch writes without raising the epoch, so an earlier owner reads
another epoch and writes nothing more. A position goes back only together with a new version of the
subscriptions' node, which every trim checks (hazard 37).

A mark has the positions of a subscription at a time of the store's clock, at which the mark's node
was made. A mark is made with the subscription, whenever the subscription goes back, and now and
then by a process that reads the holds. Between two marks a subscription only goes forward. So since
`now - grace` its position was never below the lowest of these: the newest mark that is older than
`now - grace`, the later marks, and the present position. This lowest position is held (hazard 38).
Marks before the newest older mark are removed, but this mark is not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from types import MappingProxyType
from typing import Any

from spark_ledger import errors
from spark_ledger.topic.log.records import FIRST_VERSION, load

POSITIONS_BYTES_MAX = 64 * 1024
"""The longest JSON of positions in one node: about 4,000 partitions. Longer positions are left out
of the node: the cursor ledger has them, and the subscription holds all rows of its partitions."""

Positions = Mapping[int, int]
"""By partition the first offset that is not consumed."""
NO_PROPERTIES: Mapping[str, str] = MappingProxyType({})
PROPERTIES_BYTES_MAX = 16 << 10
"""How many bytes the names and values of a subscription's properties may take."""


def check_properties(properties: Mapping[str, str]) -> None:
    """Raises errors.OptionInvalid if the properties are too large to be kept."""
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if size > PROPERTIES_BYTES_MAX:
        raise errors.OptionInvalid(
            f"the properties of a subscription take {size} bytes, at most {PROPERTIES_BYTES_MAX}"
            " are kept"
        )


class SubscriptionKind(Enum):
    QUERY = "query"
    CONSUMER = "consumer"


class SubscriptionLife(Enum):
    LIVE = "live"  # the owner opened the subscription and did not release it; it may have died
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """`epoch` counts the owners. `owner` is the random token of the present owner (after a release:
    of the last owner); `query_id`, `run_id` and `intent` identify the owner, "" if there was no
    owner yet. The first two are "" too after another process moved the subscription. `ledger_id` is
    the cursor ledger whose last entry has the position, if this is after `floor`; None: the
    position is `floor`. `partitions` are the partitions that the owner reads (None: all).
    `acked_by`: the token and epoch under which ack ledgers have what consumers acknowledged before
    the query came; None: nothing beyond the position."""

    kind: SubscriptionKind
    epoch: int = 0
    life: SubscriptionLife = SubscriptionLife.RELEASED
    query_id: str = ""
    run_id: str = ""
    owner: str = ""
    intent: str = ""
    ledger_id: int | None = None
    floor: Positions = field(default_factory=dict)
    partitions: tuple[int, ...] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    acked_by: tuple[str, int] | None = None

    @property
    def live(self) -> bool:
        return self.life is SubscriptionLife.LIVE


@dataclass(frozen=True, slots=True)
class SubscriptionShare:
    """The positions of a subscription's consumers at one broker. A share counts while the
    subscription has the share's `epoch`. `used`: consumers are connected at the broker. `at`: by
    partition the epoch of the partition's owner, and the position; of two shares the share with the
    higher owner's epoch counts. `used_ms`: consumers used the subscription before this time, and no
    consumer did since; the broker opened the subscription itself. None: when the node was written
    last."""

    epoch: int
    used: bool
    at: Mapping[int, tuple[int, int]]
    used_ms: int | None = None


def with_shares(
    floor: Positions, epoch: int, shares: Iterable[SubscriptionShare]
) -> dict[int, int]:
    """The positions of a subscription whose record has this floor and epoch."""
    best = newest(epoch, shares)
    return {**floor, **{partition: offset for partition, (_, offset) in best.items()}}


def in_every_partition(
    record: SubscriptionRecord, positions: Positions, starts: Positions
) -> dict[int, int]:
    """The positions of a subscription in all partitions that it reads. In a partition that the
    topic got later it is at the first row kept, `starts`. Without any position none is known."""
    if record.partitions is not None or not positions:
        return dict(positions)
    return {**starts, **positions}


def newest(epoch: int, shares: Iterable[SubscriptionShare]) -> dict[int, tuple[int, int]]:
    """By partition the owner's epoch and position that count among the shares."""
    best: dict[int, tuple[int, int]] = {}
    for share in shares:
        if share.epoch == epoch:
            for partition, at in share.at.items():
                best[partition] = max(at, best.get(partition, at))
    return best


_TEXTS = ("query_id", "run_id", "owner", "intent")


def fits(positions: Positions) -> bool:
    """Whether the positions may be kept in a node."""
    return len(json.dumps(_plain(positions), separators=(",", ":"))) <= POSITIONS_BYTES_MAX


def fitting(positions: dict[int, int]) -> dict[int, int]:
    """The positions. Raises errors.OptionInvalid if they do not fit into a node."""
    if not fits(positions):
        raise errors.OptionInvalid(
            f"the positions of {len(positions)} partitions do not fit into one record",
            "Let the query that uses the subscription move it.",
        )
    return positions


def encode_subscriptions() -> bytes:
    return _dump({})


def encode_subscription(record: SubscriptionRecord) -> bytes:
    plain: dict[str, Any] = {name: getattr(record, name) for name in _TEXTS}
    plain |= {
        "kind": record.kind.value,
        "epoch": record.epoch,
        "state": record.life.value,
        "cursor": {"ledger": None, "floor": _plain(record.floor)},
    }
    if record.ledger_id is not None:
        plain["cursor"]["entries"] = record.ledger_id
    if record.partitions is not None:
        plain["partitions"] = list(record.partitions)
    if record.properties:
        plain["properties"] = dict(record.properties)
    if record.acked_by is not None:
        plain["acked_by"] = list(record.acked_by)
    return _dump(plain)


def decode_subscription(value: bytes) -> SubscriptionRecord:
    def build(plain: dict[str, Any]) -> SubscriptionRecord:
        cursor, partitions = plain["cursor"], plain.get("partitions")
        acked_by = plain.get("acked_by")
        ledger = cursor.get("entries", cursor["ledger"])
        return SubscriptionRecord(
            kind=SubscriptionKind(plain["kind"]),
            epoch=int(plain["epoch"]),
            life=SubscriptionLife(plain["state"]),
            ledger_id=None if ledger is None else int(ledger),
            floor=_positions(cursor["floor"]),
            partitions=None if partitions is None else tuple(int(p) for p in partitions),
            properties={str(k): str(v) for k, v in plain.get("properties", {}).items()},
            acked_by=None if acked_by is None else _acked_by(*acked_by),
            **{name: str(plain[name]) for name in _TEXTS},
        )

    return load(value, "subscription", build)


def encode_mark(positions: Positions) -> bytes:
    return _dump({"positions": _plain(positions)})


def decode_mark(value: bytes) -> dict[int, int]:
    return load(value, "subscription's mark", lambda plain: _positions(plain["positions"]))


def encode_share(share: SubscriptionShare) -> bytes:
    at = {str(partition): list(share.at[partition]) for partition in sorted(share.at)}
    used_ms = {} if share.used_ms is None else {"used_ms": share.used_ms}
    return _dump({"epoch": share.epoch, "used": share.used, "at": at, **used_ms})


def decode_share(value: bytes) -> SubscriptionShare:
    def build(plain: dict[str, Any]) -> SubscriptionShare:
        at = {int(p): (int(epoch), int(offset)) for p, (epoch, offset) in plain["at"].items()}
        used_ms = plain.get("used_ms")
        return SubscriptionShare(
            int(plain["epoch"]), bool(plain["used"]), at, None if used_ms is None else int(used_ms)
        )

    return load(value, "subscription's share", build)


def _acked_by(token: str, epoch: int) -> tuple[str, int]:
    return str(token), int(epoch)


def _plain(positions: Positions) -> dict[str, int]:
    return {str(partition): positions[partition] for partition in sorted(positions)}


def _positions(plain: Mapping[str, Any]) -> dict[int, int]:
    return {int(partition): int(offset) for partition, offset in plain.items()}


def _dump(plain: Mapping[str, Any]) -> bytes:
    versions = {"min_reader": FIRST_VERSION, "min_writer": FIRST_VERSION}
    return json.dumps({**versions, **plain}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to own a subscription. `owner` is a random token that only this claim has. A broker
    makes a claim of kind CONSUMER, for Pulsar's consumers of the subscription."""

    query_id: str
    run_id: str
    owner: str
    intent: str = ""
    partitions: tuple[int, ...] | None = None
    kind: SubscriptionKind = SubscriptionKind.QUERY


def created(claim: Claim, positions: Positions) -> SubscriptionRecord:
    """The record of a subscription that its first owner makes."""
    return SubscriptionRecord(
        claim.kind,
        1,
        SubscriptionLife.LIVE,
        *(claim.query_id, claim.run_id, claim.owner, claim.intent),
        floor=storable(positions),
        partitions=claim.partitions,
    )


def busy(name: str, record: SubscriptionRecord) -> errors.SubscriptionBusy:
    return errors.SubscriptionBusy(
        f"subscription '{name}' is used by query {record.query_id}, run {record.run_id}",
        subscription=name,
        query_id=record.query_id,
        run_id=record.run_id,
    )


def too_many(name: str) -> errors.OptionInvalid:
    """The error for a subscription that consumers cannot use, because its positions do not fit into
    the nodes."""
    return errors.OptionInvalid(
        f"the positions of subscription '{name}' do not fit into one record: the topic has too many"
        " partitions (some 4,000 fit)",
        "Begin at the earliest message, with another name, or read the topic by a query.",
        subscription=name,
    )


def taken(record: SubscriptionRecord, claim: Claim) -> SubscriptionRecord:
    """The record after the claim took the subscription; the position stays as the earlier owner
    wrote it."""
    return replace(
        record,
        kind=claim.kind,
        epoch=record.epoch + 1,
        life=SubscriptionLife.LIVE,
        query_id=claim.query_id,
        run_id=claim.run_id,
        owner=claim.owner,
        intent=claim.intent,
        partitions=claim.partitions,
    )


def sought(record: SubscriptionRecord, owner: str, positions: Positions) -> SubscriptionRecord:
    """The record after another process than the owner set these positions, which a node may not
    take (cursor_ledger.storable_record); the owner loses the subscription. No query has it then, so
    the query that had it sees that it was moved. Raises errors.OptionInvalid for positions of
    consumers that do not fit."""
    is_of_query = record.kind is SubscriptionKind.QUERY
    floor = dict(positions) if is_of_query else fitting(dict(positions))
    return replace(
        record,
        epoch=record.epoch + 1,
        life=SubscriptionLife.RELEASED,
        query_id="",
        run_id="",
        owner=owner,
        ledger_id=None,
        floor=floor,
        acked_by=None,
    )


def has_acks(record: SubscriptionRecord) -> bool:
    """Whether ack ledgers may have rows that the subscription acknowledged."""
    return record.kind is SubscriptionKind.CONSUMER or record.acked_by is not None


def inline(record: SubscriptionRecord, positions: Positions) -> SubscriptionRecord:
    """The record with these positions, which must fit, and without a cursor ledger."""
    assert fits(positions), "positions that do not fit stay in a cursor ledger"
    return replace(record, ledger_id=None, floor=dict(positions))


def storable(positions: Positions) -> dict[int, int]:
    """The positions that a node keeps: all; or none if they are too many, so that all rows are
    held."""
    return dict(positions) if fits(positions) else {}


def goes_back(positions: Positions, since: Positions) -> bool:
    """Whether a partition is below its position in `since`; a partition missing there counts as at
    its first row."""
    return any(offset < since.get(p, 0) for p, offset in positions.items())


def later(left: Positions, right: Positions) -> dict[int, int]:
    """By partition the higher of the two positions."""
    return {**left, **{p: max(offset, left.get(p, 0)) for p, offset in right.items()}}


def earlier(left: Positions, right: Positions) -> dict[int, int]:
    """By partition the lower of the two positions, without partitions that are missing on a
    side."""
    return {p: min(left[p], right[p]) for p in left if p in right}


def clipped(positions: Positions, starts: Positions) -> dict[int, int]:
    """The positions, each raised to the first row that is kept."""
    return {p: max(offset, starts.get(p, 0)) for p, offset in positions.items()}


def held_offsets(
    record: SubscriptionRecord, since: Positions, partitions: int
) -> Mapping[int, int]:
    """By partition the first offset that a subscription holds, if its lowest positions in the grace
    period are `since`. It holds no rows of a partition that it does not read."""
    read = range(partitions) if record.partitions is None else record.partitions
    return {p: since.get(p, 0) for p in read}


MARKS_PER_GRACE = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """The subscription's positions at `created_ms`, by the store's clock."""

    number: int
    created_ms: int
    positions: Positions


@dataclass(frozen=True, slots=True)
class LowestPositions:
    """The lowest positions of the grace period; in a missing partition the position may have been
    any. `forget` are the numbers of marks that do not count any more; `add` is the number of a mark
    to make now (None: make no mark)."""

    positions: Positions
    forget: tuple[int, ...] = ()
    add: int | None = None


def lowest_positions(
    marks: Sequence[Mark], floor: Positions, now_ms: int, grace_ms: int
) -> LowestPositions:
    """The lowest positions since `now_ms - grace_ms`, by the store's clock. `marks` are in the
    order in which they were made; `floor` is at or before the present positions. Without a mark the
    earlier positions are unknown, and all rows are held."""
    if not marks:
        return LowestPositions({}, add=0)
    old = [at for at, mark in enumerate(marks) if mark.created_ms <= now_ms - grace_ms]
    base = old[-1] if old else 0
    counted = [mark.positions for mark in marks[base:]]
    newest = marks[-1]
    due = now_ms - newest.created_ms >= grace_ms // MARKS_PER_GRACE
    add = newest.number + 1 if due and dict(newest.positions) != dict(floor) else None
    return LowestPositions(
        reduce(earlier, counted, floor),
        tuple(mark.number for mark in marks[:base]),
        add,
    )


def needed_before_going_back(marks: Sequence[Mark], positions: Positions) -> int | None:
    """The number of the mark that a step back to `positions` must make; None if the newest mark is
    already as low."""
    newest = marks[-1]
    lowest = earlier(newest.positions, positions)
    return None if lowest == dict(newest.positions) else newest.number + 1
