"""Connections do not survive a fork: gRPC's threads stay with the parent."""

import os

from spark_ledger.errors import Unavailable

_connected_in: int | None = None
"""The process that first connected; forked children inherit it."""


def refuse_after_fork() -> None:
    """Raises Unavailable in a process forked from one that had called it."""
    global _connected_in
    if _connected_in is None:
        _connected_in = os.getpid()
    if _connected_in != os.getpid():
        raise Unavailable(
            f"process {os.getpid()} was forked from one that had connected ({_connected_in}), and"
            " gRPC does not survive a fork",
            "Start such processes with multiprocessing's 'spawn', or connect after the fork.",
        )
