"""SIGKILL for brokers under load, while batches as Spark writes them are committed to the same
partitions.

    python -m tests.crash.broker_kills --kills 20

Two brokers serve one topic; they are killed in turn, so that who goes on next is the other, and
each comes back before the next kill. Producers send all the time, with deduplication; commits of
the topic layer follow each other. What is judged at the end is the whole log: every receipt is at
the place that it says, each producer's values are in order, and each value that somebody was told
of is there once.
"""

import argparse
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pulsar
import pyarrow as pa

from spark_ledger import errors
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from spark_ledger.topic import blocking
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.entry.message_batch import column_of
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.write import TaskSettings
from tests.kit.history import History
from tests.kit.processes import eventually
from tests.kit.rows import parts_of

TOPIC = "killed"
PARTITIONS, PRODUCERS = 2, 3
ROWS_A_BATCH = 10
SEND_EVERY_S, COMMIT_EVERY_S = 0.002, 0.3
PATIENCE_S = 90.0
RECEIPTS_BETWEEN, COMMITS_BETWEEN = 50, 1
"""What has to come after a kill before the next one: of every producer, and of commits."""


class Kept:
    """What was promised, by whoever was told."""

    def __init__(self, topic: str = TOPIC) -> None:
        self.topic = topic
        self.history = History()
        self.receipts: dict[str, int] = {}
        self.commits = 0
        self.lock = threading.Lock()

    def receipt(self, lane: str, value: str, at: pulsar.MessageId) -> None:
        """An id of -1 is that of a message that was stored before, at a place that nobody tells."""
        stored = at.ledger_id() >= 0
        offset = at.entry_id() + max(0, at.batch_index())
        place = (max(0, at.partition()), offset) if stored else None
        with self.lock:
            self.history.promised(self.topic, value, at=time.monotonic(), place=place, lane=lane)
            self.receipts[lane] = self.receipts.get(lane, 0) + 1

    def committed(self, values: list[str], *, told: bool) -> None:
        with self.lock:
            if not told:
                self.history.attempted(self.topic, values)
                return
            for value in values:
                self.history.promised(self.topic, value, at=time.monotonic(), lane="spark")
            self.commits += 1


class Sender:
    """One producer, which sends until it is over."""

    def __init__(
        self, client: pulsar.Client, kept: Kept, name: str, *, batching: bool = True
    ) -> None:
        self._producer = client.create_producer(
            kept.topic,
            producer_name=name,
            batching_enabled=batching,
            block_if_queue_full=True,
            send_timeout_millis=0,
        )
        self._kept = kept
        self._name = name
        self._over = threading.Event()
        self.sent = 0
        self.failed: list[pulsar.Result] = []
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        while not self._over.is_set():
            self.send_next()
            time.sleep(SEND_EVERY_S)

    def send_next(self) -> None:
        self.send(f"{self._name}-{self.sent}")

    def send(self, value: str, key: str | None = None) -> None:
        def note_receipt(result: pulsar.Result, at: pulsar.MessageId) -> None:
            if result == pulsar.Result.Ok:
                self._kept.receipt(self._name, value, at)
            else:
                self.failed.append(result)

        self._producer.send_async(value.encode(), note_receipt, partition_key=key)
        self.sent += 1

    def stop(self) -> None:
        """Send no more."""
        self._over.set()

    def finish(self) -> None:
        """Returns when all that was sent has its receipt."""
        self.stop()
        self._thread.join(PATIENCE_S)
        self._producer.flush()
        has_all = eventually(
            lambda: self._kept.receipts.get(self._name, 0) == self.sent, PATIENCE_S
        )
        assert has_all, f"{self._name}: {self.sent} sent, {self._kept.receipts.get(self._name)}"
        assert not self.failed, self.failed[:3]


