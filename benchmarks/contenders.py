"""What is compared: Spark Ledger, Kafka and Delta, each set up from nothing and taken down again.

Kafka is three brokers of `peers/peers.sh`, replication 3, acks=all; Spark's own connector writes
and reads it. Delta is one copy on the local disk. Both are as they come but for the compression.
Always true: what `running` started has ended and its data is gone when it is left.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.processes import below, cpu_s
from benchmarks.workload import Format
from spark_ledger.local import LocalCluster
from spark_ledger_demo import jars

HERE = Path(__file__).resolve().parent
PEERS_SH = str(HERE / "peers" / "peers.sh")
BROKERS = 3
BROKER = "127.0.0.1:9092"
CREATE_TIMEOUT_S = 60
LEDGER, KAFKA, DELTA = "ledger", "kafka", "delta"
PEERS = (KAFKA, DELTA)
KEY_AND_VALUE = "key BINARY, value BINARY"
BROKERS_HEAR_S = 3
DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


@dataclass(frozen=True)
class Contender:
    """`servers` are the processes that store, by what they are."""

    name: str
    format: Format
    servers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def pids(self) -> list[int]:
        return [pid for pids in self.servers.values() for pid in pids]

    def cpu_s(self) -> dict[str, float]:
        return {part: sum(map(cpu_s, pids)) for part, pids in self.servers.items()}


def ledger(topic: str, url: str, compression: str = "none", partitions: int = 2) -> Format:
    """E=3 Qw=3 Qa=2, synced before every ack: what a topic is by default."""
    write = {"topic": topic, "partitions": str(partitions), "compression": compression}
    read = {"subscribe": topic, "startingOffsets": "earliest"}
    return Format("ledger", {**write, "serviceUrl": url}, {**read, "serviceUrl": url})


def kafka(topic: str, compression: str) -> Format:
    at = {"kafka.bootstrap.servers": BROKER}
    write = {"topic": topic, "kafka.acks": "all", "kafka.compression.type": compression}
    read = {"subscribe": topic, "startingOffsets": "earliest"}
    return Format("kafka", {**at, **write}, {**at, **read})


def delta(folder: str, compression: str) -> Format:
    """Without compression it is as it comes, which is snappy in its files."""
    return Format(
        "delta", {} if compression == "none" else {"compression": compression}, {}, folder
    )


def spark_conf(peers: Sequence[str]) -> dict[str, str]:
    """What a session needs that reads and writes the peers. Raises JarsMissing."""
    found: list[str] = []
    conf: dict[str, str] = {}
    if KAFKA in peers:
        found += peers_sh("spark-kafka-jars").strip().split(",")
    if DELTA in peers:
        found += map(str, jars.delta_jars())
        conf |= DELTA_CONF
    return conf | ({"spark.driver.extraClassPath": os.pathsep.join(found)} if found else {})


def install(peers: Sequence[str]) -> None:
    """Fetch what is not there yet; the network is needed once. Raises SystemExit, JarsMissing."""
    if KAFKA in peers and not all(
        (home() / part / "lib").is_dir() for part in ("kafka", "spark-kafka")
    ):
        if shutil.which("mvn") is None:
            raise SystemExit("Kafka is fetched by Maven (mvn), which is not here; see --with")
        peers_sh("install", "kafka", "spark-kafka")
    if DELTA in peers:
        jars.delta_jars()


@contextmanager
def running(
    peers: Sequence[str], compression: str, spark: SparkSession, topic: str, partitions: int
) -> Iterator[list[Contender]]:
    """Spark Ledger and the peers, empty, each with a place of its own for the rows."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(bookies=3, autorecovery=False))
        ours = ledger(topic, cluster.service_url, compression, partitions)
        ours = replace(ours, schema=KEY_AND_VALUE)
        contenders = [Contender(LEDGER, ours, servers(cluster))]
        if KAFKA in peers:
            pids = stack.enter_context(kafka_brokers())
            create_kafka_topic(spark, topic, partitions)
            contenders.append(Contender(KAFKA, kafka(topic, compression), {"brokers": pids}))
        if DELTA in peers:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-"))
            contenders.append(Contender(DELTA, delta(f"{folder}/{topic}", compression)))
        yield contenders


def servers(cluster: LocalCluster) -> dict[str, tuple[int, ...]]:
    bookies = tuple(bookie.pid for bookie in cluster.bookies if bookie.pid is not None)
    return {"bookies": bookies, "ZooKeeper": (zookeeper_pid(cluster),)}


def zookeeper_pid(cluster: LocalCluster) -> int:
    """The JVM; the process that the cluster knows is the one that guards it."""
    guardian = cluster.zookeeper.pid
    assert guardian is not None, "the cluster runs"
    return next(below(guardian))


@contextmanager
def kafka_brokers() -> Iterator[tuple[int, ...]]:
    if (home() / "run" / "kafka").exists():
        peers_sh("down")  # of a run that was killed
    try:
        peers_sh("up", "kafka", str(BROKERS))
        pids = (home() / "run" / "pids").read_text().split()
        yield tuple(map(int, pids))
    finally:
        peers_sh("down")


def create_kafka_topic(spark: SparkSession, topic: str, partitions: int) -> None:
    """By the Java client on Spark's class path. Returns a while after the topic is there: brokers
    that have not heard of all its partitions yet may answer no write to them for minutes."""
    java = spark.sparkContext._jvm
    properties = java.java.util.Properties()
    properties.setProperty("bootstrap.servers", BROKER)
    admin = java.org.apache.kafka.clients.admin.AdminClient.create(properties)
    replication = java.Short.parseShort(str(BROKERS))
    wanted = java.org.apache.kafka.clients.admin.NewTopic(topic, partitions, replication)
    created = admin.createTopics(java.java.util.List.of(wanted)).all()
    created.get(CREATE_TIMEOUT_S, java.java.util.concurrent.TimeUnit.SECONDS)
    time.sleep(BROKERS_HEAR_S)
    admin.describeTopics(java.java.util.List.of(topic)).allTopicNames().get()
    admin.close()


def home() -> Path:
    """Where the peers are kept; peers.sh has the same default."""
    return Path(os.environ.get("PEERS_HOME") or Path.cwd() / ".peers")


def peers_sh(*arguments: str) -> str:
    environment: Mapping[str, str] = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [PEERS_SH, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return done.stdout
