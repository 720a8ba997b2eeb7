"""Adds through a ledger client: how many a second, how long one takes, what is written for it.

One ledger, one client process, `append_async`, E=3 Qw=3 Qa=2, synced before every acknowledgement.
"""

import multiprocessing
import os
import statistics
import time
from typing import NamedTuple

from benchmarks.processes import cpu_s, written_bytes
from spark_ledger import LedgerClient
from spark_ledger.config import client_config
from spark_ledger.local import LocalCluster

MB = 1e6
IN_FLIGHT = {1 << 10: 1_000_000, 64 << 10: 16_000_000, 1 << 20: 8_000_000}
BURST_BYTES = 64 << 10  # appended between two looks at the clock
SINGLE_ADDS, WARM_UP_ADDS = 2_000, 200
FLUSHED_S = 7.0  # a flush begins after 5 s at the latest


class Rate(NamedTuple):
    """Medians of the runs. CPU-seconds are of the client and of one bookie, for a million entries
    or, of entries of 64 KiB and more, for a GB: steadier than the rates on a busy machine."""

    entries_per_s: float
    mb_per_s: float
    client_cpu_s: float
    bookie_cpu_s: float


class Run(NamedTuple):
    entries: int
    seconds: float
    client_cpu_s: float
    bookie_cpu_s: float


def rate(cluster: LocalCluster, entry_bytes: int, seconds: float, runs: int) -> Rate:
    """Append for `seconds`, `runs` times."""
    config = client_config(inflight_bytes=IN_FLIGHT[entry_bytes])
    with LedgerClient(cluster.service_url, config) as client:
        done = [one_run(cluster, client, entry_bytes, seconds) for _ in range(runs)]
    unit = 1e6 if entry_bytes < 64 << 10 else 1e9 / entry_bytes
    entries_per_s = statistics.median(run.entries / run.seconds for run in done)
    return Rate(
        entries_per_s,
        entries_per_s * entry_bytes / MB,
        statistics.median(unit * run.client_cpu_s / run.entries for run in done),
        statistics.median(unit * run.bookie_cpu_s / run.entries for run in done),
    )


def one_run(cluster: LocalCluster, client: LedgerClient, entry_bytes: int, seconds: float) -> Run:
    payload = os.urandom(entry_bytes)
    burst = max(1, BURST_BYTES // entry_bytes)
    entries = 0
    before, own = bookies_cpu_s(cluster), time.process_time()
    with client.create_ledger(3, 3, 2) as writer:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            for _ in range(burst):
                last = writer.append_async(payload)
            entries += burst
        last.result()
        took = time.monotonic() - began
    used = bookies_cpu_s(cluster) - before
    return Run(entries, took, time.process_time() - own, used / len(cluster.bookies))


CLIENTS = 2


def host_rate(cluster: LocalCluster, entry_bytes: int, seconds: float) -> tuple[float, float]:
    """Adds a second of all bookies of one host, each entry on one of them, from two client
    processes; and adds a processor-second of a bookie."""
    before = bookies_cpu_s(cluster)
    given = (cluster.service_url, len(cluster.bookies), entry_bytes, seconds)
    with multiprocessing.get_context("spawn").Pool(CLIENTS) as pool:
        done = pool.starmap(_striped, [given] * CLIENTS)
    entries = sum(entries for entries, _ in done)
    rate = sum(entries / took for entries, took in done)
    return rate, entries / (bookies_cpu_s(cluster) - before)


def _striped(service_url: str, bookies: int, entry_bytes: int, seconds: float) -> tuple[int, float]:
    payload = os.urandom(entry_bytes)
    burst = max(1, BURST_BYTES // entry_bytes)
    entries = 0
    config = client_config(inflight_bytes=IN_FLIGHT[entry_bytes])
    with (
        LedgerClient(service_url, config) as client,
        client.create_ledger(bookies, 1, 1) as writer,
    ):
        began = time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            for _ in range(burst):
                last = writer.append_async(payload)
            entries += burst
        last.result()
    return entries, took


def single_adds_ms(cluster: LocalCluster) -> list[float]:
    """One append of 1 KiB after the other, each awaited; ascending."""
    payload = os.urandom(1024)
    times = []
    with LedgerClient(cluster.service_url) as client, client.create_ledger(3, 3, 2) as writer:
        for _ in range(WARM_UP_ADDS + SINGLE_ADDS):
            began = time.perf_counter()
            writer.append(payload)
            times.append(1e3 * (time.perf_counter() - began))
    return sorted(times[WARM_UP_ADDS:])


def write_amplification(cluster: LocalCluster, seconds: float) -> float:
    """Bytes that a bookie wrote for each byte it acknowledged: journal, entry log and index, when
    all is flushed. Entries of 64 KiB."""
    pids = [bookie.pid for bookie in cluster.bookies if bookie.pid is not None]
    config = client_config(inflight_bytes=IN_FLIGHT[64 << 10])
    time.sleep(FLUSHED_S)  # what others wrote before
    before = sum(map(written_bytes, pids))
    with LedgerClient(cluster.service_url, config) as client:
        entries = one_run(cluster, client, 64 << 10, seconds).entries
    time.sleep(FLUSHED_S)
    return (sum(map(written_bytes, pids)) - before) / len(pids) / (entries * (64 << 10))


def bookies_cpu_s(cluster: LocalCluster) -> float:
    return sum(cpu_s(bookie.pid) for bookie in cluster.bookies if bookie.pid is not None)
