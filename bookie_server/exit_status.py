"""How a bookie's process ends: which status says what, and the one line that goes with it.

Always true: a status other than STOPPED comes with one line on standard error that says what
happened and what to do; a failed start is never STOPPED (BK#4815). The process leaves at once,
whatever threads are still at work: what counts has been synced.
"""

import contextlib
import logging
import os
import sys
from typing import NoReturn

STOPPED, DEFECT, BAD_CONFIG, NO_METADATA, CANNOT_LISTEN, ORPHANED = 0, 1, 2, 3, 4, 5
DISK_FAILED, WRONG_DISKS, BAD_DISKS, HASTENED = 6, 7, 8, 9


def leave(status: int, why: str) -> NoReturn:
    """End the process."""
    with contextlib.suppress(OSError):  # the log may be on the disk that failed
        if status != STOPPED:
            print(f"bookie_server: {' '.join(why.split())}", file=sys.stderr)
        sys.stderr.flush()
        logging.shutdown()
    os._exit(status)
