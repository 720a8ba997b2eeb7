"""Records what Pulsar's client sees of Pulsar.

    benchmarks/peers/peers.sh up pulsar
    python -m tests.integration.pulsar.record --url pulsar://127.0.0.1:6650 --admin http://127.0.0.1:8080

Writes transcript.json, beside this file; the program is run twice, and what it saw has to be the
same both times.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.integration.pulsar import program
from tests.integration.pulsar.case import asked

TRANSCRIPT = Path(__file__).with_name("transcript.json")


@dataclass
class Pulsar:
    """A standalone, as the program's world; its admin API makes what a client cannot ask for."""

    url: str
    admin: str

    def __post_init__(self) -> None:
        self.closed_url = self.url
        self._make("PUT", "namespaces/public/closed", {})
        closed = {"allowAutoTopicCreation": False}
        self._make("POST", "namespaces/public/closed/autoTopicCreation", closed)
        self._make("PUT", "namespaces/public/once", {})
        self._make("POST", "namespaces/public/once/deduplication", True)

    def create(self, topic: str, partitions: int = 0, *, once: bool = False) -> None:
        path = topic.replace("://", "/")
        if partitions:
            self._make("PUT", f"{path}/partitions", partitions)
        else:
            self._make("PUT", path, None)

    def terminate(self, topic: str) -> None:
        self._make("POST", f"{topic.replace('://', '/')}/terminate", None)

    def ask(self, verb: str, path: str, body: object = None) -> tuple[int, Any]:
        return asked(self.admin, verb, path, body)

    def _make(self, verb: str, path: str, body: object) -> None:
        status, _ = self.ask(verb, path, body)
        if status >= HTTPStatus.BAD_REQUEST and status != HTTPStatus.CONFLICT:
            raise RuntimeError(f"{verb} {path}: {status}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--admin", default="http://127.0.0.1:8080")
    wanted = parser.parse_args()
    world = Pulsar(wanted.url, wanted.admin)
    first, second = program.run(world), program.run(world)
    unsteady = [name for name in first if first[name] != second[name]]
    for name in unsteady:
        print(f"{name}: {first[name]}, then {second[name]}", file=sys.stderr)
    if unsteady:
        return 1
    TRANSCRIPT.write_text(json.dumps(first, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
