"""Reading one ledger among many back from a cold disk.

    python benchmarks/cold_read.py [--ledgers 200] [--entries 64] [--reads 9] [--spy read.svg]
        [--entry 262144] [--large 32768] [--alone]

One bookie takes `ledgers` ledgers of `entries` entries of 256 KiB, written in turn. Entries of
`large` bytes (the setting large_entry_bytes) and more lie on the disk as they came, others sorted
by ledger as far as a flush reaches: no two neighbours in a ledger are neighbours on the disk by
more than that. The bookie is restarted and its files are dropped from the page cache
(posix_fadvise). With `--alone` one ledger is written after the other, each entry when the one
before it was acknowledged: each is a write of its own then, filled up to a block. Then one client
process reads one ledger after the other, each cold. Prints the median of their MB/s, and the
processor time that bookie and client spent on each GB. `--spy` records the bookie with py-spy.
"""

import argparse
import os
import statistics
import subprocess
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster

ENTRY_BYTES = 256 << 10
LARGE_BYTES = 32 << 10  # as it is by default
IN_FLIGHT_BYTES = 8 << 20
MB = 1e6


class Figures(NamedTuple):
    """MB/s (median, lowest, highest of the ledgers read) and CPU-seconds for each GB."""

    mb_per_s: float
    slowest: float
    fastest: float
    bookie_cpu_s_per_gb: float
    client_cpu_s_per_gb: float


def measure(
    ledgers: int = 200,
    entries: int = 64,
    reads: int = 9,
    spy: str = "",
    *,
    entry_bytes: int = ENTRY_BYTES,
    large_bytes: int = LARGE_BYTES,
    alone: bool = False,
) -> Figures:
    """Write, restart, drop, read."""
    with LocalCluster(
        bookies=1, bookie_settings={"large_entry_bytes": large_bytes}, autorecovery=False
    ) as cluster:
        with LedgerClient(cluster.service_url) as client:
            writing = write_alone if alone else write
            ids = writing(client, ledgers, entries, entry_bytes)
        bookie = cluster.bookies[0]
        bookie.stop()
        drop_from_page_cache(bookie.folder)
        bookie.start()
        assert bookie.pid is not None
        with LedgerClient(cluster.service_url) as client:
            size = entries * entry_bytes
            read(client, ids[0], size)  # connections, metadata
            watching = spied(bookie.pid, spy)
            cpu, own = cpu_s(bookie.pid), time.process_time()
            chosen = [ids[1 + number * (ledgers - 1) // reads] for number in range(reads)]
            rates = sorted(size / MB / read(client, one, size) for one in chosen)
            gb = reads * size / 1e9
            used = Figures(
                statistics.median(rates),
                *(rates[0], rates[-1]),
                (cpu_s(bookie.pid) - cpu) / gb,
                (time.process_time() - own) / gb,
            )
            if watching is not None:
                watching.wait()
            return used


def write(client: LedgerClient, ledgers: int, entries: int, entry_bytes: int) -> list[int]:
    payload = os.urandom(entry_bytes)
    writers = [client.create_ledger(1, 1, 1) for _ in range(ledgers)]
    adding: deque[Future[int]] = deque()
    for _ in range(entries):
        for writer in writers:
            adding.append(writer.append_async(payload))
            if len(adding) * entry_bytes > IN_FLIGHT_BYTES:
                adding.popleft().result()
    for add in adding:
        add.result()
    for writer in writers:
        writer.close()
    return [writer.ledger_id for writer in writers]


def write_alone(client: LedgerClient, ledgers: int, entries: int, entry_bytes: int) -> list[int]:
    payload = os.urandom(entry_bytes)
    ids = []
    for _ in range(ledgers):
        with client.create_ledger(1, 1, 1) as writer:
            for _ in range(entries):
                writer.append(payload)
        ids.append(writer.ledger_id)
    return ids


def read(client: LedgerClient, ledger_id: int, size: int) -> float:
    """Seconds that it takes to read all `size` bytes, the look at the ledger's record included."""
    began = time.monotonic()
    reader = client.open_ledger(ledger_id)
    total = sum(len(payload) for _, payload in reader.read(0, reader.last_add_confirmed))
    assert total == size
    return time.monotonic() - began


def drop_from_page_cache(folder: Path) -> None:
    """What the files below hold comes from the disk when it is read next."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spied(pid: int, output: str) -> "subprocess.Popen[bytes] | None":
    if not output:
        return None
    command = ["py-spy", "record", "-n", "-t", "-f", "raw", "-d", "4", "-o", output, "-p", str(pid)]
    return subprocess.Popen(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ledgers", type=int, default=200)
    parser.add_argument("--entries", type=int, default=64)
    parser.add_argument("--reads", type=int, default=9)
    parser.add_argument("--spy", default="")
    parser.add_argument("--entry", type=int, default=ENTRY_BYTES)
    parser.add_argument("--large", type=int, default=LARGE_BYTES)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    figures = measure(
        options.ledgers,
        options.entries,
        options.reads,
        options.spy,
        entry_bytes=options.entry,
        large_bytes=options.large,
        alone=options.alone,
    )
    print(
        f"cold read of entries of {options.entry / 1024:g} KiB, one ledger of {options.ledgers}:"
        f" {figures.mb_per_s:.0f} MB/s (target 300; {figures.slowest:.0f} to"
        f" {figures.fastest:.0f}), CPU-seconds a GB: bookie {figures.bookie_cpu_s_per_gb:.2f},"
        f" client {figures.client_cpu_s_per_gb:.2f}"
    )


if __name__ == "__main__":
    main()
