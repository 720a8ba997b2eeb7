"""A ledger on real disks, and damage in the files of its bookies."""

from collections.abc import Iterator
from pathlib import Path

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBookie
from spark_ledger.process import background_loop, ledger_store
from spark_ledger.repair.limbo import list_limbo

SETTINGS: dict[str, object] = {"flush_interval_s": 0.2, "limbo_check_s": 600, "refresh_s": 600}


PAYLOADS = [b"payload %03d " % number * 40 for number in range(30)]


def write(client: LedgerClient, count: int = 1) -> list[int]:
    """Closed ledgers of PAYLOADS on all three bookies."""
    found = []
    for _ in range(count):
        with client.create_ledger(3, 3, 2) as writer:
            for payload in PAYLOADS:
                writer.append(payload)
        found.append(writer.ledger_id)
    return found


def files(bookie: LocalBookie, pattern: str) -> list[Path]:
    return sorted(Path(bookie.folder).rglob(pattern))


def flip_in_the_entry_log(bookie: LocalBookie, payload: bytes) -> None:
    """One byte of every copy of the entry."""
    for path in files(bookie, "entrylog/*.log"):
        data = path.read_bytes()
        for at in _places(data, payload):
            with path.open("r+b") as file:
                file.seek(at + 7)
                file.write(bytes([data[at + 7] ^ 1]))


def _places(data: bytes, wanted: bytes) -> Iterator[int]:
    at = -1
    while (at := data.find(wanted, at + 1)) >= 0:
        yield at


def is_flushed(bookie: LocalBookie, payload: bytes) -> bool:
    return any(payload in path.read_bytes() for path in files(bookie, "entrylog/*.log"))


def in_limbo(cluster: LocalCluster) -> dict[int, str]:
    found = background_loop().run(list_limbo(ledger_store(cluster.service_url).metadata))
    return {one.ledger_id: one.bookie_id for one in found}
