"""The best rate of Java BookKeeper on this machine, E=3 Qw=3 Qa=2, synced.

Its own benchmark offers adds at a rate; offered too much it delivers less than it could. So the
rate is stepped up until two steps in a row bring less than the best one, and the best counts.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "peers" / "peers.sh"
STEPS = {
    1 << 10: (8_000, 12_000, 16_000, 20_000, 25_000, 32_000, 40_000),
    64 << 10: (600, 800, 1_000, 1_200, 1_500, 1_900, 2_400, 3_000, 3_800),
    1 << 20: (40, 55, 70, 85, 100, 120, 150, 190, 240, 300, 380),
}
WORSE_STEPS = 2
COMPLETIONS = re.compile(r"(\d+) completions in (\d+) milliseconds")


class NoPeer(Exception):
    """It cannot be installed or started here, or does not work."""


@contextmanager
def running() -> Iterator[None]:
    """Three bookies of it, on loopback. Raises NoPeer."""
    home = Path(os.environ.get("PEERS_HOME", Path.cwd() / ".peers"))
    try:
        if not (home / "bk" / "lib").is_dir():
            _peers("install")
        _peers("up", "bookkeeper")
        yield
    except (OSError, subprocess.CalledProcessError) as failure:
        raise NoPeer(f"Java BookKeeper does not run here: {failure}") from failure
    finally:
        _peers("down")


def best_rate(entry_bytes: int) -> float:
    """Entries/s of its best step. To be called while it is `running`. Raises NoPeer."""
    best, worse = 0.0, 0
    for offered in STEPS[entry_bytes]:
        said = _peers("bk-bench", str(entry_bytes), str(offered))
        found = COMPLETIONS.search(said)
        rate = 1000 * int(found[1]) / int(found[2]) if found else 0.0
        print(f"  Java, {entry_bytes} B, offered {offered}/s: {rate:,.0f}/s", flush=True)
        worse = worse + 1 if rate < best else 0
        best = max(best, rate)
        if worse == WORSE_STEPS:
            break
    if not best:
        raise NoPeer(f"Java BookKeeper took no add of {entry_bytes} bytes: is its disk full?")
    return best


def _peers(*arguments: str) -> str:
    environment = dict(os.environ, PYTHON=sys.executable)
    command = [str(SCRIPT), *arguments]
    return subprocess.run(
        command, check=True, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
