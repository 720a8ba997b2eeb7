"""How cost grows: what one of each thing costs, measured, and what that comes to at other sizes.

    python benchmarks/scaling.py                 everything, and the table of sizes
    python benchmarks/scaling.py --only commits  one: commits, ledgers, state, process, zookeeper
    python benchmarks/scaling.py --json FILE     what was measured, for another look

commits and ledgers run the topic layer on the simulated cluster, whose store is asked through a
counter, so their figures do not depend on the machine. state is pure. process and zookeeper use an
embedded cluster. The sizes are computed by scaling_model.py.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa

from benchmarks import scaling_model
from benchmarks.contenders import zookeeper_pid
from benchmarks.figures import Figure, show
from benchmarks.processes import most_memory_mib
from spark_ledger.local import LocalCluster
from spark_ledger.metadata.store import ANY_VERSION, Check, Create, Delete, Set
from spark_ledger.spark.options import offsets
from spark_ledger.spark.options.offsets import TopicEnds
from spark_ledger.topic import blocking
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segments import Segment
from spark_ledger.topic.log.state import PartitionState, TopicState, apply
from spark_ledger.topic.upkeep.upkeep import Upkeep
from spark_ledger.topic.write import TaskResult
from tests.kit.loop_task import LoopTask
from tests.unit.spark_ledger.topic.stage import play, segment

PARTITIONS = (1, 10, 100, 1000)
STEADY_COMMITS = 10
MANY_COMMITS = 130  # two checkpoints
STATE_PARTITIONS = (10, 100)
OFFSET_PARTITIONS = 1000
STATE_COMMITS = 128
TOPIC_ID = "0a0a0a0a-0000-4000-8000-000000000000"
BOOKIES = 6
LEDGERS = 40
TOPICS = 20
SESSIONS = 8
RATE_S = 4.0
NODES = 20_000
NODES_AT_ONCE = 100
KEPT_WRITES = 600  # ZooKeeper keeps 500 transactions
Measured = dict[str, float]


# -- what is asked of the store ----------------------------------------------------------------


@dataclass
class Asked:
    """What a client asks of its session from now on: calls by name, the nodes that they write,
    and the bytes of these."""

    calls: Counter[str] = field(default_factory=Counter)
    nodes: int = 0
    bytes: int = 0
    watches: Counter[str] = field(default_factory=Counter)

    def of(self, store: Any) -> "Asked":
        for name in ("get", "children", "sync", "create", "set", "delete", "multi"):
            setattr(store, name, self._counting(name, getattr(store, name)))
        return self

    def taken(self) -> "Asked":
        then = Asked(self.calls.copy(), self.nodes, self.bytes)
        self.calls.clear()
        self.nodes = self.bytes = 0
        return then

    @property
    def writes(self) -> int:
        return sum(self.calls[name] for name in ("create", "set", "delete", "multi"))

    @property
    def reads(self) -> int:
        return sum(self.calls[name] for name in ("get", "children", "sync"))

    def _counting(self, name: str, call: Any) -> Any:
        async def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if name == "multi":
                self._written(arguments[0])
            elif name in ("create", "set", "delete"):
                self.nodes += 1
                self.bytes += len(arguments[1]) if name != "delete" and len(arguments) > 1 else 0
            if callable(arguments[1] if len(arguments) > 1 else options.get("watch")):
                self.watches[arguments[0]] += 1
            return await call(*arguments, **options)

        return counted

    def _written(self, operations: Sequence[Create | Set | Delete | Check]) -> None:
        for one in operations:
            self.nodes += not isinstance(one, Check)
            self.bytes += len(one.value) if isinstance(one, Create | Set) else 0


# -- commits, by the number of partitions --------------------------------------------------------


def rows_of(stage: Any, intent: Any, ledger_id: int, partitions: int) -> TaskResult:
    """A task that wrote one entry to each partition, in one ledger."""
    found = tuple(segment(ledger_id, 100, partition=p, first=p) for p in range(partitions))
    return TaskResult(stage.topic.id, intent.id, 0, 0, found)


def commits() -> tuple[Measured, list[Figure]]:
    """Commits of a query that runs, each with rows in every partition."""
    measured: Measured = {}
    figures = []
    for partitions in PARTITIONS:
        found = play(_steady(partitions), partitions=partitions)
        figures += [
            Figure(f"{partitions:,} partitions: writes a commit", found["writes"], "to ZooKeeper"),
            Figure(f"{partitions:,} partitions: nodes written a commit", found["nodes"]),
            Figure(f"{partitions:,} partitions: metadata a commit", found["bytes"], "bytes"),
            Figure(f"{partitions:,} partitions: body of a commit", found["body"], "bytes"),
        ]
        measured |= {f"commit_{name}_{partitions}": value for name, value in found.items()}
    kept = play(_many(), partitions=4)
    figures += [
        Figure(f"writes a commit, checkpoints included ({MANY_COMMITS})", kept["writes"], ""),
        Figure(f"nodes of a topic after {MANY_COMMITS} commits", kept["nodes"], ""),
    ]
    measured |= {"commit_writes": kept["writes"], "topic_nodes": kept["nodes"]}
    return measured, figures


def _steady(partitions: int) -> Callable[[Any], Any]:
    async def act(stage: Any) -> Measured:
        intent = await stage.intent()
        asked = Asked().of(stage.client.store)
        await stage.commit(intent, 0, rows_of(stage, intent, 0, partitions))
        asked.taken()
        for version in range(1, 1 + STEADY_COMMITS):
            await stage.commit(intent, version, rows_of(stage, intent, version, partitions))
        done = asked.taken()
        body = Commit(
            "c" * 32,
            "q",
            "t",
            1,
            "run",
            intent.id,
            (Append(rows_of(stage, intent, 9, partitions).segments),),
        )
        counts = {"writes": done.writes, "nodes": done.nodes, "bytes": done.bytes}
        each = {name: count / STEADY_COMMITS for name, count in counts.items()}
        return {**each, "body": len(records.encode_commit(body))}

    return act


def _many() -> Callable[[Any], Any]:
    async def act(stage: Any) -> Measured:
        intent = await stage.intent()
        asked = Asked().of(stage.client.store)
        for version in range(MANY_COMMITS):
            await stage.commit(intent, version, rows_of(stage, intent, version, 4))
            await stage.client.checkpoints.idle()
        writes = asked.taken().writes / MANY_COMMITS
        return {"writes": writes, "nodes": await _below(stage.client.store, stage.topic.id)}

    return act


async def _below(store: Any, topic_id: str) -> int:
    async def count(path: str) -> int:
        names = await store.children(path)
        return len(names) + sum([await count(f"{path}/{name}") for name in names])

    return 1 + await count(f"/topic-ids/{topic_id}")


# -- ledgers -------------------------------------------------------------------------------------


def ledgers() -> tuple[Measured, list[Figure]]:
    """What a ledger costs the store from its creation to its end."""

    async def act(stage: Any) -> Measured:
        client = stage.client
        intent = await stage.intent()
        await stage.written(intent, [b"first"])
        await client.cache.close()
        asked = Asked().of(client.store)
        for _ in range(LEDGERS):
            await stage.written(intent, [b"row"])
            await client.cache.close()
        done = asked.taken()
        for number in range(TOPICS):
            await client.topics.create(f"upkeep-{number}", 4)
        upkeep = Upkeep(client)
        await upkeep.once()
        asked.taken()
        await upkeep.once()
        return {
            "upkeep": asked.taken().reads / (1 + TOPICS),
            "writes": done.writes / LEDGERS,
            "reads": done.reads / LEDGERS,
            "bytes": done.bytes / LEDGERS,
        }

    found = play(act)
    return (
        {"upkeep_reads": found["upkeep"]}
        | {f"ledger_{name}": value for name, value in found.items() if name != "upkeep"},
        [
            Figure("reads a topic in a pass of maintenance", found["upkeep"], "of ZooKeeper"),
            Figure("writes a ledger, made and closed", found["writes"], "to ZooKeeper"),
            Figure("reads a ledger, made and closed", found["reads"], "of ZooKeeper"),
            Figure("metadata written for a ledger", found["bytes"], "bytes"),
        ],
    )


# -- states, by the number of partitions -----------------------------------------------------------


def grown(partitions: int, commits: int) -> TopicState:
    """A state after so many commits, each with a segment in every partition: the most that a
    process holds before it takes a checkpoint as its root."""
    state = TopicState(TOPIC_ID, tuple(PartitionState(p) for p in range(partitions)))
    for number in range(commits):
        ledger_id = 10**6 + number
        found: tuple[Segment, ...] = tuple(
            segment(ledger_id, 100, partition=p, first=p) for p in range(partitions)
        )
        commit = Commit("c" * 32, "q", "t", number, "run", "intent", (Append(found),))
        state = apply(state, number, commit, 1_700_000_000_000 + number)
    return state


def state_of(partitions: int) -> Measured:
    """In a process of its own, so that nothing else is counted."""
    grown(1, 2)  # whatever is loaded at first use
    before = resident_bytes()
    state = grown(partitions, STATE_COMMITS)
    held = resident_bytes() - before
    return {"bytes": held, "root": len(checkpoint.encode_root(Root(state)))}


def offset_of(partitions: int) -> Measured:
    """Bytes of a query's offset, and the time to fold a commit and to make and read an offset."""
    commits = 8
    began = time.process_time()
    folded = grown(partitions, commits)
    fold_s = (time.process_time() - began) / commits
    known = {"t": TopicEnds(TOPIC_ID, (0,) * partitions, tuple(folded.end_offsets().values()))}
    began = time.process_time()
    offset = offsets.encode(offsets.ends_of(known), known)
    offsets.decode(offset, known)
    return {
        "bytes": len(json.dumps(offset, separators=(",", ":"))),
        "ms": 1e3 * (time.process_time() - began),
        "fold_ms": 1e3 * fold_s,
    }


