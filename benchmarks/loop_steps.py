"""The longest steps of a broker's event loop, by CPU of its thread, under what holds it longest.

    python benchmarks/loop_steps.py                      every case; the ten longest steps of each
    python benchmarks/loop_steps.py --only small,acks    some of them

The broker is a process of its own with three bookies, and every callback of its loop is measured
(time.thread_time), with what it ran by samples of its stack: both by this file, which starts it.
Rows of Spark are written by the topic layer, what producers send by a plain socket. A step above
50 ms is not met; the cases' own times (to read all, to take over) are told beside them.
"""

import argparse
import asyncio
import heapq
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS, GOAL_MS, SHOWN_MS = 10, 50.0, 5.0
SAMPLE_S = 0.01
DUMP_S = 60.0
MIB = 1 << 20


# -- in the broker's process -----------------------------------------------------------------------


class Steps:
    """Measures callbacks of event loops of this process's first thread, and keeps the longest."""

    def __init__(self, found: Path) -> None:
        self._found = found
        self._thread = threading.get_ident()
        self._number = 0
        self._longest: list[tuple[float, int, str]] = []
        self._samples: Counter[str] = Counter()

    def install(self) -> None:
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            self._number += 1
            self._samples.clear()
            began_s = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began_s
            if took_s * 1e3 >= SHOWN_MS:
                self._note(took_s, handle)

        asyncio.Handle._run = measured  # type: ignore[method-assign]
        threading.Thread(target=self._sample, daemon=True).start()
        signal.signal(signal.SIGUSR1, lambda *_: self._dump())

    def _note(self, took_s: float, handle: asyncio.Handle) -> None:
        if threading.get_ident() != self._thread:
            return
        ran = "; ".join(where for where, _ in self._samples.most_common(2))
        heapq.heappush(self._longest, (took_s, self._number, ran or repr(handle)[:100]))
        if len(self._longest) > STEPS:
            heapq.heappop(self._longest)

    def _sample(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            frame, names = sys._current_frames().get(self._thread), list[str]()
            while frame is not None and len(names) < 4:
                path = frame.f_code.co_filename
                if "spark_ledger" in path or "bookie_server" in path:
                    names.append(f"{Path(path).stem}.{frame.f_code.co_name}")
                frame = frame.f_back
            self._samples[" < ".join(names)] += 1

    def _dump(self) -> None:
        longest, self._longest = sorted(self._longest, reverse=True), []
        aside = self._found.with_suffix(".part")
        aside.write_text(json.dumps([(took_s * 1e3, ran) for took_s, _, ran in longest]))
        aside.rename(self._found)


def serve(found: Path, arguments: list[str]) -> None:
    from spark_ledger.cli.main import app

    Steps(found).install()
    sys.argv = ["spark-ledger", *arguments]
    app()


# -- beside it -------------------------------------------------------------------------------------


class Case:
    """A cluster and its broker, and what the cases do to it."""

    def __init__(self, cluster: Any) -> None:
        from spark_ledger.topic import blocking

        self.topics = blocking.topics(cluster.service_url)
        self._cluster = cluster
        self._found = cluster.data_dir / "steps.json"
        self.child: Any = None
        self.url = ""
        self.start()

    def start(self) -> None:
        from spark_ledger.local.processes import Child, free_port

        script = [sys.executable, str(Path(__file__).resolve()), "--serve", str(self._found)]
        options = ["broker", "start", "--parent-pipe", "--service-url", self._cluster.service_url]
        ports = ["--broker-port", str(free_port()), "--admin-port", str(free_port())]
        log = self._cluster.data_dir / "broker.log"
        self.child = Child("the broker", [*script, *options, *ports], log)
        self.url = json.loads(self.child.first_line(60.0))["broker_url"]

    def kill(self) -> None:
        self.child.kill()

    def steps(self) -> list[tuple[float, str]]:
        """The longest since this was asked before."""
        self._found.unlink(missing_ok=True)
        os.kill(self.child.pid, signal.SIGUSR1)
        until_s = time.monotonic() + DUMP_S
        while not self._found.exists():
            if time.monotonic() > until_s:
                raise TimeoutError("the broker does not tell its steps")
            time.sleep(0.01)
        return [(ms, ran) for ms, ran in json.loads(self._found.read_text())]

    def topic(self, partitions: int = 0, **policies: Any) -> str:
        from spark_ledger.topic.log.policies import TopicPolicies

        name = f"persistent://public/default/steps-{uuid.uuid4().hex[:12]}"
        own = TopicPolicies(partitioned=partitions > 0, **policies)
        self.topics.run(self.topics.client.topics.create(name, max(1, partitions), own))
        return name

    def written(self, values: Any, **columns: Any) -> str:
        """A topic with these rows, as Spark's tasks write and commit them."""
        from spark_ledger.topic.commit.commit import TxnKey

        topics, name = self.topics, self.topic()
        info = topics.run(topics.client.topics.open(name))
        intents = topics.client.intents
        opened = intents.open_batch_intent(str(uuid.uuid4()), "run", info.id, random=True)
        intent = topics.run(opened)
        task = topics.task_writer(info, intent, task_index=0, partitions=1)
        task.write(None, values, **columns)
        done = task.start_finish()()
        txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)
        topics.run(topics.client.commit_topics({info.id: [done]}, txn, intent.id))
        return name

    def read_rows(self, name: str, rows: int) -> None:
        """By a reader from the earliest, until it was sent so many rows."""
        link = self.reader(name)
        began_s, seen = time.perf_counter(), 0
        link.flow(10 * rows)
        for frame in link.messages():
            seen += counted(frame)
            if seen >= rows:
                break
        link.close()
        took_s = time.perf_counter() - began_s
        print(f"    a reader got {rows:,} rows in {took_s:.2f} s, {rows / took_s:,.0f} rows/s")

    def reader(self, name: str) -> Any:
        from benchmarks.broker_socket import Link

        link = Link(self.url)
        link.read_on(name)
        return link


