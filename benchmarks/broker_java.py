"""Pulsar's Java client at work, in a process of its own for each server (`Load.java`)."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_ledger.local.embedded_zookeeper import find_java
from spark_ledger_demo.jars import jars_of
from tests.kit.pulsar_java import CLIENT

HEAP = ("-Xms512m", "-Xmx512m")


class JavaClient:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def produce(self, topic: str, count: int, size: int, batched: bool, keys: int = 0) -> float:
        """Seconds for so many messages, each with its receipt; with `keys` different keys."""
        return self._seconds("produce", topic, count, size, str(batched).lower(), keys)

    def consume(self, topic: str, count: int, kind: str, consumers: int) -> float:
        """Seconds until so many consumers of a new subscription have acknowledged `count`."""
        return self._seconds("consume", topic, count, kind, consumers)

    def _seconds(self, *words: object) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the Java client ended at {words}")
        return float(line)


@contextmanager
def connected(url: str) -> Iterator[JavaClient]:
    """Raises JarsMissing."""
    program = Path(__file__).with_name("Load.java")
    classes = ":".join(map(str, jars_of(CLIENT)))
    command = [find_java(), *HEAP, "-cp", classes, str(program), url]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
    )
    try:
        yield JavaClient(process)
    finally:
        process.kill()
        process.wait()
