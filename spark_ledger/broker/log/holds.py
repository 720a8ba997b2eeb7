"""Holds of live segments: while a committer commits past a live segment, the segment's owner opens
no other segment by itself.

    asked -> handed over, or refused -> over: a commit came, all committers left, or time is up

Always true: a segment has one hold, however many committers ask for the segment. All of them get
one answer, and a later committer does not prolong the hold. The owner learns of commits past the
held segments of a topic from the topic's follower; holds that end at once share one read of the
log.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from spark_ledger.async_tasks import SharedReads
from spark_ledger.topic.commit.hand_over import HandOver
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.read.follower import TopicFollower


class SegmentHold:
    """The hold of the live segment that commit `opened` began in a ledger, until `until_s` of the
    loop's clock at the latest."""

    def __init__(self, ledger_id: int, opened: int, until_s: float) -> None:
        self.ledger_id = ledger_id
        self.opened = opened
        self.until_s = until_s
        self.over = asyncio.Event()
        """Set when no committer holds the segment any more."""
        self.when_over: Callable[[], None] | None = None
        self.answer: asyncio.Future[HandOver | None] = asyncio.get_running_loop().create_future()
        """What the owner hands over; None: the owner hands nothing over."""
        self._holders = 0

    def holds(self, live: LiveSegment | None) -> bool:
        """Whether `live` is the segment of this hold."""
        return live is not None and (live.ledger_id, live.opened) == (self.ledger_id, self.opened)

    def join(self) -> None:
        """Count a committer that begins to hold the segment."""
        self._holders += 1

    def leave(self) -> None:
        """Count off a committer that held the segment."""
        self._holders -= 1
        if not self._holders:
            self.end()

    def end(self) -> None:
        """End the hold: no committer holds the segment from now on."""
        self.over.set()
        if self.when_over is not None:
            self.when_over()

    def reply(self, hand_over: HandOver | None) -> None:
        """Set `answer`. Only the first call counts."""
        if not self.answer.done():
            self.answer.set_result(hand_over)


class AskedSegments:
    """The holds of one partition's segments. `current` is the hold of the open segment, or of the
    last one while no segment is open. The owner opens the next segment after `hold` has ended."""

    def __init__(self) -> None:
        self.current: SegmentHold | None = None
        self.hold: SegmentHold | None = None
        self._next: SegmentHold | None = None  # for a segment that is not read back yet

    def ask_next(
        self, ledger_id: int, opened: int, until_s: float, *, new: bool
    ) -> SegmentHold | None:
        """The hold of the segment that commit `opened` begins in that ledger. If the segment has no
        hold and `new` is set, its hold begins."""
        if self._next is None and new:
            self._next = SegmentHold(ledger_id, opened, until_s)
        return self._next

    def begin(self, live: LiveSegment | None) -> None:
        """Note that segment `live` is open and the waiting runs were sent to its ledger. None: no
        segment is open."""
        hold, self._next = self._next, None
        if hold is not None and live is not None and hold.ledger_id == live.ledger_id:
            hold.opened, self.current = live.opened, hold
        elif hold is not None:
            hold.reply(None)

    def hand(self, hand_over: HandOver) -> None:
        """Answer the committers that asked for the open segment, and wait for their commit."""
        if self.current is not None:
            self.hold = self.current
            self.current.reply(hand_over)

    def forget(self) -> None:
        """Forget the hold of the last segment: the wait for a commit is over."""
        self.current = self.hold = None

    def refuse(self) -> None:
        """Answer all committers that no segment is handed over."""
        for hold in (self.current, self._next):
            if hold is not None:
                hold.reply(None)
        self.current = self._next = self.hold = None


class SegmentHolds:
    """Waits for commits past the held segments of a topic. `look` reads the log without a sync."""

    def __init__(
        self,
        follow: Callable[[], Awaitable[TopicFollower]],
        look: Callable[[], Awaitable[TopicState]],
    ) -> None:
        self._follow = follow
        self._look = SharedReads[None, TopicState](lambda _: look())

    async def past(self, partition: int, hold: SegmentHold) -> TopicState | None:
        """The topic's state as soon as the held segment is no longer live. None: the segment is
        still live when the hold is over. Raises errors.LedgerError."""
        change = asyncio.Event()

        def note_change(_: TopicState) -> None:
            change.set()

        def is_past(state: TopicState) -> bool:
            has_opening = state.next > hold.opened
            held = has_opening and hold.holds(state.partitions[partition].live)
            return state.deleted or (has_opening and not held)

        follower = await self._follow()
        follower.listeners[note_change] = None
        hold.when_over = change.set
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(hold.until_s):
                    while not is_past(follower.state()) and not hold.over.is_set():
                        change.clear()
                        await change.wait()
            if not is_past(state := follower.state()):
                # most often a commit ended the hold, and the follower has not folded it yet
                state = await self._look(None)
            return state if is_past(state) else None
        finally:
            hold.when_over = None
            del follower.listeners[note_change]
