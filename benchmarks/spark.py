"""Every figure that Spark Ledger promises of Spark, measured here and printed beside its goal.

    python benchmarks/spark.py                        everything, beside Kafka and Delta
    python benchmarks/spark.py --with none            without them
    python benchmarks/spark.py --only write,micro     some parts: write, read, typed, projection,
                                                      micro, poll, memory
    python benchmarks/spark.py --rows 50000 --gb 0.2  quicker, and less true
    python benchmarks/spark.py --bytes 200 --compression zstd    one case of write and read

E=3 Qw=3 Qa=2, synced before every ack, against Kafka with replication 3 and acks=all and Delta's
single copy. In each case the formats take turns, so that a noisy machine is noisy to all of them;
medians count, and of those the ratios. Each case is a process of its own on a cluster of its own.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import contenders, spark_cases, spark_rates, spark_typed
from benchmarks.figures import Figure, show
from spark_ledger_demo.jars import JarsMissing

COPIES = 3
DISK_SLACK = 1.2
RATES = ("write", "read")
BESIDE_PEERS = (*RATES, "typed")
PARTS = (*BESIDE_PEERS, "projection", "micro", "poll", "memory")
CASES: dict[str, Callable[..., list[Figure] | None]] = {
    "rates": spark_rates.rates,
    "typed": spark_typed.typed,
    "projection": spark_cases.projection,
    "micro": spark_cases.micro,
    "poll": spark_cases.poll,
    "memory": spark_cases.memory,
    "fill": spark_cases.fill,
}


def in_process(case: str, options: dict[str, Any]) -> list[Figure]:
    """The case's figures, measured in a process that ends with it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, __file__, "--case", case, json.dumps(options), result.name]
        process = subprocess.Popen(command)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if code:
            raise SystemExit(f"{case} failed with {options}")
        return [Figure(**plain) for plain in json.load(result)]


def carry_out(case: str, options: str, result: str) -> None:
    figures = CASES[case](**json.loads(options))
    plain = [vars(figure) for figure in figures or ()]
    Path(result).write_text(json.dumps(plain))


def check_disk(wanted: argparse.Namespace) -> None:
    """Raises SystemExit: all that a case writes is kept until the case is over."""
    systems = 1 + len(wanted.peers)
    needed = COPIES * systems * wanted.runs * wanted.rows * max(wanted.bytes)
    if not wanted.parts & set(RATES):
        needed = 0
    needed = DISK_SLACK * max(needed, COPIES * wanted.gb * 1e9 * ("memory" in wanted.parts))
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        raise SystemExit(
            f"{needed / 1e9:.0f} GB of free disk are needed in {tempfile.gettempdir()}, there are"
            f" {free / 1e9:.0f}: fewer --rows, one size of --bytes, or another TMPDIR"
        )


def measure(wanted: argparse.Namespace) -> list[Figure]:
    figures: list[Figure] = []
    table: dict[str, list[dict[str, Any]]] = {
        "rates": [
            {
                "rows": wanted.rows,
                "value_bytes": size,
                "compression": compression,
                "runs": wanted.runs,
                "peers": wanted.peers,
                "parts": sorted(wanted.parts & set(RATES)),
            }
            for size in wanted.bytes
            for compression in wanted.compression
        ],
        "typed": [{"rows": wanted.rows, "runs": wanted.runs, "peers": wanted.peers}],
        "projection": [{"rows": wanted.rows, "runs": wanted.runs}],
        "micro": [{"batches": wanted.batches}],
        "poll": [{"partitions": count} for count in (1, 1000)],
        "memory": [{"gb": wanted.gb}],
    }
    for case, cases in table.items():
        if wanted.parts & (set(RATES) if case == "rates" else {case}):
            for options in cases:
                found = in_process(case, options)
                show(found, case)
                figures += found
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="peers", default=",".join(contenders.PEERS))
    parser.add_argument("--only", dest="parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[200, 1024])
    parser.add_argument(
        "--compression", nargs="+", choices=["none", "lz4", "zstd"], default=["none", "zstd"]
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=100, help="of micro, one row each")
    parser.add_argument("--gb", type=float, default=5.0, help="size of the topic of memory")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    wanted.peers = [] if wanted.peers == "none" else wanted.peers.split(",")
    wanted.parts = set(wanted.parts.split(","))
    for given, known in ((wanted.peers, contenders.PEERS), (wanted.parts, PARTS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{', '.join(unknown)}: there are {', '.join(known)}")
    return wanted


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    wanted = arguments()
    if wanted.case:
        carry_out(*wanted.case)
        return 0
    check_disk(wanted)
    if wanted.parts & set(BESIDE_PEERS):
        try:
            contenders.install(wanted.peers)
        except JarsMissing as error:
            raise SystemExit(f"{error}; see --with") from None
    figures = measure(wanted)
    show(figures, f"Spark, {os.cpu_count()} cores")
    if wanted.json:
        wanted.json.write_text(json.dumps([figure.plain() for figure in figures], indent=1))
    print("command: python benchmarks/spark.py", *sys.argv[1:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
