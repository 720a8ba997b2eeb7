"""When the demo breaks what, as plain decisions.

Always true: every fault happens once, in the order of PLAN, and none before its share of the rows
has been replayed; the replay is killed only while a batch is under way in its checkpoint.
"""

from enum import Enum
from pathlib import Path


class Fault(Enum):
    KILL_BOOKIE = "kill a bookie"
    KILL_REPLAY = "kill the replay in mid-batch"
    START_BOOKIE = "start the bookie again"


PLAN = ((0.25, Fault.KILL_BOOKIE), (0.5, Fault.KILL_REPLAY), (0.7, Fault.START_BOOKIE))


class Faults:
    def __init__(self) -> None:
        self._left = list(PLAN)

    @property
    def left(self) -> list[Fault]:
        return [fault for _share, fault in self._left]

    def due(self, share_replayed: float) -> Fault | None:
        """The fault whose turn it is, if its share is reached; `done` takes it off."""
        if self._left and share_replayed >= self._left[0][0]:
            return self._left[0][1]
        return None

    def done(self, fault: Fault) -> None:
        assert self._left and self._left[0][1] is fault, f"{fault} is not the next fault"
        self._left.pop(0)


def batch_under_way(checkpoint: Path) -> int | None:
    """The batch whose offsets Spark has written and whose end it has not, None when there is none.

    Spark writes offsets/N before it runs batch N, and commits/N after.
    """
    planned = _numbers(checkpoint / "offsets")
    ended = _numbers(checkpoint / "commits")
    last = max(planned, default=-1)
    return last if last > max(ended, default=-1) else None


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
