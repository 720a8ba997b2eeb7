"""What is known of where a subscription is in one partition: by acknowledgements and seeks.

Always true: whether an acknowledgement came to the broker nobody knows, so what was acknowledged
may come again; while a seek or a deletion has no answer, and after one that got none, nothing is
known until a later seek is answered. A broker that seeks sends all consumers away, so what those of
before acknowledge changes nothing.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Session(NamedTuple):
    """Of a consumer: when it asked for the subscription, and when that was answered."""

    asked_s: float
    begun_s: float


@dataclass
class Acked:
    """Of all consumers of the subscription."""

    up_to: int = 0
    single: dict[int, None] = field(default_factory=dict)
    with_receipt: dict[int, float] = field(default_factory=dict)
    """When its receipt came, by offset."""
    sure: bool = True
    asking: bool = False
    sought: tuple[int, int] | None = None
    """What comes first after a seek holds one of these two offsets, or one between them."""
    came: dict[int, None] = field(default_factory=dict)
    """Offsets that came to a consumer, of those that share it by keys."""
    last_of_key: dict[str, int] = field(default_factory=dict)
    """By key the highest offset that came to a consumer."""
    _asked_s: float = -1.0
    _answered_s: float = -1.0
    _stays_unknown: bool = False
    """What is under way keeps what was acknowledged, and that is not known."""

    def left_out(self, lo: int, hi: int) -> list[int]:
        """Which of these offsets were not acknowledged."""
        return [at for at in range(max(lo, self.up_to), hi) if at not in self.single]

    def all_up_to(self, end: int, by: Session) -> None:
        if self._counts(by):
            self.up_to, self.sought = max(self.up_to, end), None

    def all_of(self, lo: int, hi: int, by: Session) -> None:
        if self._counts(by):
            self.single.update(dict.fromkeys(range(lo, hi)))
            self.sought = None

    def received(self, lo: int, hi: int, by: Session, now_s: float) -> None:
        """A receipt of the acknowledgement of these offsets came. What comes to a session that
        began before a seek was answered may be from before the seek."""
        if self.sure and by.asked_s >= self._answered_s:
            for offset in range(lo, hi):
                self.with_receipt.setdefault(offset, now_s)

    def had_receipt(self, offset: int, session: Session) -> bool:
        """Whether the receipt came before that session asked for the subscription."""
        return self.with_receipt.get(offset, session.asked_s + 1) < session.asked_s

    def judged(self, session: Session) -> bool:
        """Whether it is known what comes to that session."""
        after = session.asked_s >= self._answered_s
        if not after and session.begun_s >= self._asked_s:
            self.sought = None  # it may have come to that one
        return self.sure and after

    def _counts(self, session: Session) -> bool:
        return session.begun_s >= self._asked_s

    # -- seeks ----------------------------------------

    def asks(self, now_s: float, *, keeps: bool = False) -> None:
        """From now on it is not known where it is. What is acknowledged by those who come from now
        on counts after the answer, too. `keeps`: what was acknowledged before stays so."""
        self._stays_unknown = keeps and not self.sure
        self.sure, self.asking, self.sought = False, True, None
        if keeps:
            return
        self._asked_s = now_s
        self.up_to, self.single, self.with_receipt, self.last_of_key = 0, {}, {}, {}
        self.came.clear()

    def answered(self, now_s: float, lo: int, hi: int) -> None:
        """It was put to one of these offsets."""
        if self._stays_unknown:
            self.asking = False
            return
        came = bool(self.up_to or self.single)  # to who came meanwhile
        self.up_to = max(self.up_to, hi)
        self.sure, self.asking, self.sought = True, False, None if came else (lo, hi)
        self._answered_s = now_s

    def unanswered(self) -> None:
        self.asking = False
