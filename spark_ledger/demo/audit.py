"""What the ledger itself says of the demo: commit records, ledgers, fragments.

Always true: commit records are read from the log, which keeps the last 128 or so: who wants all
looks more often than that, for what was seen once is kept. Where rows are is asked of the topic's
state, which has those of all commits.
"""

from dataclasses import dataclass

from spark_ledger.topic.blocking import BlockingTopics, topics
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segments import INLINE

LOOK_EVERY = 32
"""So many commits may come between two looks, safely."""


@dataclass(frozen=True)
class LedgerFact:
    ledger_id: int
    ensemble: tuple[str, ...]
    """The bookies of its last fragment."""
    fragments: int


class Audit:
    def __init__(self, service_url: str) -> None:
        self._topics: BlockingTopics = topics(service_url)
        self._seen: dict[str, dict[int, Commit]] = {}

    def commits(self, topic: str) -> list[Commit]:
        """The commit records of a topic, in log order: those in the log and those seen before."""
        seen = self._seen.setdefault(topic, {})
        seen.update(self._topics.run(self._commits(topic)))
        return [seen[number] for number in sorted(seen)]

    def versions(self, topic: str, app_id: str) -> list[int]:
        """The batch ids that a query committed, in log order: no number may come twice."""
        return [commit.version for commit in self.commits(topic) if commit.app_id == app_id]

    def ledgers(self, topic: str) -> list[LedgerFact]:
        """The ledgers that hold a topic's committed segments, oldest first; rows that are in the
        commits themselves are in none."""
        ids = self._topics.run(self._ledger_ids(topic))
        return [self._topics.run(self._ledger(ledger_id)) for ledger_id in ids]

    async def _commits(self, topic: str) -> dict[int, Commit]:
        client = self._topics.client
        log = client.log((await client.topics.open(topic)).id)
        await log.fold(fresh=True)
        return {number: commit async for number, _, commit in log.commits()}

    async def _ledger_ids(self, topic: str) -> list[int]:
        """In the order of the newest commit that brought rows of each."""
        client = self._topics.client
        state = await client.log((await client.topics.open(topic)).id).fold(fresh=True)
        ranges = {held.number: (held.start_offset, held.end_offset) for held in state.partitions}
        state, read = await client.readable(state, ranges)
        newest: dict[int, int] = {}
        for held in state.partitions:
            for one in held.stretches(held.start_offset, held.end_offset, read):
                for placed in one.table:
                    ledger_id = placed.segment.ledger_id
                    newest[ledger_id] = max(placed.commit, newest.get(ledger_id, placed.commit))
        newest.pop(INLINE, None)
        return sorted(newest, key=lambda ledger_id: (newest[ledger_id], ledger_id))

    async def _ledger(self, ledger_id: int) -> LedgerFact:
        record = (await self._topics.client.ledgers.record(ledger_id, fresh=True)).record
        return LedgerFact(ledger_id, record.fragments[-1].ensemble, len(record.fragments))
