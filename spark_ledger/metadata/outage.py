"""How long calls wait for a store that does not respond, and what is logged meanwhile.

Always true: a call waits until `timeout_s` after the outage began, and at least `call_timeout_s`.
An outage begins when contact is lost or, on a connection without responses, with the oldest waiting
call; the next response ends it. If `timeout_s` is set, a call that waits is logged after NOTICE_S,
every REPEAT_S, and at the end.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE_S = 5.0
REPEAT_S = 30.0

_log = logging.getLogger(__name__)


class Outage:
    """The outages of one connection, on its event loop. `subject` returns the store's name, and why
    it is silent if that is known."""

    def __init__(self, subject: Callable[[], str], call_timeout_s: float, timeout_s: float) -> None:
        self._subject = subject
        self._call_timeout_s = call_timeout_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._lost_since_s: float | None = self._loop.time()
        self._calls: dict[object, tuple[float, str]] = {}  # oldest first: (began_s, purpose)
        self._reported_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def on_contact_lost(self) -> None:
        if self._lost_since_s is None:
            self._lost_since_s = self._loop.time()

    def on_contact(self) -> None:
        self._lost_since_s = None

    def on_response(self) -> None:
        if self._reported_since_s is not None:
            silent_s = self._loop.time() - self._reported_since_s
            _log.warning("%s answers again, after %.0f s", self._subject(), silent_s)
            self._reported_since_s = None

    @contextmanager
    def call(self, purpose: str) -> Iterator[float]:
        """Around one call, which is logged as `purpose`; yields the time at which it began."""
        began_s = self._loop.time()
        call = object()
        self._calls[call] = (began_s, purpose)
        if self._timer is None and self._timeout_s:
            self._timer = self._loop.call_later(NOTICE_S, self._report)
        try:
            yield began_s
        finally:
            del self._calls[call]

    def deadline_s(self, began_s: float) -> float:
        """Until when a call waits that began at `began_s`; both are times of the loop's clock."""
        since_s = began_s if self._lost_since_s is None else self._lost_since_s
        return max(began_s + self._call_timeout_s, since_s + self._timeout_s)

    def is_over(self, began_s: float) -> bool:
        """Whether that deadline has passed."""
        return self._loop.time() >= self.deadline_s(began_s)

    def error_text(self, purpose: str, began_s: float) -> str:
        """The error text of a call that has passed its deadline."""
        text = (
            f"{self._subject()} did not answer for {self._loop.time() - began_s:.0f} s ({purpose})"
        )
        if self._timeout_s:
            text += f"; option outageTimeout is {self._timeout_s:g} s"
        return text

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        """Log that calls have waited for NOTICE_S, again and again as long as calls wait."""
        self._timer = None
        if not self._calls:
            return
        now_s = self._loop.time()
        began_s, purpose = next(iter(self._calls.values()))
        pause_s = began_s + NOTICE_S - now_s
        if pause_s <= 0:
            since_s = began_s if self._lost_since_s is None else self._lost_since_s
            self._reported_since_s = (
                since_s if self._reported_since_s is None else self._reported_since_s
            )
            _log.warning(
                "%s has not answered for %.0f s; calls that wait: %d, the oldest for %s, for %.0f s"
                " more (option outageTimeout is %g s)",
                *(self._subject(), now_s - since_s, len(self._calls), purpose),
                *(max(0.0, self.deadline_s(began_s) - now_s), self._timeout_s),
            )
            pause_s = REPEAT_S
        self._timer = self._loop.call_later(pause_s, self._report)
