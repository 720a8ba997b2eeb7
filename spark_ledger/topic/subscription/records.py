"""The records of a topic's subscriptions in the metadata store (JSON, readable with any client),
what may become of one, and what it holds against retention. Pure.

    /topic-ids/<id>/subscriptions                     {}; its version counts what a trim must know
    /topic-ids/<id>/subscriptions/<name>              the subscription
    /topic-ids/<id>/subscriptions/<name>/marks/<n>    where it was when the mark was made
    /topic-ids/<id>/subscriptions/<name>/shares/<b>   where consumers at broker b are

Always true: a position is the first offset that is not consumed; `floor` is never above where the
subscription is, and a partition it leaves out may be anywhere: all of it is held. A record of a
later version, or bytes that are no such record, raise errors.UnsupportedFormat.
docs/topics.md ("Subscriptions") shows them.

    (absent) -> LIVE epoch 1           a query creates and opens it
    (absent) -> RELEASED epoch 0       somebody creates it, or a query that has no id yet
    LIVE or RELEASED -> LIVE epoch+1   its own query opens it (at once), or another one when its
                                       owner is gone or released it; else LEDGER_SUBSCRIPTION.BUSY
    LIVE -> LIVE, same epoch           its owner moves the position or the cursor ledger
    LIVE -> RELEASED, same epoch       its owner is done
    any -> RELEASED epoch+1            somebody seeks; of one with a living owner only by force

It goes from a query to Pulsar's consumers and back in the same way: who takes it over says of which
kind it is from then on, and it stays where it is.

Only the owner of the current epoch writes without raising it, so who was overtaken
finds another epoch and writes nothing more; a position goes back only together with a new version
of the subscriptions' node, which every trim checks (hazard 37).

A mark says where a subscription was at a time, by the store's clock (the mark node's own): one is
made with the subscription, one whenever it goes back, one now and then by who asks what is held.
Between two marks a subscription only goes forward; so what it may have been at since
`now - grace` is never below the newest mark that is older than that, the marks after it and where
it is now, and the lowest of these is held (hazard 38). Older marks are forgotten, never that one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from typing import Any

from spark_ledger import errors
from spark_ledger.topic.log.records import FIRST_VERSION, load

POSITIONS_BYTES_MAX = 64 * 1024
"""Longest JSON of positions in one node: about 4,000 partitions. Longer ones are left out of the
node: the cursor ledger has them, and the subscription holds all rows of its partitions."""

Positions = Mapping[int, int]
"""By partition the first offset that is not consumed."""


class SubscriptionKind(Enum):
    QUERY = "query"
    CONSUMER = "consumer"


class SubscriptionLife(Enum):
    LIVE = "live"  # its owner opened it and did not release it; it may have died
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """`epoch` counts the owners; `owner` is the random token of the one that is (or was, once it is
    released), `query_id`, `run_id` and `intent` say who that is, "" where nobody was yet.
    `ledger_id` is the cursor ledger whose last entry says where the subscription is, if that is
    beyond `floor`; None: it is at `floor`. `partitions` are those it reads, None: all of them."""

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

    @property
    def live(self) -> bool:
        return self.life is SubscriptionLife.LIVE


@dataclass(frozen=True, slots=True)
class Share:
    """What one broker knows of where a subscription's consumers are. It counts while the
    subscription is of `epoch`. `used`: consumers are connected there. `at`: by partition the epoch
    of its owner, and the position then; of two shares the one of the higher owner's epoch counts.
    """

    epoch: int
    used: bool
    at: Mapping[int, tuple[int, int]]


def with_shares(floor: Positions, epoch: int, shares: Iterable[Share]) -> dict[int, int]:
    """Where a subscription is whose record has that floor and epoch."""
    best = newest(epoch, shares)
    return {**floor, **{partition: offset for partition, (_, offset) in best.items()}}


def newest(epoch: int, shares: Iterable[Share]) -> dict[int, tuple[int, int]]:
    """By partition what counts of the shares."""
    found: dict[int, tuple[int, int]] = {}
    for share in shares:
        if share.epoch == epoch:
            for partition, at in share.at.items():
                found[partition] = max(at, found.get(partition, at))
    return found


_TEXTS = ("query_id", "run_id", "owner", "intent")


def fits(positions: Positions) -> bool:
    """Whether the positions may be kept in a node."""
    return len(json.dumps(_plain(positions), separators=(",", ":"))) <= POSITIONS_BYTES_MAX


def encode_subscriptions() -> bytes:
    return _dump({})


def encode_subscription(record: SubscriptionRecord) -> bytes:
    plain: dict[str, Any] = {name: getattr(record, name) for name in _TEXTS}
    plain |= {
        "kind": record.kind.value,
        "epoch": record.epoch,
        "state": record.life.value,
        "cursor": {"ledger": record.ledger_id, "floor": _plain(record.floor)},
    }
    if record.partitions is not None:
        plain["partitions"] = list(record.partitions)
    return _dump(plain)


def decode_subscription(value: bytes) -> SubscriptionRecord:
    def build(plain: dict[str, Any]) -> SubscriptionRecord:
        cursor, partitions = plain["cursor"], plain.get("partitions")
        ledger = cursor["ledger"]
        return SubscriptionRecord(
            kind=SubscriptionKind(plain["kind"]),
            epoch=int(plain["epoch"]),
            life=SubscriptionLife(plain["state"]),
            ledger_id=None if ledger is None else int(ledger),
            floor=_positions(cursor["floor"]),
            partitions=None if partitions is None else tuple(int(p) for p in partitions),
            **{name: str(plain[name]) for name in _TEXTS},
        )

    return load(value, "subscription", build)


def encode_mark(positions: Positions) -> bytes:
    return _dump({"positions": _plain(positions)})


def decode_mark(value: bytes) -> dict[int, int]:
    return load(value, "subscription's mark", lambda plain: _positions(plain["positions"]))


def encode_share(share: Share) -> bytes:
    at = {str(partition): list(share.at[partition]) for partition in sorted(share.at)}
    return _dump({"epoch": share.epoch, "used": share.used, "at": at})


def decode_share(value: bytes) -> Share:
    def build(plain: dict[str, Any]) -> Share:
        at = {int(p): (int(epoch), int(offset)) for p, (epoch, offset) in plain["at"].items()}
        return Share(int(plain["epoch"]), bool(plain["used"]), at)

    return load(value, "subscription's share", build)


def _plain(positions: Positions) -> dict[str, int]:
    return {str(partition): positions[partition] for partition in sorted(positions)}


def _positions(plain: Mapping[str, Any]) -> dict[int, int]:
    return {int(partition): int(offset) for partition, offset in plain.items()}


def _dump(plain: Mapping[str, Any]) -> bytes:
    versions = {"min_reader": FIRST_VERSION, "min_writer": FIRST_VERSION}
    return json.dumps({**versions, **plain}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to own a subscription. `owner` is a random token of this very claim. A claim of kind
    CONSUMER is a broker's, for Pulsar's consumers of that name."""

    query_id: str
    run_id: str
    owner: str
    intent: str = ""
    partitions: tuple[int, ...] | None = None
    kind: SubscriptionKind = SubscriptionKind.QUERY


