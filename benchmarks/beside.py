"""Adds of this code beside those of another checkout, in turns on one machine.

    git worktree add ../before COMMIT
    python benchmarks/beside.py ../before                     1 KiB, 64 KiB and 1 MiB, 15 pairs each
    python benchmarks/beside.py ../before --only 1k --pairs 9

Each checkout has its own cluster of three bookies, E=3 Qw=3 Qa=2, synced before every
acknowledgement; both are up at once, and the first of a pair takes turns, too. A ratio is of one
pair, this code by the other. The processor time is what to compare where other work runs beside.
"""

import argparse
import contextlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("CHECKOUT", str(Path(__file__).resolve().parent.parent)))

from benchmarks.adds import IN_FLIGHT, bookies_cpu_s
from spark_ledger import LedgerClient
from spark_ledger.config import client_config
from spark_ledger.local import LocalCluster

SIZES = {"1k": 1 << 10, "64k": 64 << 10, "1m": 1 << 20}
ENTRIES = {"1k": 40_000, "64k": 3_000, "1m": 200}  # of one run
WARM_UP = 0.05  # of a run's entries
LAST_COPIES_S = 0.2  # the processor time of the last copies counts, too
FIGURES = {"rate": "entries/s", "client": "client", "bookie": "a bookie", "all": "all four"}


def serve() -> None:
    """Measure a run for each line of stdin, the name of a size; with one checkout's code."""
    settings: dict[str, Any] = {"bookies": 3}
    if "autorecovery" in inspect.signature(LocalCluster.__init__).parameters:
        settings["autorecovery"] = False
    with LocalCluster(**settings) as cluster:
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(one_run(cluster, line.strip())), flush=True)


def one_run(cluster: LocalCluster, name: str) -> dict[str, float]:
    """Entries a second, and microseconds of processor time for each entry."""
    size, entries = SIZES[name], ENTRIES[name]
    payload = os.urandom(size)
    with LedgerClient(cluster.service_url, client_config(inflight_bytes=IN_FLIGHT[size])) as client:
        with client.create_ledger(3, 3, 2) as writer:
            for _ in range(round(entries * WARM_UP)):
                last = writer.append_async(payload)
            last.result()
            bookies, own, began = bookies_cpu_s(cluster), time.process_time(), time.monotonic()
            for _ in range(entries):
                last = writer.append_async(payload)
            last.result()
            took = time.monotonic() - began
            time.sleep(LAST_COPIES_S)
            bookies, own = bookies_cpu_s(cluster) - bookies, time.process_time() - own
        client.delete_ledger(writer.ledger_id)
    unit = 1e6 / entries
    return {
        "rate": entries / took,
        "client": unit * own,
        "bookie": unit * bookies / 3,
        "all": unit * (own + bookies),
    }


@contextlib.contextmanager
def serving(checkout: Path) -> Iterator["subprocess.Popen[str]"]:
    path = str(checkout.resolve())
    environment = {**os.environ, "PYTHONPATH": path, "CHECKOUT": path}
    command = [sys.executable, str(Path(__file__).resolve()), path, "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=path, env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"no cluster of {path}")
        yield process


def ask(process: "subprocess.Popen[str]", name: str) -> dict[str, float]:
    assert process.stdin is not None and process.stdout is not None
    print(name, file=process.stdin, flush=True)
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def pairs_of(name: str, sides: "list[subprocess.Popen[str]]", pairs: int) -> list[list[Any]]:
    """(this code, the other) of each pair; the first pair does not count."""
    done = []
    for number in range(pairs + 1):
        pair = {side: ask(sides[side], name) for side in ((0, 1) if number % 2 else (1, 0))}
        done.append([pair[0], pair[1]])
    return done[1:]


def show(name: str, done: list[list[Any]]) -> None:
    print(f"adds of {name}, {len(done)} pairs, load {os.getloadavg()[0]:.1f}", flush=True)
    for figure, title in FIGURES.items():
        this, other = (statistics.median(pair[side][figure] for pair in done) for side in (0, 1))
        ratios = sorted(pair[0][figure] / pair[1][figure] for pair in done)
        low, middle, high = statistics.quantiles(ratios)
        print(
            f"  {title:9} this {this:9,.1f}, other {other:9,.1f}: {middle:.3f}x"
            f" (quartiles {low:.3f} and {high:.3f}, {ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--only", default=",".join(SIZES), help=f"of: {', '.join(SIZES)}")
    parser.add_argument("--pairs", type=int, default=15, help="at least 2")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    here = Path(__file__).resolve().parent.parent
    with serving(here) as this, serving(options.other) as other:
        for name in options.only.split(","):
            show(name, pairs_of(name, [this, other], options.pairs))
        for process in (this, other):
            assert process.stdin is not None
            process.stdin.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
