"""What self-healing takes: copies made after a loss, what appends keep meanwhile, a pass over many
ledgers, and a process that has nothing to do.

    python benchmarks/repair.py                       5 GB, 100,000 ledgers
    python benchmarks/repair.py --gb 1 --ledgers 20000 --only copies,load
    python benchmarks/repair.py --json FILE

Copies are those of one of four bookies that is killed for good; beside them three processes that
copy files of as many bytes on the same disk, each MiB synced. `under load` is at the default rate,
beside the same appends without repair. A pass reads every ledger's record from a real ZooKeeper.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import processes
from benchmarks.figures import Figure, show
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.local import LocalCluster
from spark_ledger.metadata import autorecovery, ledger_record, paths
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.process import connect
from spark_ledger.repair import work_list
from spark_ledger.repair.auditor import Auditor

MIB = 1 << 20
ENTRY_BYTES = MIB
LEDGER_ENTRIES = 64
DELAY_S = 2.0
HOST = ("-m", "spark_ledger.cli.main", "autorecovery", "start")
COPY = """
import os, sys
source, target = sys.argv[1:]
with open(source, "rb") as read, open(target, "wb") as write:
    while part := read.read(1 << 20):
        write.write(part)
        write.flush()
        os.fdatasync(write.fileno())
"""


async def fill(ledgers: LedgerStore, size: int) -> int:
    """Ledgers of so many bytes together, closed; how many."""
    payload = os.urandom(ENTRY_BYTES)
    count = max(1, size // (ENTRY_BYTES * LEDGER_ENTRIES))
    for _ in range(count):
        writer = await ledgers.create(3, 3, 3)
        for _ in range(LEDGER_ENTRIES // 8):
            await asyncio.gather(*[writer.append([payload]) for _ in range(8)])
        await writer.close()
    return count


async def append_for(ledgers: LedgerStore, seconds: float) -> float:
    """MiB appended a second."""
    payload, done = os.urandom(64 << 10), 0
    writer = await ledgers.create(3, 3, 2)
    began = time.monotonic()
    while (taken := time.monotonic() - began) < seconds:
        await asyncio.gather(*[writer.append([payload]) for _ in range(16)])
        done += 16 * len(payload)
    await writer.close()
    return done / MIB / taken


async def listed(ledgers: LedgerStore, anything: bool) -> float:
    """When there is anything on the list, or nothing."""
    for _ in range(36_000):
        if bool(await work_list.listed_ledgers(ledgers.metadata)) == anything:
            return time.monotonic()
        await asyncio.sleep(0.1)
    raise TimeoutError("an hour")


async def healed(ledgers: LedgerStore, lost: str) -> tuple[float, float]:
    """When the first ledger came on the list, and when nothing names the bookie any more."""
    began = await listed(ledgers, True)
    ended = await listed(ledgers, False)
    async for ledger_id in ledgers.list():
        record = (await ledgers.record(ledger_id, fresh=True)).record
        assert not record.closed or not record.names(lost), record
    return began, ended


def copying(size: int) -> float:
    """MB/s of three processes that copy files, together."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.write_bytes(os.urandom(64 * MIB) * max(1, size // 3 // (64 * MIB)))
        began = time.monotonic()
        running = [
            subprocess.Popen([sys.executable, "-c", COPY, str(source), f"{folder}/{number}"])
            for number in range(3)
        ]
        for process in running:
            process.wait()
        return 3 * source.stat().st_size / 1e6 / (time.monotonic() - began)


def host(service_url: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, *HOST, "--service-url", service_url])


async def with_ledgers(service_url: str, work):  # type: ignore[no-untyped-def]
    ledgers = await connect(service_url)
    try:
        return await work(ledgers)
    finally:
        await ledgers.close()


def copies(size: int) -> list[Figure]:
    disks = copying(size)
    with LocalCluster(bookies=4, autorecovery=False) as cluster:
        url = cluster.service_url

        async def prepare(ledgers: LedgerStore) -> None:
            await autorecovery.change_settings(
                ledgers.metadata, lost_bookie_delay_s=DELAY_S, repair_bytes_per_s=0
            )
            await fill(ledgers, size)

        asyncio.run(with_ledgers(url, prepare))
        lost = cluster.bookies[0]
        process = host(url)
        time.sleep(5)
        cpu = processes.cpu_s(process.pid)
        lost.kill()
        began, ended = asyncio.run(with_ledgers(url, lambda ledgers: healed(ledgers, lost.id)))
        used = processes.cpu_s(process.pid) - cpu
        process.terminate()
        process.wait()
        copied = size * 3 / 4 / 1e6
        rate = copied / (ended - began)
        goal = min(100.0, 0.7 * disks)
        return [
            Figure("copies after a loss, unlimited", rate, "MB/s", goal, at_least=True),
            Figure("three processes that copy files, synced", disks, "MB/s"),
            Figure("CPU of the worker a GB copied", used / (copied / 1e3), "s"),
        ]


