"""Makes the stored cluster: `python -m tests.stored.make`, by hand, in about two minutes.

It overwrites `cluster-1.tar.xz` and `expected.json`. The value of the stored cluster is its age: an
earlier version made it. So make it again only when clusters of that version need not start any
more, or when this script has learned of something that belongs into it, and then with a released
version of the code. What is in it:

- topics: rows in the commit itself, in small and large entries (journal and direct log), in entries
  that partitions share, typed in two versions of a schema, compressed, of page-cache durability,
  with filters of keys; a topic that was merged, trimmed, overwritten, grown, deleted and made
  again, one with a checkpoint and a trimmed log, two that share a commit;
- ledgers: closed, with a password, of two fragments, striped, deleted, with one copy on each
  bookie; two that are open, one of them by a writer that was killed;
- three streaming queries with subscriptions: one was stopped, one was killed between the topic's
  commit and Spark's, one while tasks of a batch were writing; a batch job that was killed likewise;
- bookies: number 0 was killed with entries in its journal and its direct log that no flush had
  written elsewhere; another had been killed and started before; the rest stopped in good order.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import Row, SparkSession

import spark_ledger
from spark_ledger import Admin, LedgerClient
from spark_ledger.local import LocalCluster
from tests.spark.topics import forget_the_newest
from tests.stored import contents
from tests.stored.contents import Facts, append, numbered
from tests.stored.killed_driver import JOB, QUERY
from tests.stored.session import session

KIB, MIB = 1 << 10, 1 << 20
SETTINGS = {
    "entry_bytes_max": 5 * MIB // 2,
    "journal_batch_bytes_max": MIB,
    "journal_bytes_max": 4 * MIB,
    "disk_reserve_bytes": MIB,
}
"""Small files: what is reserved is zeros, which would be packed and unpacked."""
ZOOKEEPER_FILES = "-Dzookeeper.preAllocSize=64"  # KiB
NOT_PACKED = {"bookie.log", "bookie.lock", "zookeeper.log", "zoo.cfg", "LOG", "LOCK"}
COMMITS = 70
"""Of a topic whose log has a checkpoint then."""
WAIT_S = 300.0


class Maker:
    def __init__(self, cluster: LocalCluster, spark: SparkSession, folder: Path) -> None:
        self._cluster = cluster
        self._spark = spark
        self._url = cluster.service_url
        self._folder = folder
        self._checkpoints = folder / contents.CHECKPOINTS
        self._admin = Admin(self._url)
        self._ledgers = LedgerClient(self._url)
        self.expected: Facts = {"bookies": [bookie.id for bookie in cluster.bookies]}
        self._killed: subprocess.Popen[bytes] | None = None

    def make(self) -> None:
        self.topics()
        self.changed_topics()
        self.typed_topic()
        self.expected["ledgers"] = self.closed_ledgers()
        self.stopped_queries()
        self.begin_what_is_killed()
        self.subscriptions()
        self.note_topics()
        self.check()
        self.kill()

    # -- topics ------------------------------------------------------------------------------------

    def topics(self) -> None:
        for start in range(0, 30, 10):
            self._append(start, start + 10, "in-commits", partitions=3)
        self._append(0, 2_000, "small-entries", partitions=2)
        self._append(0, 60, "large-entries", repeated=10_000, partitions=2)
        long = {"userMetadata": "\u00e9" * 8_192}  # so that the commit's body is in a ledger
        self._append(0, 3_000, "shared-entries", partitions=100, routing="roundRobin", **long)
        many = {"repeated": 200, "maxInFlightBytes": "1m"}
        self._append(0, 3_000, "filtered", routing="single", **many)
        self._append(0, 1_000, "packed", compression="zstd")
        self._append(1_000, 2_000, "packed", compression="lz4")
        all_bookies = {"ensembleSize": 4, "writeQuorum": 4}
        self._append(0, 1_000, "page-cache", durability="page-cache", **all_bookies)
        self._append(0, 500, "named", txnAppId="nightly", txnVersion=7, userMetadata="by night")
        several = numbered(self._spark, 0, 600).selectExpr(
            "*", "if(key = 'k0', 'together-a', 'together-b') AS topic"
        )
        append(several.repartition(2), self._url, None, partitions=2)
        odd = self._spark.sql(
            "SELECT if(id = 1, NULL, cast('k' AS BINARY)) AS key,"
            " CASE id WHEN 2 THEN NULL WHEN 3 THEN cast('' AS BINARY) ELSE X'00FF' END AS value,"
            " timestamp_micros(id * 1000001) AS eventTime,"
            " array(named_struct('key', 'h', 'value', X'01')) AS headers FROM range(0, 6, 1, 1)"
        )
        append(odd, self._url, "odd-rows")

    def changed_topics(self) -> None:
        for start in range(0, 6_000, 500):
            self._append(start, start + 500, "merged", partitions=2)
        self._admin.compact("merged")
        for start in range(0, 1_000, 500):
            self._append(start, start + 500, "trimmed", routing="single")
        self._admin.trim("trimmed", {0: 510})
        self._append(0, 1_000, "overwritten", partitions=2)
        self._append(5_000, 5_700, "overwritten", mode="overwrite")
        self._append(0, 500, "grown")
        self._admin.grow("grown", 4)
        self._append(500, 1_000, "grown")
        self._append(0, 500, "made-anew")
        self._admin.delete_topic("made-anew")
        self._append(500, 600, "made-anew", partitions=3)
        for start in range(0, 10 * COMMITS, 10):
            self._append(start, start + 10, "many-commits", partitions=2)
        self._append(0, 200, JOB)

    def typed_topic(self) -> None:
        columns = ("id", "concat('name ', id) AS name", "named_struct('x', id / 2) AS place")
        first = self._spark.range(0, 800, 1, 2).selectExpr(*columns)
        append(first, self._url, contents.TYPED, valueFormat="arrow", partitions=2)
        second = self._spark.range(800, 1_200, 1, 2).selectExpr(*columns, "id % 7 = 0 AS late")
        append(second, self._url, contents.TYPED, valueFormat="arrow", mergeSchema=True)
        assert len(self._admin.schema(contents.TYPED).versions) == 2

    def _append(
        self, start: int, end: int, topic: str, repeated: int = 1, mode: str = "append", **options
    ) -> None:
        rows = numbered(self._spark, start, end, repeated)
        append(rows, self._url, topic, mode, **options)

    def _nodes_of(self, topic: str) -> dict[str, Facts]:
        path = f"/topic-ids/{self._admin.describe(topic).info.id}"
        return contents.records_below(self._url, path)

    # -- ledgers -----------------------------------------------------------------------------------

    def closed_ledgers(self) -> dict[str, Facts]:
        made = {
            "closed": self._closed("closed", (3, 3, 2)),
            "striped": self._closed("striped", (4, 2, 2)),
            "page-cache": self._closed("page-cache", (4, 4, 2), durability="page-cache"),
            "secret": self._closed("secret", (3, 3, 2), password=contents.PASSWORD),
            "two-fragments": self._in_two_fragments(),
            "deleted": self._closed("deleted", (3, 3, 2)),
        }
        self._ledgers.delete_ledger(made["deleted"]["id"])
        for number in range(1, contents.BOOKIES):
            made[f"only-on-{number}"] = self._on_one_bookie(number, closed=True)
        return made

    def _closed(self, name: str, quorums: tuple[int, int, int], **options) -> Facts:
        with self._ledgers.create_ledger(*quorums, metadata={"name": name}, **options) as writer:
            self._fill(writer, name)
        return self._noted(writer.ledger_id, options.get("password", b""))

    def _in_two_fragments(self) -> Facts:
        """A bookie is killed in between, and started again."""
        with self._ledgers.create_ledger(3, 3, 2, metadata={"name": "two-fragments"}) as writer:
            self._fill(writer, "before")
            ensemble = self._record(writer.ledger_id).last_fragment.ensemble
            bookie = next(one for one in reversed(self._cluster.bookies) if one.id in ensemble)
            bookie.kill()
            self._fill(writer, "after")
        bookie.start()
        assert len(self._record(writer.ledger_id).fragments) == 2
        return self._noted(writer.ledger_id)

    def _on_one_bookie(self, number: int, *, closed: bool) -> Facts:
        """A ledger with its only copy on that bookie: what comes back comes from its disks."""
        wanted = (self._cluster.bookies[number].id,)
        client = LedgerClient(self._url)  # which has not seen that a bookie failed
        while True:
            writer = client.create_ledger(1, 1, 1, metadata={"name": f"only-on-{number}"})
            if tuple(self._record(writer.ledger_id).last_fragment.ensemble) == wanted:
                break
            writer.close()
            client.delete_ledger(writer.ledger_id)
        self._fill(writer, f"only-on-{number}")
        if closed:
            writer.close()
            return self._noted(writer.ledger_id)
        return {"id": writer.ledger_id}

    def _fill(self, writer, name: str) -> None:
        for number in range(contents.ENTRIES):
            writer.append(contents.payload(name, number))

    def _record(self, ledger_id: int):
        return self._ledgers.ledger_metadata(ledger_id)

    def _noted(self, ledger_id: int, password: bytes = b"") -> Facts:
        facts = contents.ledger_facts(self._ledgers, ledger_id, password)
        return {"id": ledger_id, **facts}

    # -- queries -----------------------------------------------------------------------------------

    def stopped_queries(self) -> None:
        for query in contents.QUERIES:
            self._append(0, 40, f"{query}-in", partitions=2)
        for query in ("stopped", "repeated"):
            rows = contents.source(self._spark, self._url, query)
            running = contents.start(rows, self._url, query, self._checkpoints)
            for start in (40, 80, 120):
                running.processAllAvailable()
                self._append(start, start + 40, f"{query}-in")
            running.processAllAvailable()
            time.sleep(1.5)  # a subscription writes once a second
            running.stop()
        forget_the_newest(self._checkpoints / "repeated" / "commits")  # as if killed before it

    def begin_what_is_killed(self) -> None:
        scratch = self._folder / "driver"
        scratch.mkdir()
        told = {"url": self._url, "checkpoints": str(self._checkpoints), "folder": str(scratch)}
        with (scratch / "log").open("wb") as log:
            self._killed = subprocess.Popen(
                [sys.executable, "-m", "tests.stored.killed_driver", json.dumps(told)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        commits = self._checkpoints / QUERY / "commits"
        for start in (40, 80):
            batch = start // 40 - 1
            self._until(lambda batch=batch: batch in contents.batches(commits))
            self._append(start, start + 40, f"{QUERY}-in")
        self._until(lambda: 2 in contents.batches(commits))
        time.sleep(1.5)
        self._append(120, 420, f"{QUERY}-in", repeated=700)
        for name in (f"{QUERY}.waits", f"{JOB}.waits", "ledger"):
            self._until((scratch / name).exists)
        time.sleep(1.5)
        self.expected["ledgers"]["killed"] = {"id": int((scratch / "ledger").read_text())}

    def subscriptions(self) -> None:
        """And the queries: what Spark has noted as committed, what it had planned."""
        self._admin.create_subscription("small-entries", "held", at={0: 70, 1: 5})
        self._admin.create_subscription("trimmed", "at-the-end", at="latest")
        held = [("small-entries", "held"), ("trimmed", "at-the-end")]
        held += [(f"{query}-in", query) for query in contents.QUERIES]
        self.expected["subscriptions"] = {
            name: {"topic": topic, "positions": _by_text(self._position(topic, name))}
            for topic, name in held
        }
        self.expected["queries"] = {
            query: {
                "planned": contents.batches(self._checkpoints / query / "offsets")[-1],
                "committed": contents.batches(self._checkpoints / query / "commits")[-1],
            }
            for query in contents.QUERIES
        }
        records = contents.records_below(self._url, "/intents")
        self.expected["open intents"] = {
            record["kind"]: name
            for name, record in records.items()
            if record["target"].partition("@")[0] in (f"{QUERY}-out", JOB)
            and record["state"] == "open"
        }
        assert set(self.expected["open intents"]) == {"query", "batch"}, records

    def _position(self, topic: str, name: str) -> dict[int, int]:
        found = {one.name: one for one in self._admin.subscriptions(topic)}
        return dict(found[name].positions)

    def note_topics(self) -> None:
        names = sorted(info.name.short for info in self._admin.topics())
        plain = [name for name in names if name != contents.TYPED]
        found = contents.rows_of(self._spark, self._url, plain)
        found |= contents.typed_rows_of(self._spark, self._url, contents.TYPED)
        assert all(facts["rows"] for facts in found.values()), found
        self.expected["topics"] = dict(sorted(found.items()))

    def check(self) -> None:
        """The rows came to be stored in all the ways that are promised above."""
        assert self._nodes_of("many-commits")["checkpoint"]["next"] >= 64
        segments, commits = self._listing("segments"), self._listing("commits")
        assert "shared-entries" in {row.topic for row in segments if row.shared}
        assert "in-commits" in {row.topic for row in segments if row.ledgerId is None}
        assert max(row.entries for row in segments if row.topic == "filtered") >= 4
        assert max(row.bytes for row in segments if row.topic == "large-entries") > MIB
        assert any(row.bodyLedgerId is not None for row in commits)
        kinds = {kind for row in commits for kind in row.kinds}
        assert kinds == {"append", "overwrite", "replace", "trim", "grow"}, kinds
        live = {row.subscription: row.cursorLedgerId for row in self._listing("subscriptions")}
        assert live[QUERY] is not None, live

    def _listing(self, view: str) -> list[Row]:
        reader = self._spark.read.format("ledger").option("serviceUrl", self._url)
        return reader.option("metadata", view).load().collect()

    # -- the end -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """The driver with what it runs; and bookie 0, right after entries that it alone has."""
        assert self._killed is not None
        os.killpg(self._killed.pid, signal.SIGKILL)
        self._killed.wait()
        facts = self._on_one_bookie(0, closed=False)
        self._cluster.bookies[0].kill()
        self.expected["ledgers"]["only-on-0"] = facts

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "it did not come true in time"
            assert self._killed is not None and self._killed.poll() is None, "the driver ended"
            time.sleep(0.05)


def _by_text(positions: dict[int, int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in sorted(positions.items())}


def make(folder: Path) -> Facts:
    """What is to be packed, below `folder`; what is expected of it."""
    os.environ["JAVA_TOOL_OPTIONS"] = ZOOKEEPER_FILES
    data = folder / contents.CLUSTER
    with LocalCluster(
        contents.BOOKIES, data, bookie_settings=SETTINGS, autorecovery=False
    ) as cluster:
        del os.environ["JAVA_TOOL_OPTIONS"]
        spark = session("local[2]", folder / "spark")
        try:
            maker = Maker(cluster, spark, folder)
            maker.make()
        finally:
            spark.stop()
    _note_open_ledgers(maker.expected["ledgers"])
    return {"made by": f"spark-ledger {spark_ledger.__version__}, {_commit()}", **maker.expected}


def _note_open_ledgers(ledgers: dict[str, Facts]) -> None:
    """All entries that were appended, for all were acknowledged."""
    for name in contents.LEFT_OPEN:
        payloads = [contents.payload(name, number) for number in range(contents.ENTRIES)]
        ledgers[name] |= {"entries": len(payloads), "sha256": contents.sha256(payloads)}


def pack(folder: Path) -> None:
    """Raises AssertionError if what is packed names the folder it was made in."""
    with tarfile.open(contents.ARCHIVE, "w:xz", preset=9) as archive:
        for name in (contents.CLUSTER, contents.CHECKPOINTS):
            archive.add(folder / name, name, filter=lambda one: _packed(one, folder))


def _packed(one: tarfile.TarInfo, folder: Path) -> tarfile.TarInfo | None:
    name = Path(one.name).name
    if name in NOT_PACKED or name.startswith("LOG.old"):
        return None
    if one.isfile():
        assert str(folder).encode() not in (folder / one.name).read_bytes(), one.name
    one.uid = one.gid = 0
    one.uname = one.gname = ""
    return one


def _commit() -> str:
    told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="stored-") as name:
        folder = Path(name)
        expected = make(folder)
        pack(folder)
    contents.EXPECTED.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    print(f"{contents.ARCHIVE}: {contents.ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