class Committing:
    """Commits batches of its own, one after the other, until it is over."""

    def __init__(self, topics: blocking.BlockingTopics, kept: Kept) -> None:
        self._topics = topics
        self._kept = kept
        self._over = threading.Event()
        self.refused: list[str] = []
        self._thread = threading.Thread(target=self._work, name="commits", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        number = 0
        while not self._over.wait(COMMIT_EVERY_S):
            values = [f"spark-{number}-{row}" for row in range(ROWS_A_BATCH)]
            try:
                commit(self._topics, values)
            except errors.LedgerError as error:
                self.refused.append(type(error).__name__)
                self._kept.committed(values, told=False)
            else:
                self._kept.committed(values, told=True)
            number += 1

    def finish(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a commit hangs"


def commit(topics: blocking.BlockingTopics, values: list[str]) -> None:
    """A batch as a task of Spark writes it and its driver commits it, over all partitions."""
    info = topics.run(topics.client.topics.open(TOPIC))
    app = str(uuid.uuid4())
    intent = topics.run(topics.client.intents.open_batch_intent(app, "run", info.id, random=True))
    settings = TaskSettings(inline_bytes_max=0)
    task = topics.task_writer(info, intent, task_index=0, partitions=PARTITIONS, settings=settings)
    keys = pa.array([value.encode() for value in values], pa.binary())
    task.write(keys, keys)
    txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)
    topics.run(topics.client.commit_topics({info.id: [task.start_finish()()]}, txn, intent.id))


def read_whole(
    topics: blocking.BlockingTopics, topic: str = TOPIC
) -> list[tuple[tuple[int, int], str]]:
    """Every row of the topic by its place; nobody writes any more, and all is sealed."""
    info = topics.run(topics.client.topics.open(topic))
    state = topics.run(topics.client.log(info.id).fold(fresh=True))
    ranges = {partition: (0, end) for partition, end in state.end_offsets().items()}
    found = []
    for task in plan_read(state, ranges):
        for block in topics.read(task):
            for part in parts_of(block):
                values = column_of(part.record_batch, "value").to_pylist()
                for offset, value in enumerate(values, part.offset):
                    found.append(((part.partition, offset), value.decode()))
    return found


def run(kills: int, folder: Path, say: Callable[[str], None] = print) -> None:
    """Raises AssertionError for what is lost, doubled, moved or out of order."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        topics = blocking.topics(cluster.service_url)
        policies = TopicPolicies(deduplication=True)
        topics.run(topics.client.topics.create(TOPIC, PARTITIONS, policies))
        first = cluster.broker_url
        assert cluster.broker is not None
        other = LocalBroker(folder / "other.log", cluster.service_url)
        other.start()
        client = pulsar.Client(
            f"{first},{other.url.removeprefix('pulsar://')}",
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Info, str(folder / "client.log")),
        )
        kept = Kept()
        try:
            senders = [Sender(client, kept, f"p{number}") for number in range(PRODUCERS)]
            committing = Committing(topics, kept)
            for number in range(kills):
                _wait_for_progress(kept)
                victim = (cluster.broker, other)[number % 2]
                victim.kill()
                receipts = sum(kept.receipts.values())
                say(f"kill {number + 1}: {receipts} receipts, {kept.commits} commits")
                victim.start()
            _wait_for_progress(kept)
            for sender in senders:
                sender.finish()
            committing.finish()
            say(f"commits refused: {committing.refused}")
        finally:
            with suppress(pulsar.PulsarException):
                client.close()
            cluster.broker.stop()
            other.stop()
        begun = time.monotonic()
        kept.history.read(TOPIC, read_whole(topics), begun=begun, start=0)
        kept.history.check()


def _wait_for_progress(kept: Kept) -> None:
    """Of every producer, and of commits."""
    receipts, commits = dict(kept.receipts), kept.commits
    went_on = eventually(
        lambda: (
            len(kept.receipts) == PRODUCERS
            and all(
                there >= receipts.get(lane, 0) + RECEIPTS_BETWEEN
                for lane, there in list(kept.receipts.items())
            )
            and kept.commits >= commits + COMMITS_BETWEEN
        ),
        PATIENCE_S,
    )
    assert went_on, f"no progress: {receipts}, {kept.receipts}; {commits}, {kept.commits} commits"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(wanted.kills, Path(folder), lambda said: print(said, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
