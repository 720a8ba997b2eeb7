"""How long a read takes while a bookie hangs: 64 MiB from three bookies, one under SIGSTOP.

    python benchmarks/hung_bookie.py

The client was connected to all of them and had read the ledger before. Prints the median of three
reads with all bookies running, of three whose first requests meet the hung one, and of three right
after those, when the client knows about it.
"""

import signal
import statistics
import time

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster

MIB = 1 << 20
READ_BYTES = 64 * MIB


def main() -> None:
    with (
        LocalCluster(bookies=3, autorecovery=False) as cluster,
        LedgerClient(cluster.service_url) as client,
    ):
        for entry_bytes in (MIB, 64 << 10):
            ledger_id = write(client, entry_bytes)
            healthy = [timed_read(client, ledger_id, entry_bytes) for _ in range(3)]
            first, next_ = [], []
            for _ in range(3):
                with LedgerClient(cluster.service_url) as reader:
                    timed_read(reader, ledger_id, entry_bytes)
                    cluster.bookies[0].signal(signal.SIGSTOP)
                    try:
                        first.append(timed_read(reader, ledger_id, entry_bytes))
                        next_.append(timed_read(reader, ledger_id, entry_bytes))
                    finally:
                        cluster.bookies[0].signal(signal.SIGCONT)
            kinds = {"all run": healthy, "one hangs": first, "once more": next_}
            figures = ", ".join(f"{k} {statistics.median(v):.2f} s" for k, v in kinds.items())
            print(f"64 MiB in entries of {entry_bytes >> 10} KiB: {figures}", flush=True)


def write(client: LedgerClient, entry_bytes: int) -> int:
    with client.create_ledger(3, 3, 2) as writer:
        adding = [writer.append_async(bytes(entry_bytes)) for _ in range(READ_BYTES // entry_bytes)]
        for add in adding:
            add.result()
    return writer.ledger_id


def timed_read(client: LedgerClient, ledger_id: int, entry_bytes: int) -> float:
    reader = client.open_ledger(ledger_id)
    began = time.monotonic()
    read = sum(len(payload) for _, payload in reader.read(0, READ_BYTES // entry_bytes - 1))
    assert read == READ_BYTES
    return time.monotonic() - began


if __name__ == "__main__":
    main()
