"""Where the consumers' subscriptions are by the store, and where brokers find them.

Always true: what is durable is told by the writes that the store applied: of a partition the share
of the owner of the highest epoch counts, and what an owner of before writes later changes nothing.
It goes back only where somebody has sought, and nothing is left of a subscription that was deleted.
A seek back may be found before a share has it: until it is answered, its target is the lowest place
that may be found.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spark_ledger.metadata import paths
from spark_ledger.topic.acks.entries import AckState
from spark_ledger.topic.subscription.consumer_cursor import ConsumerCursor
from spark_ledger.topic.subscription.records import decode_share
from tests.simulation import invariants
from tests.simulation.ghost import Ghost
from tests.simulation.store import Commit


class Places:
    """Of one topic."""

    def __init__(self, ghost: Ghost, topic_id: str, judged: Callable[..., None]) -> None:
        self._ghost = ghost
        self._folder = paths.subscriptions(topic_id)
        self._judged = judged
        self._durable: dict[tuple[str, int], tuple[int, int]] = {}
        """By name and partition: the owner's epoch, and how far it was durable in it."""
        self._may_go_back: dict[tuple[str, int], int | None] = {}
        """By name and partition: how far back a seek without an answer may have put it."""

    def may_go_back(self, name: str, partition: int, to: int = 0) -> None:
        """Somebody seeks there, or deletes it."""
        before = self._may_go_back.get((name, partition))
        self._may_go_back[name, partition] = to if before is None else min(before, to)

    def went_back(self, name: str, partition: int) -> None:
        """That was answered."""
        self._may_go_back[name, partition] = None

    def forget(self, name: str, partition: int) -> None:
        """It was moved from outside: shares of before count no more."""
        self._durable.pop((name, partition), None)

    def written(self, written: Commit) -> None:
        """The store has applied it."""
        for change in written.changes:
            if change.after is None:
                gone = change.path.removeprefix(f"{self._folder}/")
                for place in [place for place in self._durable if place[0] == gone]:
                    del self._durable[place]
            parts = change.path.removeprefix(f"{self._folder}/").split("/")
            if len(parts) != 3 or parts[1] != "shares" or change.after is None:
                continue
            for partition, at in decode_share(change.after.value).at.items():
                place = (parts[0], partition)
                known = self._durable.get(place, at)
                goes_on = at[0] >= known[0] if place in self._may_go_back else at >= known
                self._durable[place] = at if goes_on else known

    def durable(self, name: str, partition: int, epoch: int) -> int:
        """How far it was durable for an owner of that epoch; of one of before nothing counts."""
        known = self._durable.get((name, partition), (0, 0))
        back = self._may_go_back.get((name, partition))
        if known[0] > epoch:
            return 0
        return known[1] if back is None else min(known[1], back)

    async def adopted(
        self, adopt: Any, cursor: ConsumerCursor, partition: int, epoch: int
    ) -> AckState:
        """As the cursor's own `adopt`, judged (B8)."""
        before = self.durable(cursor.name, partition, epoch)
        state: AckState = await adopt(cursor, partition, epoch)
        durable = min(before, self.durable(cursor.name, partition, epoch))
        self._ghost.meet("place of a subscription found")
        self._judged(
            invariants.a_durable_position_never_goes_back,
            *(self._ghost, cursor.name, partition, state.position, durable),
        )
        return state


@contextmanager
def adopting(places: Callable[[], Places]) -> Iterator[None]:
    """Production code whose finding of places is judged."""
    adopt = ConsumerCursor.adopt

    async def judged(self: ConsumerCursor, partition: int, epoch: int) -> AckState:
        return await places().adopted(adopt, self, partition, epoch)

    try:
        ConsumerCursor.adopt = judged  # type: ignore[method-assign]
        yield
    finally:
        ConsumerCursor.adopt = adopt  # type: ignore[method-assign]
