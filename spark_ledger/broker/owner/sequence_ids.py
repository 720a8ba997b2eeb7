"""How far each producer of a partition has come: which batches are stored, or on their way.

Always true: a batch whose last sequence id its producer has sent before is not sent again; it is
told so once the one that was first is stored (hazard 31). Where batches have failed whose outcome
is not known, nothing is a duplicate until the log has told what is stored. A message that comes in
chunks is known by its last chunk alone: those before it are stored again, and are of no message.
"""

from collections import deque
from collections.abc import Mapping

from spark_ledger.broker.owner.waiting import Chunk, Waiting


class SequenceIds:
    """Of one partition; `of_segment` are those that are stored in the segment at hand."""

    def __init__(self) -> None:
        self.of_segment: dict[str, int] = {}
        self._stored: dict[str, int] = {}  # the last one, by producer
        self._sent: dict[str, int] = {}  # or on its way
        self._again: deque[Waiting] = deque()  # what was sent again before it was stored
        self._unsure = False

    def begin(self, known: Mapping[str, int]) -> None:
        """As the log's seals have them, while nothing is under way."""
        self._stored, self._sent, self._unsure = dict(known), dict(known), False

    def doubt(self) -> None:
        """What is under way has failed, and may be stored."""
        self._unsure = True

    def last(self, producer_name: str) -> int:
        """The last that is stored, or on its way; -1 of none."""
        return self._sent.get(producer_name, -1)

    def new_of(self, run: Waiting) -> list[Waiting]:
        """What of it was not sent before; the rest is told so, once what was is stored."""
        name, last = run.producer_name, run.last_sequence_id
        if run.chunk is Chunk.EARLIER:
            return [run]
        if self._unsure or run.first_sequence_id > self._sent.get(name, -1):
            self._sent[name] = max(last, self._sent.get(name, last))
            return [run]
        if len(run.batches) > 1:
            return [new for one in run.each() for new in self.new_of(one)]
        if last <= self._stored.get(name, -1):
            run.duplicate()
        else:
            self._again.append(run)
        return []

    def note(self, run: Waiting) -> None:
        """It is stored."""
        if run.chunk is Chunk.EARLIER:
            return
        name, last = run.producer_name, run.last_sequence_id
        self._stored[name] = max(last, self._stored.get(name, last))
        self.of_segment[name] = max(last, self.of_segment.get(name, last))
        if self._again:
            waiting, self._again = self._again, deque()
            for one in waiting:
                if one.last_sequence_id <= self._stored.get(one.producer_name, -1):
                    one.duplicate()
                else:
                    self._again.append(one)

    def take_again(self) -> list[Waiting]:
        """What waits for the one that was first, for whoever fails it."""
        waiting, self._again = list(self._again), deque()
        return waiting
