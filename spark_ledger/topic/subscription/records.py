"""The records of a topic's subscriptions in the metadata store: JSON, readable with any client.

    /topic-ids/<id>/subscriptions                     {}; its version counts what a trim must know
    /topic-ids/<id>/subscriptions/<name>              the subscription
    /topic-ids/<id>/subscriptions/<name>/marks/<n>    where it was when the mark was made
    /topic-ids/<id>/subscriptions/<name>/shares/<b>   where consumers at broker b are

Always true: a position is the first offset that is not consumed; `floor` is never above where the
subscription is, and a partition it leaves out may be anywhere: all of it is held. A record of a
later version, or bytes that are no such record, raise errors.UnsupportedFormat.
docs/topics.md ("Subscriptions") shows them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

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
