"""A peer's side of the comparison: the same workload through Spark's own connector for it.

python benchmarks/peers/spark_peer.py kafka     (after peers.sh up kafka 3)
python benchmarks/peers/spark_peer.py delta     (one copy, local disk)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks import workload
from benchmarks.peers import kafka_topic

HERE = Path(__file__).resolve().parent
DELTA = {
    "spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def kafka(partitions: int) -> tuple[workload.Format, dict[str, str]]:
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    kafka_topic.create(topic, partitions, replication=3)
    jars = subprocess.check_output([str(HERE / "peers.sh"), "spark-kafka-jars"], text=True)
    at = {"kafka.bootstrap.servers": kafka_topic.BROKER}
    read = {**at, "subscribe": topic, "startingOffsets": "earliest"}
    return workload.Format("kafka", {**at, "topic": topic}, read), {"spark.jars": jars.strip()}


def delta(_partitions: int) -> tuple[workload.Format, dict[str, str]]:
    home = os.environ.get("PEERS_HOME", ".peers")
    Path(home).mkdir(exist_ok=True)
    return workload.Format("delta", path=tempfile.mkdtemp(prefix="delta-", dir=home)), DELTA


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["kafka", "delta"])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    kind, conf = {"kafka": kafka, "delta": delta}[options.peer](options.parts)
    spark = workload.session(conf)
    frame = workload.rows(spark, options.rows, options.bytes, options.parts)
    rates = workload.measure(spark, kind, frame, options.runs)
    runs = {name: [round(rate) for rate in values] for name, values in vars(rates).items()}
    print(f"{options.peer}, rows/s a run:", json.dumps(runs), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