def resident_bytes() -> int:
    """What the process holds in memory, after all that nobody uses was given back."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state() -> tuple[Measured, list[Figure]]:
    measured: Measured = {}
    figures = []
    for partitions in STATE_PARTITIONS:
        found = in_process("state_of", partitions)
        label = f"{partitions:,} partitions, {STATE_COMMITS} commits"
        each = found["bytes"] / partitions
        figures += [
            Figure(f"{label}: memory of a state", found["bytes"] / 2**20, "MiB"),
            Figure(f"{label}: of it a partition", each, "bytes"),
            Figure(f"{label}: root of a checkpoint", found["root"] / 1024, "KiB"),
        ]
        measured |= {f"state_{name}_{partitions}": value for name, value in found.items()}
    found = offset_of(OFFSET_PARTITIONS)
    label = f"{OFFSET_PARTITIONS:,} partitions"
    figures += [
        Figure(f"{label}: an offset as text", found["bytes"], "bytes"),
        Figure(f"{label}: an offset made and read", found["ms"], "ms of processor"),
        Figure(f"{label}: a commit made up and folded", found["fold_ms"], "ms of processor"),
    ]
    return measured | {f"offset_{name}": value for name, value in found.items()}, figures


# -- a process -------------------------------------------------------------------------------------


def one_process(url: str) -> Measured:
    """Writes to and reads from every bookie; says what it holds open then."""
    topics = blocking.topics(url)
    return topics.run(_all_bookies(topics))


async def _all_bookies(topics: Any) -> Measured:
    client = topics.client
    asked = Asked().of(client.store)
    before = most_memory_mib(os.getpid())
    for number in range(8):
        info = await client.topics.create(f"t{number}", 1)
        await client.follow(info.id)
        intent = await client.intents.open_query_intent(f"q{number}", "run", f"t{number}")
        for index in range(3):
            row = pa.array([b"x" * 10_000], pa.binary())
            task = LoopTask(client, info, intent, task_index=index)
            await task.write(row, row)
            await task.finish()
    asked.taken()
    began = time.monotonic()
    await client.ledgers._directory.refresh()
    reads = asked.taken().reads
    found = {
        "sockets": len(established(os.getpid())),
        "watched": len(asked.watches),
        "refresh_reads": reads,
        "refresh_ms": 1e3 * (time.monotonic() - began),
        "mib": before,
        "threads": len(os.listdir("/proc/self/task")),
    }
    await client.close()
    return found


def established(pid: int) -> list[str]:
    """The TCP connections of the process, by where they go to."""
    links = (
        os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if entry.is_symlink()
    )
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [
        line
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    fields = (line.split() for line in lines)
    return [part[2] for part in fields if part[3] == "01" and part[9] in inodes]


def process() -> tuple[Measured, list[Figure]]:
    with LocalCluster(bookies=BOOKIES, autorecovery=False) as cluster:
        found = in_process("one_process", cluster.service_url)
    return (
        {
            "process_connections_a_bookie": (found["sockets"] - 1) / BOOKIES,
            "process_mib": found["mib"],
            "refresh_reads": found["refresh_reads"],
        },
        [
            Figure(f"connections of a process that used all {BOOKIES} bookies", found["sockets"]),
            Figure("nodes it watches, 8 topics followed", found["watched"]),
            Figure("reads to look at all registrations", found["refresh_reads"]),
            Figure("threads", found["threads"]),
            Figure("memory once connected", found["mib"], "MiB"),
        ],
    )


# -- ZooKeeper -------------------------------------------------------------------------------------


def zookeeper() -> tuple[Measured, list[Figure]]:
    """One server, embedded, which syncs each transaction; clients on the same machine."""
    with LocalCluster(bookies=1, autorecovery=False) as cluster:
        pid = zookeeper_pid(cluster)
        topics = blocking.topics(cluster.service_url)
        stores = [topics.client.store]
        multis = topics.run(_commits_per_s(stores[0]))
        gets = topics.run(_gets_per_s(stores[0]))
        before = heap_bytes(pid)
        topics.run(_make_nodes(stores[0]))
        topics.run(_forget(stores[0]))
        node = (heap_bytes(pid) - before) / NODES
    return (
        {"zk_multis_s": multis, "zk_gets_s": gets, "zk_node_bytes": node},
        [
            Figure(f"multis of a commit, {SESSIONS} at a time, one client", multis, "/s"),
            Figure(f"reads, {SESSIONS} at a time, one client", gets, "/s"),
            Figure("ZooKeeper's heap for a node of 300 bytes", node, "bytes"),
        ],
    )


async def _commits_per_s(store: Any) -> float:
    """Multis as commits are: two nodes set, one checked, one made."""
    for lane in range(SESSIONS):
        for name in ("txn", "intent", "head", "log"):
            await store.create(f"/rate/{lane}/{name}", b"", parents=True)

    async def commit(lane: int, number: int) -> None:
        at = f"/rate/{lane}"
        await store.multi(
            [
                Set(f"{at}/txn", b"x" * 200, number),
                Check(f"{at}/intent", 0),
                Set(f"{at}/head", b"x" * 60, number),
                Create(f"{at}/log/{number:010d}", b"x" * 600),
            ]
        )

    return await _rate(commit)


async def _gets_per_s(store: Any) -> float:
    async def get(lane: int, _: int) -> None:
        await store.get(f"/rate/{lane}/txn")

    return await _rate(get)


async def _rate(call: Callable[[int, int], Any]) -> float:
    began = time.monotonic()

    async def lane(lane_number: int) -> int:
        done = 0
        while time.monotonic() - began < RATE_S:
            await call(lane_number, done)
            done += 1
        return done

    done = sum(await asyncio.gather(*map(lane, range(SESSIONS))))
    return done / (time.monotonic() - began)


async def _make_nodes(store: Any) -> None:
    """Spread as ledgers are, with a ledger's bytes."""
    for first in range(0, NODES, NODES_AT_ONCE):
        folder = f"/weight/{first // 10_000:04d}"
        if first % 10_000 == 0:
            await store.create(folder, b"", parents=True)
        names = range(first, first + NODES_AT_ONCE)
        await store.multi([Create(f"{folder}/{n % 10_000:04d}", b"x" * 300) for n in names])


