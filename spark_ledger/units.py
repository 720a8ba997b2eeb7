"""Units of sizes and times: how users give them, and how sizes are shown.

Always true: a unit of size is 1024 of the next smaller one; no amount is rounded or guessed.
"""

import re
from collections.abc import Mapping

KIB, MIB, GIB, TIB = (1 << 10 * power for power in range(1, 5))
BYTES = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
S = {unit: ms // 1000 for unit, ms in MS.items() if ms >= 1000}
SPARK_BYTES = {"b": 1} | {f"{u}{b}": BYTES[u] for u in "kmgt" for b in ("", "b")}
SPARK_MS = MS | {"min": MS["m"]}
_AMOUNT = re.compile(r"(\d{1,19})\s*([A-Za-z]*)", re.ASCII)


def parse(text: str, units: Mapping[str, int]) -> int | None:
    """The amount in a text that is a number, or a number with one of the units; None for any other
    text."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or (match[2] and match[2] not in units):
        return None
    return int(match[1]) * (units[match[2]] if match[2] else 1)


def shown(size_bytes: object) -> str:
    """A size in GiB, below 1 GiB in MiB; "" if it is not known."""
    if not isinstance(size_bytes, int):
        return ""
    unit, name = (MIB, "MiB") if size_bytes < GIB else (GIB, "GiB")
    return f"{size_bytes / unit:.1f} {name}"
