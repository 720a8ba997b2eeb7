"""What it takes to acknowledge a million messages one by one, in random order."""

import random
import resource
import time

from spark_ledger.broker.dispatch.acks import Acks

MESSAGES = 1_000_000


def main() -> None:
    offsets = list(range(MESSAGES))
    random.Random(1).shuffle(offsets)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    acks, most, began_s = Acks(0), 0, time.process_time()
    for offset in offsets:
        acks.add(offset, offset + 1)
        most = max(most, acks.memory.bytes)
    spent_s = time.process_time() - began_s
    assert acks.mark == MESSAGES
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    print(
        f"{MESSAGES:,} acks: {spent_s:.2f} CPU-s, {mib:.1f} MiB more, sets {most / 2**20:.2f} MiB"
    )


if __name__ == "__main__":
    main()
