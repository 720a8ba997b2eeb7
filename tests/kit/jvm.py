"""What the tests' Spark is started with; with the classes that it finds ready, if they are there.

Always true: a JVM that finds an archive made by another Java, or of other jars, goes on without it.
"""

import sys
from pathlib import Path

# A JVM that lives for minutes earns back neither what its second compiler nor what its collector's
# threads take from a small machine; a fifth of what starting Spark costs is checking its classes.
UNCHECKED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
OPTIONS = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 {UNCHECKED}"
QUIET = "-Xlog:disable"  # no word on stdout about an archive that does not fit
FOLDER = Path(sys.prefix) / "share" / "spark-ledger" / "classes"
KINDS = ("spark", "delta")
"""Without and with Delta Lake's jars: the class path is part of what an archive is made for."""


def options(kind: str = "spark") -> str:
    """The JVM's options, with the archive of that kind if there is one."""
    there = archive(kind)
    return f"{OPTIONS} {QUIET} -XX:SharedArchiveFile={there}" if there.exists() else OPTIONS


def archive(kind: str) -> Path:
    return FOLDER / f"{kind}.jsa"
