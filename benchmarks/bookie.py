"""Every figure that is promised of the bookie's storage, measured here and printed beside its goal.

    python benchmarks/bookie.py                          all of it, 25 minutes
    python benchmarks/bookie.py --only rate-1k,latency   some of it (see --help)
    python benchmarks/bookie.py --no-peer                without Java BookKeeper: no ratios

PEERS_HOME: where the peers are installed (default .peers; installed when missing: Maven, Java 17).
A size writes up to 60 GB, which are deleted before the next.
E=3 Qw=3 Qa=2, synced before every acknowledgement; rates are medians of three runs of 10 s.
`processes`: 1, 2 and 3 bookies on one host, each entry on one of them (Qw=1), two clients.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks import adds, cold_read, endurance, java_bookkeeper
from spark_ledger.local import LocalCluster

SIZES = {"rate-1k": 1 << 10, "rate-64k": 64 << 10, "rate-1m": 1 << 20}
RATIOS = {"rate-1k": (1.5, 1.0), "rate-64k": (3.0, 2.0), "rate-1m": (4.0, 2.5)}
"""Of Java's best rate: the goal, and what is the least."""
NAMES = {"rate-1k": "adds of 1 KiB", "rate-64k": "adds of 64 KiB", "rate-1m": "adds of 1 MiB"}


@dataclass(frozen=True)
class Figure:
    what: str
    goal: str
    measured: str
    met: bool | None

    def row(self) -> tuple[str, str, str, str]:
        verdict = {True: "[green]met[/]", False: "[red]not met[/]", None: ""}[self.met]
        return self.what, self.goal, self.measured, verdict


def rates(options: argparse.Namespace, chosen: list[str]) -> list[Figure]:
    """Ours beside Java's best, size by size; what a size wrote is gone before the next, for a disk
    that is nearly full refuses adds, theirs and ours."""
    figures: list[Figure] = []
    for name in chosen:
        best = java_rate(name) if options.peer else None
        with LocalCluster(bookies=3, autorecovery=False) as cluster:
            ours = adds.rate(cluster, SIZES[name], options.seconds, options.runs)
        figures += rate_figures(name, ours, best)
    return figures


def java_rate(name: str) -> float | None:
    try:
        with java_bookkeeper.running():
            return java_bookkeeper.best_rate(SIZES[name])
    except java_bookkeeper.NoPeer as missing:
        print(missing, flush=True)
        return None


def rate_figures(name: str, ours: adds.Rate, java: float | None) -> list[Figure]:
    small = name == "rate-1k"
    shown = f"{ours.entries_per_s:,.0f}/s" if small else f"{ours.mb_per_s:,.0f} MB/s"
    unit = "a million" if small else "a GB"
    cpu = f"CPU-s {unit}: client {ours.client_cpu_s:.1f}, each bookie {ours.bookie_cpu_s:.1f}"
    goal, least = RATIOS[name]
    said = f"{goal:g}x Java (least {least:g}x)"
    if java is None:
        return [Figure(NAMES[name], said, f"{shown} ({cpu})", None)]
    ratio = ours.entries_per_s / java
    theirs = f"{java:,.0f}/s" if small else f"{java * SIZES[name] / adds.MB:,.0f} MB/s"
    text = f"{ratio:.2f}x: {shown}, Java {theirs} ({cpu})"
    return [Figure(NAMES[name], said, text, ratio >= goal)]


def latency(options: argparse.Namespace) -> list[Figure]:
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        times = adds.single_adds_ms(cluster)
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    return [
        Figure("single add, p50", "<= 2 ms", f"{p50:.2f} ms", p50 <= 2),
        Figure("single add, p99", "<= 10 ms", f"{p99:.2f} ms", p99 <= 10),
    ]


def processes(options: argparse.Namespace) -> list[Figure]:
    figures = []
    for entry_bytes, name in ((1 << 10, "1 KiB"), (64 << 10, "64 KiB")):
        for count in (1, 2, 3):
            with LocalCluster(bookies=count, autorecovery=False) as cluster:
                done = [
                    adds.host_rate(cluster, entry_bytes, options.seconds)
                    for _ in range(options.runs)
                ]
            rate, each = map(statistics.median, zip(*done, strict=True))
            text = f"{rate:,.0f}/s, {each:,.0f} a CPU-s of a bookie"
            figures.append(Figure(f"adds of {name}, bookies on the host: {count}", "-", text, None))
    return figures


def amplification(options: argparse.Namespace) -> list[Figure]:
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        times = adds.write_amplification(cluster, options.seconds)
    what = "bytes written for each byte acked, 64 KiB"
    return [Figure(what, "<= 2.2", f"{times:.2f}", times <= 2.2)]


def cold(options: argparse.Namespace) -> list[Figure]:
    found = cold_read.measure()
    text = f"{found.mb_per_s:.0f} MB/s ({found.slowest:.0f} to {found.fastest:.0f})"
    what = "cold read, 256 KiB entries, one ledger of 200"
    return [Figure(what, ">= 300 MB/s", text, found.mb_per_s >= 300)]


def restart(options: argparse.Namespace) -> list[Figure]:
    took = endurance.restart_s(16 << 10)
    what = "restart after kill -9, 1 GiB of journal, 16 KiB entries"
    figures = [Figure(what, "< 15 s", f"{took:.1f} s", took < 15)]
    others = {"1 GiB of journal, 4 KiB entries": 4 << 10, "1 GiB of 64 KiB entries": 64 << 10}
    for name, entry_bytes in others.items():
        took = endurance.restart_s(entry_bytes)
        figures.append(Figure(f"the same, {name}", "none set", f"{took:.1f} s", None))
    return figures


def memory(options: argparse.Namespace) -> list[Figure]:
    most = endurance.memory_mib(options.minutes * 60)
    what = f"VmHWM, {options.minutes:g} minutes of writes, reads, compaction"
    return [Figure(what, "<= 512 MiB", f"{most:.0f} MiB", most <= 512)]


def idle(options: argparse.Namespace) -> list[Figure]:
    share = endurance.idle_share()
    return [Figure("idle bookie, of a core", "< 1 %", f"{share:.2%}", share < 0.01)]


OTHERS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "latency": latency,
    "processes": processes,
    "cold-read": cold,
    "amplification": amplification,
    "restart": restart,
    "memory": memory,
    "idle": idle,
}


def measure(options: argparse.Namespace, chosen: list[str]) -> list[Figure]:
    figures: list[Figure] = []
    if sizes := [name for name in chosen if name in SIZES]:
        figures += timed(", ".join(sizes), lambda: rates(options, sizes))
    for name in chosen:
        if name in OTHERS:
            figures += timed(name, lambda name=name: OTHERS[name](options))  # type: ignore[misc]
    return figures


def timed(what: str, measuring: Callable[[], list[Figure]]) -> list[Figure]:
    began = time.monotonic()
    figures = measuring()
    for figure in figures:
        print(f"{figure.what}: {figure.measured} (goal {figure.goal})", flush=True)
    print(f"  {what} took {time.monotonic() - began:.0f} s", flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    everything = [*SIZES, *OTHERS]
    parser.add_argument("--only", default="", help=f"of: {', '.join(everything)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the memory test")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    chosen = [name.strip() for name in options.only.split(",")] if options.only else everything
    if unknown := [name for name in chosen if name not in everything]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(everything)}")
    figures = measure(options, chosen)
    table = Table("figure", "goal", "measured", "", title="The bookie")
    for figure in figures:
        table.add_row(*figure.row())
    Console(width=160).print(table)
    print("command:", "python", "benchmarks/bookie.py", *sys.argv[1:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