def counted(frame: Any) -> int:
    """The messages of a MESSAGE's batch; of a message in chunks, its last one alone."""
    from spark_ledger.topic.entry import pulsar_batch

    metadata = pulsar_batch.parse(frame.batch).metadata
    if metadata.num_chunks_from_msg > 1:
        return int(metadata.chunk_id == metadata.num_chunks_from_msg - 1)
    return max(1, metadata.num_messages_in_batch)


def small(case: Case) -> None:
    """600,000 rows of 12 bytes: as many in an entry as it takes."""
    import pyarrow as pa

    count = 600_000
    values = pa.array([b"row %08d" % i for i in range(count)], pa.binary())
    case.read_rows(case.written(values), count)


def typed(case: Case) -> None:
    """200,000 rows of twelve columns, one of them a struct."""
    import numpy as np
    import pyarrow as pa

    count = 200_000
    numbers = np.arange(count)
    columns: dict[str, Any] = {f"number{i}": pa.array(numbers * i) for i in range(6)}
    columns |= {f"text{i}": pa.array([f"text {n}" for n in range(count)]) for i in range(4)}
    columns["at"] = pa.array(numbers, pa.timestamp("us", tz="UTC"))
    fields = [pa.array(numbers), pa.array([f"in {n}" for n in range(count)])]
    columns["both"] = pa.StructArray.from_arrays(fields, ["n", "t"])
    case.read_rows(case.written(pa.RecordBatch.from_pydict(columns)), count)


def headers(case: Case) -> None:
    """100,000 rows with five headers each."""
    import pyarrow as pa

    from spark_ledger.topic.entry.message_batch import HEADERS_TYPE

    count = 100_000
    each = [{"key": f"name-{i}", "value": b"text of a header"} for i in range(5)]
    values = pa.array([b"row %08d" % i for i in range(count)], pa.binary())
    case.read_rows(case.written(values, headers=pa.array([each] * count, HEADERS_TYPE)), count)


def large(case: Case) -> None:
    """Rows of 12 MiB, which go to consumers in chunks."""
    import pyarrow as pa

    values = pa.array([os.urandom(12 * MIB) for _ in range(6)], pa.binary())
    case.read_rows(case.written(values), 6)


def takeover(case: Case) -> None:
    """A killed broker's successor, of 150 MiB in a topic with deduplication: half of them batches
    that name no highest sequence id, half lone messages."""
    from benchmarks import broker_socket

    name = case.topic(1, deduplication=True) + "-partition-0"
    link = broker_socket.Link(case.url)
    link.produce_on(name)
    sequence_id = waiting = 0
    for messages, size in ((100, 200), (0, 200)):
        sent = 0
        while sent < 75 * MIB:
            some, before = list[bytes](), sent
            while sent - before < MIB // 2:
                frame = numbered(messages, size, sequence_id)
                sequence_id += max(1, messages)
                some.append(frame)
                sent += len(frame)
            link.send(b"".join(some))
            waiting += len(some)
            while waiting > 10_000:
                waiting -= link.counted(7)
    while waiting:
        waiting -= link.counted(7)
    link.close()
    case.kill()
    case.start()
    began_s = time.perf_counter()
    link = broker_socket.Link(case.url)
    link.produce_on(name)
    print(f"    its producer could go on after {time.perf_counter() - began_s:.2f} s")
    link.close()


