"""The topic log at scale: every figure that the layer promises, measured on an embedded cluster.

    python benchmarks/topic_log.py                everything
    python benchmarks/topic_log.py --only million
    python benchmarks/topic_log.py --segments 100000 --batches 200 --seconds 5    quicker

What is measured runs in processes of its own, through spark_ledger.topic; memory is the peak of
that process (VmHWM). E=3 Qw=3 Qa=2, synced before every acknowledgement. `apart` plays hours on the
simulated cluster, whose counts do not depend on the machine.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from spark_ledger.local import LocalCluster
from spark_ledger.metadata import paths
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log import records
from spark_ledger.topic.log.records import Head
from spark_ledger.topic.log.segment_table import SCHEMA, Interval, Intervals, SegmentTable
from spark_ledger.topic.log.state import PartitionState, TopicState
from spark_ledger.topic.read.plan import plan_read
from tests.kit.loop_task import LoopTask
from tests.unit.spark_ledger.topic import leftovers
from tests.unit.spark_ledger.topic.leftovers import ledgers_made, longest_open_s
from tests.unit.spark_ledger.topic.stage import CALM, Stage, play

ROOT = Path(__file__).resolve().parent.parent
PARTITIONS = 4
ROWS_OF_A_SEGMENT = 100
BYTES_OF_A_SEGMENT = 21_000
EPOCH_MS = 1_700_000_000_000
POLLS = 10_000
APART_S = 120.0
COMMITS_PER_S = 10.0
WARM_UP_COMMITS = 10
WRITES = ("create", "set", "delete", "multi")


@dataclass(frozen=True)
class Figure:
    what: str
    measured: float
    unit: str
    target: float | None = None
    at_least: bool = False

    def row(self) -> tuple[str, str, str, str]:
        number = f"{self.measured:,.0f}" if self.measured >= 100 else f"{self.measured:.3g}"
        if self.target is None:
            return self.what, f"{number} {self.unit}", "", ""
        reached = (self.measured >= self.target) if self.at_least else self.measured < self.target
        sign = ">=" if self.at_least else "<"
        verdict = "[green]reached[/]" if reached else "[red]missed[/]"
        return self.what, f"{number} {self.unit}", f"{sign} {self.target:g}", verdict


# -- a million segments ------------------------------------------------------------------------


def placed_segments(partition: int, count: int) -> SegmentTable:
    """Segments of one partition, one entry each, of a thousand in a ledger."""
    at = np.arange(count)
    chance = np.random.default_rng(partition)
    sizes = BYTES_OF_A_SEGMENT + chance.integers(-500, 500, count)
    written_ms = EPOCH_MS + 1000 * at + chance.integers(0, 900, count)
    offsets, twice = (np.arange(0, n * count + 1, n, dtype=np.int32) for n in (1, 2))
    none, no_times = (
        pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], kind))
        for kind in (pa.binary(), pa.int64())
    )
    columns: dict[str, Any] = {
        "partition": np.full(count, partition),
        "base": at * ROWS_OF_A_SEGMENT,
        "rows": np.full(count, ROWS_OF_A_SEGMENT),
        "bytes": sizes,
        "commit": at,
        "commit_ms": EPOCH_MS + 1000 * at + 950,
        "ledger": 10**9 + PARTITIONS * (at // 1000) + partition,
        "version": np.zeros(count),
        "entries": pa.ListArray.from_arrays(twice, pa.array(np.repeat(at % 1000, 2))),
        "entry_rows": pa.ListArray.from_arrays(
            offsets, pa.array(np.full(count, ROWS_OF_A_SEGMENT), pa.int32())
        ),
        "min_ms": written_ms,
        "max_ms": written_ms + 3,
        "event_min_ms": np.full(count, -1),
        "event_max_ms": np.full(count, -1),
        "shared": np.zeros(count, bool),
        "filter_entry": np.full(count, -1),
        "inline": none,
        "times": no_times,
    }
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCHEMA]
    return SegmentTable(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))


def large_state(topic_id: str, segments: int) -> TopicState:
    """A topic of so many segments, as if none had been checkpointed yet."""
    each = segments // PARTITIONS
    partitions = []
    for p in range(PARTITIONS):
        rows = each * ROWS_OF_A_SEGMENT
        one = Interval(0, rows, placed_segments(p, each), each * BYTES_OF_A_SEGMENT, 0, 1000 * each)
        partitions.append(PartitionState(p, 0, rows, Intervals([one])))
    return TopicState(topic_id, tuple(partitions), next=each)


async def write_large(topics: BlockingTopics, name: str, segments: int) -> float:
    """Make the topic and its checkpoint; returns the seconds that the checkpoint took."""
    client = topics.client
    info = await client.topics.create(name, PARTITIONS)
    state = large_state(info.id, segments)
    await client.store.set(paths.topic_head(info.id), records.encode_head(Head(state.next)), 0)
    intent = await client.intents.open_query_intent(name, "run", "target")
    began = time.monotonic()
    await client.checkpoints._publish(info.policies, state, None, intent)
    took = time.monotonic() - began
    await client.close()
    return took


def make_large(url: str, name: str, segments: int) -> dict[str, float]:
    topics = blocking.topics(url)
    return {"s": topics.run(write_large(topics, name, segments))}


def plan_large(url: str, name: str) -> dict[str, float]:
    """A new process plans the whole topic, and then once more."""
    topics = blocking.topics(url)
    client = topics.client
    before = peak_bytes()
    info = topics.run(client.topics.open(name))
    times, tasks = [], []
    for _ in range(3):
        began = time.monotonic()
        state = topics.run(client.log(info.id).fold(fresh=True))
        ranges = {p: (0, end) for p, end in state.end_offsets().items()}
        read = topics.run(client.tables(state, ranges))
        tasks = plan_read(state, ranges, read=read)
        times.append(time.monotonic() - began)
    return {
        "cold_s": times[0],
        "next_s": max(times[1:]),
        "tasks": len(tasks),
        "rows": sum(task.rows for task in tasks),
        "chunks": len(state.chunks()),
        "peak_mib": peak_bytes() / 2**20,
        "empty_mib": before / 2**20,
    }


def million(url: str, options: argparse.Namespace) -> Iterator[Figure]:
    name, count = "large", options.segments
    written = in_process("make_large", url, name, count)
    yield Figure(f"checkpoint of {count:,} segments made", written["s"], "s")
    planned = in_process("plan_large", url, name)
    assert planned["rows"] == count * ROWS_OF_A_SEGMENT
    yield Figure(
        f"its {planned['chunks']:.0f} chunks read and planned, cold", planned["cold_s"], "s", 5
    )
    yield Figure(f"planned again ({planned['tasks']:.0f} tasks)", planned["next_s"], "s", 0.2)
    yield Figure("peak memory of that process", planned["peak_mib"], "MiB", 500)
    yield Figure("of which before the first fold", planned["empty_mib"], "MiB")


# -- a thousand small batches ------------------------------------------------------------------


async def small_batches(topics: BlockingTopics, name: str, batches: int) -> dict[str, float]:
    """One row a batch, by a task each, over the topic's partitions; and what is left of it."""
    client = topics.client
    info = await client.topics.create(name, PARTITIONS)
    ledgers = {ledger async for ledger in client.ledgers.list()}
    writes = counted_writes(client.store)
    intent = await client.intents.open_query_intent(name, "run", "target")
    times = []
    for batch in range(batches):
        row = pa.array([b"%d" % batch], pa.binary())
        began = time.monotonic()
        task = LoopTask(client, info, intent, task_index=batch % PARTITIONS)
        await task.write(row, row)
        txn = TxnKey(intent.app_id, intent.target, batch, intent.run_id)
        await client.commit_topics({info.id: [await task.finish()]}, txn, intent.id)
        times.append(time.monotonic() - began)
    await client.checkpoints.idle()
    made = {ledger async for ledger in client.ledgers.list()} - ledgers
    follower = await client.follow(info.id)
    began = time.monotonic()
    for _ in range(POLLS):
        follower.state().end_offsets()
    polled = (time.monotonic() - began) / POLLS
    facts = {
        "ledgers": len(made),
        "nodes": await nodes_below(client.store, paths.topic(info.id)),
        "writes": sum(writes.values()) / batches,
        "p50_ms": 1e3 * sorted(times)[len(times) // 2],
        "p99_ms": 1e3 * sorted(times)[len(times) * 99 // 100],
        "poll_ms": 1e3 * polled,
    }
    await client.close()
    return facts


def make_small(url: str, name: str, batches: int) -> dict[str, float]:
    topics = blocking.topics(url)
    return topics.run(small_batches(topics, name, batches))


def counted_writes(store: Any) -> dict[str, int]:
    """How often each write is called from now on."""
    writes = dict.fromkeys(WRITES, 0)
    for name in WRITES:
        setattr(store, name, _counting(writes, name, getattr(store, name)))
    return writes


def _counting(writes: dict[str, int], name: str, call: Any) -> Any:
    async def counted(*arguments: Any, **options: Any) -> Any:
        writes[name] += 1
        return await call(*arguments, **options)

    return counted


async def nodes_below(store: Any, path: str) -> int:
    names = await store.children(path)
    return len(names) + sum([await nodes_below(store, f"{path}/{name}") for name in names])


def small(url: str, options: argparse.Namespace) -> Iterator[Figure]:
    found = in_process("make_small", url, "small", options.batches)
    what = f"{options.batches:,} one-row batches over {PARTITIONS} partitions"
    yield Figure(f"{what}: ledgers made", found["ledgers"], "", 50)
    yield Figure("nodes that the topic has then", found["nodes"], "", 200)
    yield Figure("writes to ZooKeeper a batch, checkpoints included", found["writes"], "")
    yield Figure("one batch, written and committed, median", found["p50_ms"], "ms")
    yield Figure("and p99", found["p99_ms"], "ms")
    yield Figure("an idle poll", found["poll_ms"], "ms", 1)


# -- a thousand small batches, two minutes apart -----------------------------------------------


def play_apart(batches: int, pause_s: float) -> dict[str, float]:
    """In virtual time, with real bookies and the real client; an hour and a half goes by at the
    end, so that what is not closed by itself shows as open."""

    async def act(stage: Stage) -> dict[str, float]:
        intent, loop = await stage.intent(), asyncio.get_running_loop()
        for batch in range(batches):
            task = await stage.written(intent, [b"%d" % batch], batch % PARTITIONS, inline=True)
            await stage.commit(intent, batch, task)
            await asyncio.sleep(pause_s)
        await stage.client.checkpoints.idle()
        at_end = leftovers.nodes_below(stage.world.store, paths.topic(stage.topic.id))
        await asyncio.sleep(1.5 * stage.topic.policies.ledger_age_s_max)
        return {
            "ledgers": len(ledgers_made(stage.world)),
            "nodes": at_end,
            "open_s": longest_open_s(stage.world, loop.time()),
            "roll_s": stage.topic.policies.ledger_age_s_max,
            "virtual_h": loop.time() / 3600,
        }

    found: dict[str, float] = play(act, partitions=PARTITIONS, storage=CALM)
    return found


def apart(url: str, options: argparse.Namespace) -> Iterator[Figure]:
    found = in_process("play_apart", options.batches, APART_S)
    what = f"{options.batches:,} one-row batches, {APART_S / 60:g} minutes apart"
    yield Figure(
        f"{what} ({found['virtual_h']:.0f} h, simulated): ledgers", found["ledgers"], "", 50
    )
    yield Figure("nodes that the topic has then", found["nodes"], "", 200)
    yield Figure("longest that a ledger was OPEN", found["open_s"], "s", 2 * found["roll_s"])


# -- one committer that does nothing else ------------------------------------------------------


async def commit_back_to_back(topics: BlockingTopics, name: str, seconds: float) -> float:
    """Commits a second of one row each, one after the other, as fast as they go."""
    client = topics.client
    info = await client.topics.create(name, PARTITIONS)
    intent = await client.intents.open_query_intent(name, "run", "target")
    batch, began = 0, 0.0
    while batch <= WARM_UP_COMMITS or time.monotonic() - began < seconds:
        if batch == WARM_UP_COMMITS:
            began = time.monotonic()
        row = pa.array([b"%d" % batch], pa.binary())
        task = LoopTask(client, info, intent, task_index=batch % PARTITIONS)
        await task.write(row, row)
        txn = TxnKey(intent.app_id, intent.target, batch, intent.run_id)
        await client.commit_topics({info.id: [await task.finish()]}, txn, intent.id)
        batch += 1
    rate = (batch - WARM_UP_COMMITS) / (time.monotonic() - began)
    await client.close()
    return rate


def busiest(url: str, name: str, seconds: float) -> dict[str, float]:
    topics = blocking.topics(url)
    return {"rate": topics.run(commit_back_to_back(topics, name, seconds))}


def one(url: str, options: argparse.Namespace) -> Iterator[Figure]:
    found = in_process("busiest", url, "busiest", options.seconds)
    yield Figure(
        f"back to back for {options.seconds:g} s: commits/s of a topic", found["rate"], "/s"
    )


# -- two committers ----------------------------------------------------------------------------


async def commit_steadily(
    topics: BlockingTopics, name: str, app: str, seconds: float
) -> dict[str, float]:
    """COMMITS_PER_S commits a second, each begun when it is due, or at once when it is late."""
    client = topics.client
    info = await client.topics.open(name)
    intent = await client.intents.open_query_intent(app, "run", "target")
    times: list[float] = []
    began = time.monotonic()
    for batch in range(int(seconds * COMMITS_PER_S)):
        due = began + batch / COMMITS_PER_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        row = pa.array([b"%d" % batch], pa.binary())
        task = LoopTask(client, info, intent, task_index=0)
        await task.write(row, row)
        txn = TxnKey(intent.app_id, intent.target, batch, intent.run_id)
        await client.commit_topics({info.id: [await task.finish()]}, txn, intent.id)
        times.append(time.monotonic() - due)
    took = time.monotonic() - began
    await client.close()
    warm = sorted(times[WARM_UP_COMMITS:])
    return {"rate": len(times) / took, "p99_ms": 1e3 * warm[len(warm) * 99 // 100]}


def committer(url: str, name: str, app: str, seconds: float) -> dict[str, float]:
    topics = blocking.topics(url)
    return topics.run(commit_steadily(topics, name, app, seconds))


def two(url: str, options: argparse.Namespace) -> Iterator[Figure]:
    topics = blocking.topics(url)
    topics.run(topics.client.topics.create("busy", PARTITIONS))
    pair = [start("committer", url, "busy", app, options.seconds) for app in ("a", "b")]
    found = [result(process) for process in pair]
    rate = min(one["rate"] for one in found)
    yield Figure(
        f"two committers for {options.seconds:g} s: commits/s of the slower", rate, "/s", 9.9, True
    )
    yield Figure("p99 from when it was due", max(one["p99_ms"] for one in found), "ms")


# -- processes ---------------------------------------------------------------------------------

PARTS = {"million": million, "small": small, "apart": apart, "one": one, "two": two}
IN_PROCESSES = {
    work.__name__: work
    for work in (make_large, plan_large, make_small, play_apart, busiest, committer)
}


def start(what: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--run", json.dumps([what, *arguments])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def result(process: "subprocess.Popen[str]") -> dict[str, float]:
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args!r} failed")
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def in_process(what: str, *arguments: object) -> dict[str, float]:
    return result(start(what, *arguments))


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        what, *arguments = json.loads(options.run)
        print(json.dumps(IN_PROCESSES[what](*arguments)), flush=True)
        os._exit(0)
    table = Table("what", "measured", "target", "")
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        for name, part in PARTS.items():
            if options.only in (None, name):
                for figure in part(cluster.service_url, options):
                    table.add_row(*figure.row())
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
