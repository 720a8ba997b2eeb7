"""Archives of the classes that Spark and ZooKeeper load: each spares a JVM two fifths of what it
costs to start and to run a query. Made once for an environment, in which they are kept.

    python -m tests.kit.class_archives        make those that this Java and these jars have not

Always true: an archive is under its name whole or not at all.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_ledger.local import embedded_zookeeper
from spark_ledger.local.embedded_zookeeper import find_java
from spark_ledger.metadata.zookeeper import connect
from spark_ledger.process import background_loop
from spark_ledger_demo import jars, session
from tests.kit.jvm import FOLDER, KINDS, OPTIONS, QUIET, ZOOKEEPER, archive

ROWS = 1000


def _fits(kind: str) -> bool:
    """Whether Java takes it for the class path that it is for."""
    given = [*OPTIONS.split(), f"-XX:SharedArchiveFile={archive(kind)}", "-Xshare:on"]
    command = [str(find_java()), *given, "-cp", _class_path(kind), "-version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _class_path(kind: str) -> str:
    """That of our ZooKeeper, or what Spark's launcher makes."""
    if kind == ZOOKEEPER:
        return embedded_zookeeper.class_path()
    spark_jars = jars.spark_jars()
    first = jars.delta_jars() if kind == "delta" else []
    parts = [*first, spark_jars.parent / "conf", *spark_jars.glob("slf4j-api-*"), spark_jars / "*"]
    return os.pathsep.join(map(str, parts))


def make() -> None:
    """Make, side by side, the archives that are not there or do not fit. For one that cannot be
    made print why, and go on: no test needs it."""
    kinds = [kind for kind in KINDS if not (archive(kind).exists() and _fits(kind))]
    started = {kind: _started(kind) for kind in kinds}
    for kind, process in started.items():
        output, _ = process.communicate()
        if process.returncode:
            print(f"{output}\nno archive of Spark's classes ({kind}): the tests take longer")


def _started(kind: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.kit.class_archives", kind]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, stdout=pipe, stderr=both, text=True)


def _make_one(kind: str) -> None:
    """The JVM writes down what it has loaded when it ends."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Path(folder) / "classes.jsa"
        given = f"{OPTIONS} {QUIET} -XX:ArchiveClassesAtExit={made}"
        if kind == ZOOKEEPER:
            _run_zookeeper(Path(folder), given)
            made.rename(archive(kind))
            return
        os.environ.update(SPARK_SUBMIT_OPTS=given, SPARK_LAUNCHER_OPTS=OPTIONS)
        spark = session.start("classes", Path(folder), cores=2, delta=kind == "delta")
        java = spark.sparkContext._gateway.proc
        _load_classes(spark, Path(folder), "delta" if kind == "delta" else "parquet")
        spark.stop()
        java.stdin.close()
        java.wait()
        made.rename(archive(kind))


def _run_zookeeper(folder: Path, options: str) -> None:
    """A client comes and goes."""
    embedded_zookeeper.JVM_OPTIONS = (*embedded_zookeeper.JVM_OPTIONS, *options.split())
    server = embedded_zookeeper.EmbeddedZooKeeper(folder / "zookeeper")
    server.start()
    loop = background_loop()
    store = loop.run(connect(f"zk://{server.address}/classes"))
    loop.run(store.create("/node", b"its value"))
    loop.run(store.get("/node"))
    loop.run(store.close())
    server.STOP_TIMEOUT_S = 60
    server.stop()


def _load_classes(spark: SparkSession, folder: Path, format_: str) -> None:
    """What most tests do, once: files written, read, counted and streamed, rows through Python."""
    there, again, checkpoint = (str(folder / name) for name in ("there", "again", "checkpoint"))
    numbers = spark.range(0, ROWS, 1, 2)
    rows = numbers.selectExpr("id", "concat('k', id % 5) AS key", "cast(id AS string) AS value")
    rows.write.format(format_).save(there)
    read = spark.read.format(format_).load(there)
    read.groupBy("key").agg(F.count("*").alias("n"), F.avg("id")).orderBy("n").collect()
    read.mapInArrow(lambda batches: batches, read.schema).where("id > 5").toArrow()
    spark.createDataFrame(pa.table({"id": [1]})).join(read, "id").collect()
    stream = spark.readStream.format(format_)
    loaded = (stream if format_ == "delta" else stream.schema(read.schema)).load(there)
    writer = loaded.writeStream.format(format_).option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start(again).awaitTermination()
    assert spark.read.format(format_).load(again).count() == ROWS


if __name__ == "__main__":
    _make_one(sys.argv[1]) if sys.argv[1:] else make()
