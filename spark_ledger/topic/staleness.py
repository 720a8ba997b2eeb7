"""Which intents count as abandoned: those whose heartbeat this observer saw stand still. Pure.

Always true: only what one observer saw in one unbroken session counts, never a difference of two
hosts' clocks; many that fall silent together are a sign of trouble with the network or with the
metadata store, not of their death (hazard 44): then nothing is condemned for a while, and after it
only a few at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TOGETHER_PART_MAX = 0.2  # of the open intents
TOGETHER_MIN = 2
PAUSE_LEASES = 4
UNUSED_LEASES = 96
"""A batch job's writer is made when its query is planned. What it is to write may take long to be
computed, and until its first task begins nobody shows a heartbeat, or has a ledger."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """Since when, in which session, an intent's heartbeat has had this version."""

    heartbeat: int
    since_s: float
    session: int

    def same(self, heartbeat: int, session: int) -> bool:
        return (self.heartbeat, self.session) == (heartbeat, session)


@dataclass(frozen=True, slots=True)
class Silence:
    """What to do about the silent: `condemn` these now; `since_s` is since when so many have been
    silent together (None: they are not), `alarm` what to say about it."""

    condemn: tuple[str, ...]
    since_s: float | None = None
    alarm: str = ""


def lease_s(kind: str, heartbeats: int, lease_s: float) -> float:
    """How long an intent of this kind may show no further heartbeat after so many."""
    return UNUSED_LEASES * lease_s if kind == "batch" and heartbeats == 0 else lease_s


def judge(
    opened: int, silent: Sequence[str], since_s: float | None, now_s: float, lease_s: float
) -> Silence:
    """`silent` have shown no heartbeat for a lease, of `opened` intents that are open; `since_s`
    is that of the last judgement."""
    if len(silent) < TOGETHER_MIN or len(silent) <= opened * TOGETHER_PART_MAX:
        return Silence(tuple(silent))
    since_s = now_s if since_s is None else since_s
    left_s = since_s + PAUSE_LEASES * lease_s - now_s
    if left_s > 0:
        alarm = (
            f"{len(silent)} of {opened} writers fell silent together: look whether they can reach"
            f" the metadata store; they are taken as gone, a few at a time, from {left_s:.0f} s on"
        )
        return Silence((), since_s, alarm)
    few = max(1, int(opened * TOGETHER_PART_MAX))
    return Silence(tuple(silent[:few]), since_s)
