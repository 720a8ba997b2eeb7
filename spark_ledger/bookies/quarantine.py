"""Which bookies are chosen last, because they lately gave no response or a slow one.

Always true: no bookie is excluded here, only put last; a bookie is *in doubt* from a call without
response until DOUBT_S later or its next response, whichever is first, and *overtaken* for as long
from a read that another bookie delivered sooner; it is *in quarantine* once enough calls failed or
were slow within the window, and a response in between does not end that. Calls that fail together
(all frames under way to a bookie that dies) count once. Memory: a few numbers a bookie.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

DOUBT_S = 10.0
APART_S = 1.0  # failures closer than this to the one before are the same trouble


@dataclass(slots=True)
class Standing:
    """What is held against one bookie. Times are seconds of the loop's clock."""

    doubted_at: float | None = None
    overtaken_at: float | None = None
    troubles: deque[float] = field(default_factory=deque)
    quarantined_until: float = 0.0


class Quarantine:
    """Fed with the outcome of every call. `clock` gives the seconds that all times here are in.

    `failures` failed or slow calls within `window_s` put a bookie in quarantine for `quarantine_s`
    after the last of them (0: never).
    """

    def __init__(
        self, failures: int, window_s: float, quarantine_s: float, clock: Callable[[], float]
    ) -> None:
        self._failures = failures
        self._window_s = window_s
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._standings: dict[str, Standing] = {}

    # -- what happened ------------------------------------------------------------------------

    def failed(self, bookie_id: str) -> None:
        """A call got no response."""
        standing = self._trouble(bookie_id)
        standing.doubted_at = self._clock()

    def slow(self, bookie_id: str) -> None:
        """A response came, but took too long."""
        standing = self._trouble(bookie_id)
        standing.doubted_at = standing.overtaken_at = None

    def overtaken(self, bookie_id: str) -> None:
        """A read was given up, because another bookie, asked later, delivered it sooner. It may
        only have had more to do: it is chosen last, and is a spare where there is no other."""
        self._standings.setdefault(bookie_id, Standing()).overtaken_at = self._clock()

    def responded(self, bookie_id: str) -> None:
        """A response came in good time, whatever it says."""
        standing = self._standings.get(bookie_id)
        if standing is not None:
            standing.doubted_at = standing.overtaken_at = None

    # -- what is chosen last ------------------------------------------------------------------

    def suspects(self) -> list[str]:
        """Bookies in doubt, overtaken or in quarantine now, by id."""
        return [bookie for bookie in sorted(self._standings) if self.why(bookie)]

    def in_doubt(self) -> list[str]:
        """Bookies that lately gave no response and have given none since, by id."""
        return [bookie for bookie in sorted(self._standings) if self._doubted(bookie)]

    def why(self, bookie_id: str) -> str:
        """For an error text: why the bookie is chosen last; "" if it is not."""
        standing = self._standings.get(bookie_id)
        if standing is None:
            return ""
        left_s = standing.quarantined_until - self._clock()
        if left_s > 0:
            return f"in quarantine for another {left_s:.0f} s: it failed or was slow"
        if self._doubted(bookie_id):
            return "gave no answer lately"
        return "another responded sooner" if self._lately(standing.overtaken_at) else ""

    def _doubted(self, bookie_id: str) -> bool:
        return self._lately(self._standings[bookie_id].doubted_at)

    def _lately(self, at: float | None) -> bool:
        return at is not None and self._clock() - at < DOUBT_S

    def _trouble(self, bookie_id: str) -> Standing:
        standing = self._standings.setdefault(bookie_id, Standing())
        now, troubles = self._clock(), standing.troubles
        if troubles and now - troubles[-1] < APART_S:
            return standing
        troubles.append(now)
        while len(troubles) > self._failures or now - troubles[0] > self._window_s:
            troubles.popleft()
        if len(troubles) == self._failures and self._quarantine_s > 0:
            standing.quarantined_until = now + self._quarantine_s
        return standing
