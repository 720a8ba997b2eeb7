"""What the cost of one of each thing comes to at other sizes. Pure; scaling.py measures the units.

A size is bookies, topics, partitions and queries. Each query reads one topic and writes another,
and has processes of its own that use the topic layer: its source's, its sink's and its workers.
What is assumed is written beside the constants; what a part of the system takes is what it was
measured to take, or a round figure that is said to be one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

DRIVER_PROCESSES = 2  # the source's and the sink's
REFRESH_S, REREADS_PER_LOOK = 30.0, 16  # spark_ledger/bookies/directory.py
LISTINGS = 2  # of bookies that are written, and of those that are only read
HEARTBEAT_S = 60.0  # intents.py, of each process that writes
ROLL_S = 3600.0  # policies.ledger_age_s_max
GC_S, GC_READS_S = 60.0, 200.0  # bookie: a pass over its ledgers, and its pace
COPIES = 3
KEPT_S = 7 * 86_400.0  # retention, assumed
BLOCK_IDS = 8  # intents.py: ledger ids in a node, which goes when the ledgers have gone
INTENT_NODES = 3  # the intent, its heartbeat, its blocks
EXPIRY_S = 3600.0  # intent_expiry.py: a round over all intents and blocks
PASS_S = 60.0  # local/maintenance.py
CURSOR_OFTEN_S, CURSOR_FLOOR_S = 30.0, 300.0  # cursor.py
ZOOKEEPER_WRITES_S, ZOOKEEPER_READS_S = 10_000.0, 50_000.0  # an ensemble of 5, assumed
OFFSET_PARTITIONS = 1000  # of the offset that scaling.py measures
ZOOKEEPER_HEAP = 16 * 2**30  # a large one, assumed
WRITTEN_BYTES_S = 50e6  # of an ensemble's log, assumed
SESSIONS_MAX = 20_000.0  # of an ensemble, assumed
SOCKETS_MAX = 65_536.0  # of a process, a usual limit
NODE_BYTES_MAX = 64 * 1024  # draft.BODY_INLINE_BYTES_MAX
OFFSET_BYTES_MAX = 1e6  # what a micro-batch may add to Spark's log and read again, assumed
STATE_BYTES_MAX = 512 * 2**20  # of the source's process, assumed
Units = Mapping[str, float]


@dataclass(frozen=True)
class Size:
    name: str
    bookies: int
    topics: int
    partitions: int
    queries: int
    workers: int = 2
    trigger_s: float = 10.0

    @property
    def processes(self) -> int:
        return self.queries * (DRIVER_PROCESSES + self.workers)

    @property
    def partitions_a_topic(self) -> int:
        return self.partitions // self.topics

    @property
    def ledgers(self) -> float:
        """Each worker keeps one open and rolls it; they are kept as long as their rows are."""
        return self.queries * self.workers * KEPT_S / ROLL_S


SIZES = (
    Size("small", 3, 10, 100, 10),
    Size("middle", 30, 1_000, 10_000, 100),
    Size("large", 1_000, 10_000, 1_000_000, 10_000),
    Size("one topic", 1_000, 1, 1_000_000, 1),
)


@dataclass(frozen=True)
class Load:
    """`needed` of something at a size, of which there is `there`; `why` says who asks for it."""

    what: str
    needed: float
    there: float
    why: str

    @property
    def share(self) -> float:
        return self.needed / self.there


def loads(size: Size, units: Units) -> list[Load]:
    return [*_of_zookeeper(size, units), *_of_processes(size, units)]


def _of_zookeeper(size: Size, units: Units) -> list[Load]:
    cursor_s = CURSOR_FLOOR_S if size.trigger_s < CURSOR_OFTEN_S else size.trigger_s
    writes = size.queries * (
        units["commit_writes"] / size.trigger_s
        + size.workers * units["ledger_writes"] / ROLL_S
        + (1 + size.workers) / HEARTBEAT_S
        + 1 / cursor_s
    )
    look = LISTINGS + min(size.bookies, REREADS_PER_LOOK)
    collected = min(GC_READS_S, COPIES * size.ledgers / size.bookies / GC_S) * size.bookies
    at_work = size.queries * (INTENT_NODES + size.workers * BLOCK_IDS)
    blocks = size.ledgers / BLOCK_IDS
    upkeep = (units["upkeep_reads"] * size.topics + at_work) / PASS_S
    upkeep += (2 * size.queries + blocks) / EXPIRY_S
    intents = INTENT_NODES * size.queries + blocks
    nodes = size.ledgers + size.topics * units["topic_nodes"] + intents
    reads_s = ZOOKEEPER_READS_S
    return [
        Load("ZooKeeper: writes/s", writes, ZOOKEEPER_WRITES_S, "commits, heartbeats, ledgers"),
        Load(
            "ZooKeeper: reads/s, registrations",
            size.processes * look / REFRESH_S,
            reads_s,
            "every process looks who is there each 30 s, and at 16 of them",
        ),
        Load(
            "ZooKeeper: reads when a bookie comes or goes",
            float(size.processes * (LISTINGS + 1)),
            reads_s,
            "every process hears of it and looks who it is",
        ),
        Load("ZooKeeper: reads/s, collection", collected, reads_s, "bookies ask for their ledgers"),
        Load(
            "ZooKeeper: reads/s, maintenance",
            upkeep,
            reads_s,
            "a pass a minute over topics, open intents and ids not used yet",
        ),
        Load(
            "ZooKeeper: heap",
            nodes * units["zk_node_bytes"],
            ZOOKEEPER_HEAP,
            "records of ledgers, blocks of their ids",
        ),
        Load("ZooKeeper: sessions", size.processes + size.bookies, SESSIONS_MAX, "one a process"),
        Load(
            "ZooKeeper: bytes written/s by commits",
            size.queries / size.trigger_s * _commit_bytes(size.partitions_a_topic, units),
            WRITTEN_BYTES_S,
            "a segment for each partition of a batch",
        ),
    ]


def _of_processes(size: Size, units: Units) -> list[Load]:
    wires = units["process_connections_a_bookie"]
    largest = units["state_bytes_100"] / 100
    return [
        Load(
            "bookie: connections",
            size.processes * wires,
            SOCKETS_MAX,
            "a process comes to know all bookies",
        ),
        Load("process: connections", size.bookies * wires, SOCKETS_MAX, "the same, seen from it"),
        Load(
            "source's process: memory of the state",
            size.partitions_a_topic * largest,
            STATE_BYTES_MAX,
            "segments since the last checkpoint, each partition in each commit",
        ),
        Load(
            "Spark: bytes of an offset",
            size.partitions_a_topic * units["offset_bytes"] / OFFSET_PARTITIONS,
            OFFSET_BYTES_MAX,
            "every partition's number in each micro-batch",
        ),
    ]


def _commit_bytes(partitions: int, units: Units) -> float:
    """What a commit writes into the store: its body and the rows of each partition; of a large one
    where the body is, and the rows as long as they fit."""
    if partitions * units["commit_body_100"] / 100 <= NODE_BYTES_MAX:
        each = (units["commit_bytes_100"] - units["commit_bytes_1"]) / 99
        return units["commit_bytes_1"] + (partitions - 1) * each
    return min(NODE_BYTES_MAX, partitions * units["commit_bytes_1000"] / 1000)


def first_to_break(size: Size, units: Units) -> list[Load]:
    """What is asked for more than there is of it, the worst first."""
    over = [load for load in loads(size, units) if load.share > 1]
    return sorted(over, key=lambda load: -load.share)


def show(units: Units) -> None:
    table = Table("what", "there is", *(size.name for size in SIZES), title="computed")
    for rows in zip(*(loads(size, units) for size in SIZES), strict=True):
        needs = (f"{load.needed:,.4g} ({load.share:.2g}x)" for load in rows)
        table.add_row(rows[0].what, f"{rows[0].there:,.4g}", *needs)
    console = Console(width=150)
    console.print(table)
    for size in SIZES:
        over = [
            f"{load.what} {load.share:,.1f}x ({load.why})" for load in first_to_break(size, units)
        ]
        console.print(f"{size.name}: {size}\n  breaks: {'; '.join(over) or 'nothing'}")
