"""What Linux says about a process: processor time, bytes written, the most memory it held."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system seconds it has used, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def written_bytes(pid: int) -> int:
    """Bytes it caused to be sent to the disk."""
    return _field(Path(f"/proc/{pid}/io"), "write_bytes")


def most_memory_mib(pid: int) -> float:
    """VmHWM: the most memory it ever held."""
    return _field(Path(f"/proc/{pid}/status"), "VmHWM") / 1024


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(f"no {name} in {path}")
