"""Bookies, brokers and the other servers of an embedded cluster as forks of a process that has
imported everything (commands.py): most of what a small cluster costs is starting Python for each.
Its ZooKeeper finds its classes ready (jvm.py).

It stands in for the `subprocess` of spark_ledger/local/processes.py. A command that is no module
which can be forked is started as ever, and so are all servers of a cluster that another process
makes, as `spark-ledger up` does.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from subprocess import PIPE, TimeoutExpired
from typing import IO, Any

from spark_ledger.local import embedded_zookeeper, processes
from tests.kit import commands, jvm

__all__ = ["PIPE", "Popen", "TimeoutExpired", "used"]


def Popen(command: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], **given: Any):
    """As subprocess.Popen, for pipes to its standard input and from its standard output."""
    python, *words = command
    if python != sys.executable or words[:1] != ["-m"] or words[1] not in commands.LOADED:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, **given)
    (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
    try:
        session = given["start_new_session"]
        standard = (their_in, their_out, stderr.fileno())
        running = commands.server(words[1]).start(words[2:], standard, session=session)
    finally:
        os.close(their_in)
        os.close(their_out)
    running.stdin, running.stdout = os.fdopen(our_in, "wb"), os.fdopen(our_out, "rb")
    return running


def used() -> None:
    """By all clusters that this process makes from now on."""
    processes.subprocess = sys.modules[__name__]  # type: ignore[assignment]
    options = jvm.options(jvm.ZOOKEEPER).split()
    embedded_zookeeper.JVM_OPTIONS = (*embedded_zookeeper.JVM_OPTIONS, *options)