def created(claim: Claim, positions: Positions) -> SubscriptionRecord:
    """A subscription that its first owner makes."""
    return SubscriptionRecord(
        claim.kind,
        1,
        SubscriptionLife.LIVE,
        *(claim.query_id, claim.run_id, claim.owner, claim.intent),
        floor=stored(positions),
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
    """Consumers cannot have it: where they would be has no room in the nodes."""
    return errors.OptionInvalid(
        f"the positions of subscription '{name}' do not fit into one record: the topic has too many"
        " partitions (some 4,000 fit)",
        "Begin at the earliest message, with another name, or read the topic by a query.",
        subscription=name,
    )


def taken(record: SubscriptionRecord, claim: Claim) -> SubscriptionRecord:
    """In the hands of the claim: what the owner before had written still says where it is."""
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
    """Put to these positions by a process that does not own it; its owner loses it."""
    released = SubscriptionLife.RELEASED
    floor = stored(positions)
    moved = replace(record, owner=owner, life=released, ledger_id=None, floor=floor)
    return replace(moved, epoch=record.epoch + 1)


def inline(record: SubscriptionRecord, positions: Positions) -> SubscriptionRecord:
    """At these positions, without a cursor ledger; they must fit."""
    assert fits(positions), "positions that do not fit stay in a cursor ledger"
    return replace(record, ledger_id=None, floor=dict(positions))


def stored(positions: Positions) -> dict[int, int]:
    """What a node keeps of the positions: all, or, where that is too much, none (all is held)."""
    return dict(positions) if fits(positions) else {}


def goes_back(positions: Positions, since: Positions) -> bool:
    """Whether some partition is below where it was; one that was not there is at its first row."""
    return any(offset < since.get(p, 0) for p, offset in positions.items())


def later(one: Positions, other: Positions) -> dict[int, int]:
    """By partition the higher of the two."""
    return {**one, **{p: max(offset, one.get(p, 0)) for p, offset in other.items()}}


def earlier(one: Positions, other: Positions) -> dict[int, int]:
    """By partition the lower of the two; of a partition that only one has, nothing is known."""
    return {p: min(one[p], other[p]) for p in one if p in other}


def clipped(positions: Positions, starts: Positions) -> dict[int, int]:
    """None of them below the first row that is kept."""
    return {p: max(offset, starts.get(p, 0)) for p, offset in positions.items()}


def held_by(record: SubscriptionRecord, since: Positions, partitions: int) -> Mapping[int, int]:
    """From which offset on each of the topic's partitions is held, by a subscription that was at
    `since` in the time that counts; a partition that it does not read is not held."""
    read = range(partitions) if record.partitions is None else record.partitions
    return {p: since.get(p, 0) for p in read}


MARKS_PER_GRACE = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the subscription was at `created_ms`, by the store's clock."""

    number: int
    created_ms: int
    positions: Positions


@dataclass(frozen=True, slots=True)
class Held:
    """The lowest positions of the grace period; a partition left out may have been anywhere.
    `forget` are marks that count no more, `add` the number of a mark to make now (None: none)."""

    positions: Positions
    forget: tuple[int, ...] = ()
    add: int | None = None


def held(marks: Sequence[Mark], floor: Positions, now_ms: int, grace_ms: int) -> Held:
    """`marks` as they were made, `floor` where the subscription is or was lately, `now_ms` by the
    store's clock. Without a mark nothing is known of the time before, and all is held."""
    if not marks:
        return Held({}, add=0)
    old = [at for at, mark in enumerate(marks) if mark.created_ms <= now_ms - grace_ms]
    base = old[-1] if old else 0
    counted = [mark.positions for mark in marks[base:]]
    newest = marks[-1]
    due = now_ms - newest.created_ms >= grace_ms // MARKS_PER_GRACE
    add = newest.number + 1 if due and dict(newest.positions) != dict(floor) else None
    return Held(
        reduce(earlier, counted, floor),
        tuple(mark.number for mark in marks[:base]),
        add,
    )


def needed_before_going_back(marks: Sequence[Mark], positions: Positions) -> int | None:
    """The number of the mark that a step back to `positions` must make, None if the newest mark
    says as much already."""
    newest = marks[-1]
    lowest = earlier(newest.positions, positions)
    return None if lowest == dict(newest.positions) else newest.number + 1