def load(size: int) -> list[Figure]:
    with LocalCluster(bookies=4, autorecovery=False) as cluster:
        url = cluster.service_url

        async def prepare(ledgers: LedgerStore) -> float:
            await autorecovery.change_settings(ledgers.metadata, lost_bookie_delay_s=DELAY_S)
            await fill(ledgers, size)
            lost.kill()
            await asyncio.sleep(8)  # its session ends
            return await append_for(ledgers, 15)

        async def beside(ledgers: LedgerStore) -> tuple[float, float]:
            await listed(ledgers, True)
            before = len(await work_list.listed_ledgers(ledgers.metadata))
            began = time.monotonic()
            rate = await append_for(ledgers, 15)
            done = before - len(await work_list.listed_ledgers(ledgers.metadata))
            seconds = time.monotonic() - began
            return rate, done * LEDGER_ENTRIES * ENTRY_BYTES / 1e6 / seconds

        lost = cluster.bookies[0]
        alone = asyncio.run(with_ledgers(url, prepare))
        process = host(url)
        rate, repaired = asyncio.run(with_ledgers(url, beside))
        process.terminate()
        process.wait()
        return [
            Figure("appends beside repair", rate, "MiB/s", 0.7, True, alone, "alone"),
            Figure("repair beside appends, default rate", repaired, "MB/s"),
        ]


def audit_pass(count: int) -> list[Figure]:
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        ids = [bookie.id for bookie in cluster.bookies]

        async def work(ledgers: LedgerStore) -> tuple[float, float]:
            async def make(ledger_id: int) -> None:
                record = LedgerRecord(
                    *(ledger_id, 3, 3, 2, (Fragment(0, (ids[0], ids[1], ids[2])),)),
                    *(RecordState.CLOSED, -1, 0, 0),
                )
                value = ledger_record.encode(record)
                await ledgers.metadata.create(paths.ledger(ledger_id), value, parents=True)

            await call_each(make, range(1, count + 1), 256)
            auditor = Auditor(ledgers, autorecovery.repair_tokens("none"))
            before = processes.cpu_s(os.getpid())
            began = time.monotonic()
            await auditor.look()
            return time.monotonic() - began, processes.cpu_s(os.getpid()) - before

        seconds, cpu = asyncio.run(with_ledgers(cluster.service_url, work))
        resident = _resident(os.getpid())
        per = f"a pass over {count:,} ledgers"
        return [
            Figure(per, seconds, "s", 60),
            Figure(f"{per}, CPU", cpu, "s"),
            Figure(f"{per}, memory of the whole process", resident, "MiB", 200),
        ]


def idle(seconds: float = 60) -> list[Figure]:
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        process = host(cluster.service_url)
        time.sleep(15)
        before = processes.cpu_s(process.pid)
        time.sleep(seconds)
        share = (processes.cpu_s(process.pid) - before) / seconds * 100
        resident = _resident(process.pid)
        process.terminate()
        process.wait()
        return [
            Figure("idle: share of a core", share, "%", 1),
            Figure("idle: memory", resident, "MiB", 100),
        ]


def _resident(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().split("\n") if "VmRSS" in x)
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=5)
    parser.add_argument("--ledgers", type=int, default=100_000)
    parser.add_argument("--only", default="copies,load,pass,idle")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    size = int(given.gb * 1e9)
    parts = {
        "copies": lambda: copies(size),
        "load": lambda: load(size),
        "pass": lambda: audit_pass(given.ledgers),
        "idle": idle,
    }
    figures = [figure for name in given.only.split(",") for figure in parts[name]()]
    show(figures, "Self-healing")
    if given.json:
        given.json.write_text(json.dumps([figure.plain() for figure in figures], indent=1))


if __name__ == "__main__":
    main()
