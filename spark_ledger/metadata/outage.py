"""How long calls wait for a store that does not respond, and what is logged meanwhile.

Always true: a call waits until `timeout_s` after the outage began, and at least `call_timeout_s`.
An outage begins when contact is lost; or, on a connection without a response, with the oldest
waiting call. The next response ends it. Lines are logged only with a `timeout_s`, and while a call
waits: after NOTICE_S, every REPEAT_S, and at the end.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTICE_S = 5.0
REPEAT_S = 30.0

_log = logging.getLogger(__name__)


class Outage:
    """The outages of one connection, on its event loop. `subject` returns the store's name for
    people, with the known reason of its silence."""

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
        """Contact to the store was lost."""
        if self._lost_since_s is None:
            self._lost_since_s = self._loop.time()

    def on_contact(self) -> None:
        """There is contact to the store."""
        self._lost_since_s = None

    def on_response(self) -> None:
        """The store responded."""
        if self._reported_since_s is not None:
            silent_s = self._loop.time() - self._reported_since_s
            _log.warning("%s answers again, after %.0f s", self._subject(), silent_s)
            self._reported_since_s = None

    @contextmanager
    def call(self, purpose: str) -> Iterator[float]:
        """The time of one call; yields when it began."""
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
        """The loop's time until which a call waits that began at `began_s`."""
        since_s = began_s if self._lost_since_s is None else self._lost_since_s
        return max(began_s + self._call_timeout_s, since_s + self._timeout_s)

    def is_over(self, began_s: float) -> bool:
        """Whether that deadline has passed."""
        return self._loop.time() >= self.deadline_s(began_s)

    def error_text(self, purpose: str, began_s: float) -> str:
        """The text of the error of a call after its deadline."""
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
        """Log the calls that have waited for NOTICE_S; report again while calls wait."""
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
