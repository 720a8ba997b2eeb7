"""How long calls to a store that does not answer wait, and what is logged meanwhile.

Always true: a call waits until `timeout_s` after the outage began, and `call_timeout_s` at least.
An outage begins when contact is lost or, where the connection stands and nothing comes, with the
oldest call without a response; the next response ends it. Lines are logged only where there is a
`timeout_s`, and while a call waits: after NOTICE_S, every REPEAT_S, and at the end.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE_S = 5.0
REPEAT_S = 30.0

_log = logging.getLogger(__name__)


class Outage:
    """Of one connection, on its event loop; `subject` names the store for people, with what it does
    instead of answering where that is known."""

    def __init__(self, subject: Callable[[], str], call_timeout_s: float, timeout_s: float) -> None:
        self._subject = subject
        self._call_timeout_s = call_timeout_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._lost_s: float | None = self._loop.time()
        self._calls: dict[object, tuple[float, str]] = {}  # oldest first: since when, what for
        self._told_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def lost(self) -> None:
        """There is no contact."""
        if self._lost_s is None:
            self._lost_s = self._loop.time()

    def regained(self) -> None:
        """There is contact again."""
        self._lost_s = None

    def responded(self) -> None:
        """A response came."""
        if self._told_s is not None:
            away_s = self._loop.time() - self._told_s
            _log.warning("%s answers again, after %.0f s", self._subject(), away_s)
            self._told_s = None

    @contextmanager
    def call(self, doing: str) -> Iterator[float]:
        """One call, whatever becomes of it: when it began."""
        began_s = self._loop.time()
        call = object()
        self._calls[call] = (began_s, doing)
        if self._timer is None and self._timeout_s:
            self._timer = self._loop.call_later(NOTICE_S, self._look)
        try:
            yield began_s
        finally:
            del self._calls[call]

    def until(self, began_s: float) -> float:
        """How long a call that began then waits."""
        since_s = began_s if self._lost_s is None else self._lost_s
        return max(began_s + self._call_timeout_s, since_s + self._timeout_s)

    def over(self, began_s: float) -> bool:
        """Whether a call that began then has waited long enough."""
        return self._loop.time() >= self.until(began_s)

    def why(self, doing: str, began_s: float) -> str:
        """The text of the error of a call that waited long enough."""
        text = f"{self._subject()} did not answer for {self._loop.time() - began_s:.0f} s ({doing})"
        if self._timeout_s:
            text += f"; option outageTimeout is {self._timeout_s:g} s"
        return text

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Say what waits, if it has for long; look again while something may."""
        self._timer = None
        if not self._calls:
            return
        now_s = self._loop.time()
        began_s, doing = next(iter(self._calls.values()))
        pause_s = began_s + NOTICE_S - now_s
        if pause_s <= 0:
            since_s = began_s if self._lost_s is None else self._lost_s
            self._told_s = since_s if self._told_s is None else self._told_s
            _log.warning(
                "%s has not answered for %.0f s; calls that wait: %d, the oldest for %s, for %.0f s"
                " more (option outageTimeout is %g s)",
                *(self._subject(), now_s - since_s, len(self._calls), doing),
                *(max(0.0, self.until(began_s) - now_s), self._timeout_s),
            )
            pause_s = REPEAT_S
        self._timer = self._loop.call_later(pause_s, self._look)
