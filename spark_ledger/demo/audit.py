"""What the ledger itself says of the demo: commit records, ledgers, fragments."""

from dataclasses import dataclass

from spark_ledger.metadata import paths
from spark_ledger.topic import actions, records
from spark_ledger.topic.blocking import BlockingTopics, topics
from spark_ledger.topic.records import Commit
from spark_ledger.topic.segments import INLINE


@dataclass(frozen=True)
class LedgerFact:
    ledger_id: int
    ensemble: tuple[str, ...]
    """The bookies of its last fragment."""
    fragments: int


class Audit:
    def __init__(self, service_url: str) -> None:
        self._topics: BlockingTopics = topics(service_url)

    def commits(self, topic: str) -> list[Commit]:
        """The commit records of a topic, in log order, read from the store itself."""
        return self._topics.run(self._commits(topic))

    def versions(self, topic: str, app_id: str) -> list[int]:
        """The batch ids that a query committed, in log order: no number may come twice."""
        return [commit.version for commit in self.commits(topic) if commit.app_id == app_id]

    def ledgers(self, topic: str) -> list[LedgerFact]:
        """The ledgers that hold a topic's committed segments, oldest first; rows that are in the
        commits themselves are in none."""
        ids = {
            segment.ledger_id: None
            for commit in self.commits(topic)
            for action in commit.actions
            for segment in actions.segments_of(action)
            if segment.ledger_id != INLINE
        }
        return [self._topics.run(self._ledger(ledger_id)) for ledger_id in ids]

    async def _commits(self, topic: str) -> list[Commit]:
        client = self._topics.client
        opened = await client.topics.open(topic)
        await client.store.sync(paths.topic_head(opened.id))
        head = records.decode_head((await client.store.get(paths.topic_head(opened.id))).value)
        nodes = [await client.store.get(paths.topic_log(opened.id, n)) for n in range(head.next)]
        found = [records.decode_commit(node.value) for node in nodes]
        return [commit for commit in found if isinstance(commit, Commit)]

    async def _ledger(self, ledger_id: int) -> LedgerFact:
        record = (await self._topics.client.ledgers.record(ledger_id, fresh=True)).record
        return LedgerFact(ledger_id, record.fragments[-1].ensemble, len(record.fragments))