def numbered(messages: int, size: int, sequence_id: int) -> bytes:
    """The SEND of a batch, 0: of a lone message, whose sequence ids begin there."""
    from spark_ledger.broker.wire.commands import command
    from spark_ledger.broker.wire.frames import encode
    from spark_ledger.topic.entry import pulsar_batch
    from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata

    told = MessageMetadata(producer_name="me", sequence_id=sequence_id, publish_time=1)
    payload = bytes(size)
    if messages:
        parts = list[bytes]()
        for number in range(messages):
            said = SingleMessageMetadata(payload_size=size, sequence_id=sequence_id + number)
            head = said.SerializeToString()
            parts += (len(head).to_bytes(4, "big"), head, bytes(size))
        payload = b"".join(parts)
        told.num_messages_in_batch = messages
    sent = command("send", producer_id=0, sequence_id=sequence_id, num_messages=max(1, messages))
    return encode(sent, pulsar_batch.build_batch(told, payload))


def lone(case: Case) -> None:
    """A million lone messages of 26 bytes, and what the broker keeps of them; then a reader, and a
    seek by time."""
    from benchmarks import broker_socket
    from benchmarks.processes import memory_mib
    from spark_ledger.broker.wire.commands import command

    name, count = case.topic(1) + "-partition-0", 1_000_000
    before = memory_mib(case.child.pid)
    batch = broker_socket.batch_of(0, 26)
    broker_socket.produce(case.url, name, batch, count, 0, 2_000)
    grown = memory_mib(case.child.pid) - before
    print(
        f"    {count * len(batch) / MIB:,.0f} MiB of batches: the broker has {grown:,.0f} MiB more"
    )
    took_s = broker_socket.read(case.url, name, count, 0)
    print(f"    a reader got them in {took_s:.2f} s, {count / took_s:,.0f} messages/s")
    link = case.reader(name)
    now_ms = int(time.time() * 1000)
    asked = command("seek", consumer_id=0, request_id=9, message_publish_time=now_ms - 3_000)
    link.ask(asked, "success")
    link.close()


def acks(case: Case) -> None:
    """200,000 lone messages, every other one acknowledged by one command, then all by another."""
    from benchmarks import broker_socket
    from spark_ledger.broker.wire.commands import command

    name, count = case.topic(1) + "-partition-0", 200_000
    broker_socket.produce(case.url, name, broker_socket.batch_of(0, 26), count, 0, 2_000)
    link = case.reader(name)
    link.flow(count)
    ids = list[Any]()
    for frame in link.messages():
        ids.append(frame.command.message.message_id)
        if len(ids) == count:
            break
    for some in (ids[1::2], ids):
        acked = command("ack", consumer_id=0, ack_type=0, request_id=8)
        acked.ack.message_id.extend(some)
        link.ask(acked, "ack_response")
    link.close()


def partitions(case: Case) -> None:
    """A topic of 1,000 partitions: a producer and a message for each, and a reader."""
    from benchmarks import broker_socket
    from spark_ledger.broker.wire.commands import command
    from spark_ledger.broker.wire.frames import encode

    name = case.topic(1_000)
    link, batch = broker_socket.Link(case.url), broker_socket.batch_of(0, 100)
    began_s = time.perf_counter()
    for number in range(1_000):
        link.produce_on(f"{name}-partition-{number}", number)
    for number in range(1_000):
        sent = command("send", producer_id=number, sequence_id=0, num_messages=1)
        link.send(encode(sent, batch))
    waiting = 1_000
    while waiting:
        waiting -= link.counted(7)
    print(f"    1,000 partitions took {time.perf_counter() - began_s:.1f} s")
    for number in range(1_000):
        link.read_on(f"{name}-partition-{number}", number)
    for number in range(1_000):
        link.flow(10, number)
    messages = link.messages()
    for _ in range(1_000):
        next(messages)
    link.close()


def chunked(case: Case) -> None:
    """Messages of 40 MiB in chunks, by Pulsar's own client."""
    import pulsar

    name = case.topic(1)
    client = pulsar.Client(case.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(name, chunking_enabled=True, batching_enabled=False)
    reader = client.create_reader(name, pulsar.MessageId.earliest)
    for _ in range(4):
        producer.send(os.urandom(40 * MIB))
    for _ in range(4):
        reader.read_next(60_000)
    client.close()


CASES: dict[str, Callable[[Case], None]] = {
    one.__name__: one
    for one in (small, typed, headers, large, takeover, lone, acks, partitions, chunked)
}


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES))
    given = parser.parse_args()
    from spark_ledger.local import LocalCluster

    missed = 0
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        case = Case(cluster)
        try:
            for name in given.only.split(","):
                print(f"{name}: {CASES[name].__doc__}", flush=True)
                case.steps()
                CASES[name](case)
                longest = case.steps()
                missed += any(ms > GOAL_MS for ms, _ in longest)
                for ms, ran in longest:
                    print(f"    {ms:8.1f} ms  {ran}")
        finally:
            case.kill()
    print(f"cases with a step above {GOAL_MS:g} ms: {missed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