async def _forget(store: Any) -> None:
    """Writes enough for the server to keep no older ones for followers that are behind."""
    for _ in range(KEPT_WRITES // SESSIONS):
        await asyncio.gather(*(store.set("/weight", b"", ANY_VERSION) for _ in range(SESSIONS)))


def heap_bytes(pid: int) -> float:
    """What is alive on a JVM's heap."""
    answer = subprocess.run(
        ["jcmd", str(pid), "GC.class_histogram"], capture_output=True, text=True, check=True
    )
    total = answer.stdout.strip().splitlines()[-1].split()
    return float(total[2])


# -- all of it -------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], tuple[Measured, list[Figure]]]] = {
    "commits": commits,
    "ledgers": ledgers,
    "state": state,
    "process": process,
    "zookeeper": zookeeper,
}
IN_PROCESSES: dict[str, Callable[..., Measured]] = {
    "state_of": state_of,
    "one_process": one_process,
}


def in_process(what: str, *arguments: object) -> Measured:
    command = [sys.executable, __file__, "--run", json.dumps([what, *arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Measured = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.run:
        what, *rest = json.loads(wanted.run)
        print(json.dumps(IN_PROCESSES[what](*rest)), flush=True)
        os._exit(0)
    measured: Measured = {}
    for name, part in PARTS.items():
        if wanted.only in (None, name):
            found, figures = part()
            show(figures, name)
            measured |= found
    if wanted.json:
        wanted.json.write_text(json.dumps(measured, indent=1))
    if wanted.only is None:
        scaling_model.show(measured)


if __name__ == "__main__":
    main()
