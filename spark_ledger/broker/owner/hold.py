"""A live segment past which somebody commits: its owner does not go on by itself for a while.

    asked -> handed over, or refused -> over: in a commit, all who hold it gone, or too late

Always true: it begins once for a segment, however many ask, and all get one answer; who comes later
does not prolong it.
"""

import asyncio

from spark_ledger.topic.commit.hand_over import Handed
from spark_ledger.topic.log.segments import LiveSegment


class Hold:
    """Of the live segment that commit `opened` began in a ledger, until `until_s` of the loop's
    clock at the latest."""

    def __init__(self, ledger_id: int, opened: int, until_s: float) -> None:
        self.ledger_id = ledger_id
        self.opened = opened
        self.until_s = until_s
        self.over = asyncio.Event()
        """Nobody holds it any more."""
        self._answer: asyncio.Future[Handed | None] = asyncio.get_running_loop().create_future()
        self._holders = 0

    def holds(self, live: LiveSegment | None) -> bool:
        """Whether it is this live segment."""
        return live is not None and (live.ledger_id, live.opened) == (self.ledger_id, self.opened)

    def join(self) -> None:
        """One more holds it."""
        self._holders += 1

    def leave(self) -> None:
        """One of those who hold it has gone."""
        self._holders -= 1
        if not self._holders:
            self.over.set()

    def hand(self, handed: Handed | None) -> None:
        """What is handed over, or None: nothing is. Only the first counts."""
        if not self._answer.done():
            self._answer.set_result(handed)

    async def handed(self) -> Handed | None:
        """What is handed over, as soon as it is known."""
        return await asyncio.shield(self._answer)
