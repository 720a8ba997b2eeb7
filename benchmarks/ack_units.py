"""What ledgers of acknowledgements cost, one for each partition, for each broker, and for each
subscription of a partition: the same acknowledgements in each of these units.

    python benchmarks/ack_units.py
    python benchmarks/ack_units.py --partitions 100 --subscriptions 5 --rows 1000 --seconds 15

Three bookies and ZooKeeper on this machine; this process is the owner of all partitions, with the
ledger client alone. Each subscription of each partition has acknowledged `rows` rows beyond its
position, and acknowledges 20 more a second; each ledger gets one write a second, and a snapshot
when the rule of production asks for one. Then partitions pass to another owner, one after another:
the new owner writes its epoch into the nodes that name the ledgers, fences the ledgers and reads
what it needs. Beside that ten other partitions get acknowledgements with receipts, one after
another: where their ledger was fenced, their owner makes another one, with a snapshot of all states
that stay.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyroaring import BitMap64

from benchmarks.contenders import zookeeper_pid
from benchmarks.processes import cpu_s, written_bytes
from benchmarks.subscription_costs import World, call_many, world
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import ANY_VERSION, Set
from spark_ledger.process import connect
from spark_ledger.topic.acks.entries import (
    AckEntry,
    AckFold,
    AckKey,
    AckRecord,
    AckState,
    WriteKind,
    decode,
    encode,
    state_records,
)
from spark_ledger.topic.acks.ledger import OpenAckLedger, fold_ledger

EVERY_S = 1.0
ACKED_EACH_WRITE = 20
TOKEN = "0123456789abcdef" * 2
MOVES, BESIDE = 10, 10
UNITS = ("partition", "subscription", "broker")
Place = tuple[int, int]
"""A partition and a subscription."""


class AckLedger:
    """The ledger of some subscriptions of some partitions, and the node that names it."""

    def __init__(self, store: LedgerStore, node: str, places: list[Place], rows: int) -> None:
        self.node = node
        self.keys = {
            place: AckKey(f"partition-{place[0]}/s-{place[1]}", TOKEN, 1) for place in places
        }
        rng = random.Random(node)
        self.states = {
            key: AckState(0, BitMap64(rng.sample(range(1, 4 * rows), rows)), 1)
            for key in self.keys.values()
        }
        self.moving: frozenset[AckKey] = frozenset()
        """They get no acknowledgement any more, and stay until the ledger is fenced."""
        self.made = self.adds = self.ledger_id = 0
        self._store = store
        self._ledger: OpenAckLedger | None = None
        self._next = 4 * rows

    async def begin(self) -> None:
        """A new ledger, with a snapshot; then the node names it."""
        for key in self.moving:
            self.states.pop(key, None)
        writer = await self._store.create(3, 3, 2, announce_lac=True)
        ledger = OpenAckLedger(writer, asyncio.get_running_loop().time())
        await self._append(ledger, WriteKind.SNAPSHOT, state_records(self.states))
        self.ledger_id, self._ledger, self.made = writer.ledger_id, ledger, self.made + 1
        value = str(self.ledger_id).encode()
        if self.made == 1:
            await self._store.metadata.create(self.node, value, parents=True)
        else:
            await self._store.metadata.multi([Set(self.node, value, ANY_VERSION)])

    async def write(self) -> float:
        """What came since the last write is durable; seconds."""
        began_s, changes = time.perf_counter(), []
        for key, state in self.states.items():
            if key in self.moving:
                continue
            added = BitMap64(range(self._next, self._next + 2 * ACKED_EACH_WRITE, 2))
            state.rows.update(added)
            changes.append(AckRecord(key, 1, 0, added, replaces=False))
        self._next += 2 * ACKED_EACH_WRITE
        assert self._ledger is not None
        try:
            if self._ledger.size.is_long:
                await self._append(self._ledger, WriteKind.SNAPSHOT, state_records(self.states))
            else:
                await self._append(self._ledger, WriteKind.CHANGES, changes)
        except (errors.LedgerFenced, errors.LedgerClosed):
            await self.begin()
        return time.perf_counter() - began_s

    def has(self, partition: int) -> bool:
        return any(place[0] == partition for place in self.keys)

    def moves(self, partition: int) -> dict[AckKey, AckState]:
        """What a new owner of the partition must find."""
        self.moving = frozenset(key for place, key in self.keys.items() if place[0] == partition)
        return {key: self.states[key] for key in self.moving}

    async def _append(
        self, ledger: OpenAckLedger, kind: WriteKind, records: Iterable[AckRecord]
    ) -> None:
        entries = encode(kind, 1, records, ledger.snapshot)
        self.adds += len(entries)
        await ledger.append(kind, entries)


class Read:
    """What the new owner read."""

    def __init__(self) -> None:
        self.bytes = self.entries = 0

    def decode(self, payload: bytes | memoryview) -> AckEntry:
        self.bytes, self.entries = self.bytes + len(payload), self.entries + 1
        return decode(payload)


def ledgers_of(
    store: LedgerStore, unit: str, partitions: int, subscriptions: int, rows: int
) -> list[AckLedger]:
    places = [(p, s) for p in range(partitions) for s in range(subscriptions)]
    of: Callable[[Place], object] = {
        "partition": lambda place: place[0],
        "subscription": lambda place: place,
        "broker": lambda place: "",
    }[unit]
    grouped: dict[object, list[Place]] = {}
    for place in places:
        grouped.setdefault(of(place), []).append(place)
    root = f"/benchmark-{unit}"
    return [
        AckLedger(store, f"{root}/{number}", group, rows)
        for number, group in enumerate(grouped.values())
    ]


async def take_over(
    store: LedgerStore, ledgers: list[AckLedger], partition: int
) -> tuple[float, float, Read]:
    """Seconds until the new owner has the partition's states; the share of other partitions in the
    states that it read; what it read."""
    must = {key: state for each in ledgers for key, state in each.moves(partition).items()}
    began_s, read, folds = time.perf_counter(), Read(), [AckFold() for _ in ledgers]
    await store.metadata.multi([Set(each.node, b"2", ANY_VERSION) for each in ledgers])
    await asyncio.gather(
        *(
            fold_ledger(fold, store, each.ledger_id, fence=True, decode=read.decode)
            for fold, each in zip(folds, ledgers, strict=True)
        )
    )
    took_s = time.perf_counter() - began_s
    found = {key: state.rows for fold in folds for key, state in fold.states.items()}
    assert all(found[key] == state.rows for key, state in must.items()), "all that had a receipt"
    return took_s, 1 - len(must) / len(found), read


class Cost:
    """Processor time and bytes, from its making on."""

    def __init__(self, made: World) -> None:
        self._made = made
        self._before = self._now()

    def _now(self) -> tuple[float, ...]:
        pids = [bookie.pid for bookie in self._made.cluster.bookies if bookie.pid is not None]
        return (
            time.process_time(),
            sum(map(cpu_s, pids)),
            cpu_s(zookeeper_pid(self._made.cluster)),
            sum(map(written_bytes, pids)) / 1e6,
        )

    def __str__(self) -> str:
        own, bookies, zookeeper, mb = (
            now - before for now, before in zip(self._now(), self._before, strict=True)
        )
        return (
            f"CPU-s: owner {own:.2f}, bookies {bookies:.2f}, ZooKeeper {zookeeper:.2f};"
            f" {mb:.1f} MB to the bookies' disks"
        )


async def measure(
    made: World, unit: str, partitions: int, subscriptions: int, rows: int, seconds: float
) -> None:
    store, other = [await connect(made.cluster.service_url) for _ in range(2)]
    try:
        ledgers = ledgers_of(store, unit, partitions, subscriptions, rows)
        cost, began_s, nodes, requests = (
            Cost(made),
            time.perf_counter(),
            made.nodes(),
            made.requests(),
        )
        await call_many([each.begin for each in ledgers], 32)
        took_s = time.perf_counter() - began_s
        print(f"a {unit}: {len(ledgers)} ledgers made in {took_s:.2f} s, {cost}")
        print(f"  {made.nodes() - nodes} nodes of ZooKeeper, {made.requests().since(requests)}")
        await traffic(made, ledgers, seconds)
        waits = sorted(await asyncio.gather(*(each.write() for each in ledgers)))
        print(f"  a receipt in each ledger at once: {shown(waits)}")
        await moves(other, ledgers, partitions)
    finally:
        await store.close()
        await other.close()


async def traffic(made: World, ledgers: list[AckLedger], seconds: float) -> None:
    adds, waits, cost, requests = (
        sum(each.adds for each in ledgers),
        [],
        Cost(made),
        made.requests(),
    )
    until_s = time.perf_counter() + seconds

    async def write_on(number: int, each: AckLedger) -> None:
        await asyncio.sleep(EVERY_S * number / len(ledgers))
        while time.perf_counter() < until_s:
            took_s = await each.write()
            waits.append(took_s)
            await asyncio.sleep(max(0.0, EVERY_S - took_s))

    await asyncio.gather(*(write_on(number, each) for number, each in enumerate(ledgers)))
    adds = sum(each.adds for each in ledgers) - adds
    print(f"  {seconds:.0f} s: {adds / seconds:.1f} adds/s, {shown(sorted(waits))}, {cost}")
    print(f"  {made.requests().since(requests)}")


async def moves(other: LedgerStore, ledgers: list[AckLedger], partitions: int) -> None:
    took, waits, shares, reads = [], [], [], []
    made = sum(each.made for each in ledgers)
    for moved in range(0, partitions, max(1, partitions // MOVES)):
        concerned = [each for each in ledgers if each.has(moved)]
        beside = [(moved + 1 + number) % partitions for number in range(BESIDE)]
        with_receipts = [each for each in ledgers if any(map(each.has, beside))]
        is_over = asyncio.Event()
        receiving = [asyncio.create_task(longest_wait(each, is_over)) for each in with_receipts]
        await asyncio.sleep(0.2)
        seconds, share, read = await take_over(other, concerned, moved)
        is_over.set()
        waits += await asyncio.gather(*receiving)
        for each in concerned:
            each.keys = {place: key for place, key in each.keys.items() if place[0] != moved}
        took.append(seconds)
        shares.append(share)
        reads.append(read)
    again = (sum(each.made for each in ledgers) - made) / len(took)
    kilobytes = statistics.median(read.bytes / 1e3 for read in reads)
    entries = statistics.median(read.entries for read in reads)
    print(f"  a take-over of a partition: {shown(sorted(took))}; it reads {entries:.0f} entries,")
    print(
        f"  {kilobytes:.1f} kB, {statistics.median(shares):.0%} of the states of other partitions"
    )
    print(f"  the longest wait for a receipt of others beside it: {shown(sorted(waits))};")
    print(f"  {again:.1f} ledgers of others made again", flush=True)


async def longest_wait(each: AckLedger, is_over: asyncio.Event) -> float:
    """Of receipts, one after another, up to one that was asked for after the end."""
    longest_s, is_last = 0.0, False
    while not is_last:
        is_last = is_over.is_set()
        longest_s = max(longest_s, await each.write())
        await asyncio.sleep(0.02)
    return longest_s


def shown(seconds: list[float]) -> str:
    """Of sorted times."""
    if not seconds:
        return "none"
    middle, last = 1e3 * statistics.median(seconds), 1e3 * seconds[-1]
    return f"p50 {middle:.1f} ms, the longest {last:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--subscriptions", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--units", nargs="+", choices=UNITS, default=UNITS)
    given = parser.parse_args()
    for unit in given.units:
        with world() as made:
            size = (given.partitions, given.subscriptions, given.rows)
            asyncio.run(measure(made, unit, *size, given.seconds))


if __name__ == "__main__":
    main()
