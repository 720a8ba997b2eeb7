"""Which Java runs ZooKeeper: the one that Spark would take (JAVA_HOME, then PATH), 17 or later."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from spark_ledger.errors import BadConfig

MAJOR_MIN = 17
_REMEDY = f"Install Java {MAJOR_MIN} or later and put it on PATH, or set JAVA_HOME to it."
_VERSION = re.compile(r'(?:JAVA_VERSION=|version )"(\d+)(?:\.(\d+))?')


def find_java() -> str:
    """The path of `java`. Raises errors.BadConfig saying what was found instead."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")
    if java is None:
        where = f"JAVA_HOME={home} holds no bin/java" if home else "there is no java on PATH"
        raise BadConfig(f"Java {MAJOR_MIN} or later is needed, and {where}", _REMEDY)
    text = _release_file(java) or _ask(java)
    major = major_version(text)
    if major is None or major < MAJOR_MIN:
        found = f"is Java {major}" if major else f"does not tell its version ({text.strip()!r})"
        raise BadConfig(f"Java {MAJOR_MIN} or later is needed, and {java} {found}", _REMEDY)
    return java


def major_version(text: str) -> int | None:
    """17 from what `java -version` or a JDK's `release` file says; 8 from "1.8.0"; None else."""
    match = _VERSION.search(text)
    if match is None:
        return None
    first, second = int(match.group(1)), match.group(2)
    return int(second) if first == 1 and second else first


def _release_file(java: str) -> str:
    """What the JDK says of itself beside its bin folder: quicker than starting it."""
    try:
        return (Path(java).resolve().parent.parent / "release").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _ask(java: str) -> str:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return answer.stderr + answer.stdout
