"""The subscription that follows a streaming query: `subscription=`.

Spark tells a source neither its query's id nor its run's. So the query is a token that its first
offset carries (`_query`) and every later one takes over; a run is a process of the source. Always
true: a subscription is claimed only by a token that is in Spark's checkpoint, so whoever restarts
from there is the same query and has it at once, whenever the run before was killed; until then it
is only looked at, whether it is free, and made, used by nobody, so that the rows to be read stay. A
cursor is opened once for each topic, advanced only to positions that Spark says are done, and never
waited for, but at the end of an availableNow run (Spark may kill the process then), so that
rowsBehind is 0 after it. A run that is stopped lets it go: Spark ends the process by SIGTERM, and
any other end is as a crash. Two sources have two tokens: the same subscription twice in one query
is LEDGER_SUBSCRIPTION.BUSY.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from spark_ledger.spark.options.offsets import Positions
from spark_ledger.spark.read.topics_read import TopicsRead
from spark_ledger.spark.worker.termination import before_termination
from spark_ledger.topic.blocking import BlockingCursor, open_cursor, release_all

QUERY = "_query"


class QueryCursor:
    """Of one source. `name` None: there is no subscription, and nothing happens."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._run_id = secrets.token_hex(16)
        self._query_id: str | None = None
        self._kept = False
        self._reserved: dict[str, None] = {}
        self._cursors: dict[str, BlockingCursor] = {}
        self._over = False

    def signed(self, offset: dict[str, Any]) -> dict[str, Any]:
        """The offset, with the query's token where there is a subscription."""
        if self._name is None:
            return offset
        self._query_id = self._query_id or secrets.token_hex(16)
        return dict(sorted({**offset, QUERY: self._query_id}.items()))

    def wanted(self, topics: TopicsRead, positions: Positions) -> None:
        """The query is to read from there on; Spark keeps nothing of it yet. Raises
        SubscriptionBusy."""
        if self._name is None:
            return
        for topic, parts in positions.items():
            if topic not in self._reserved:
                info, assigned = topics.infos[topic], _assigned(topics, topic)
                reserving = topics.cluster.client.subscriptions.reserve(
                    info, self._name, start=dict(parts), partitions=assigned
                )
                topics.cluster.run(reserving)
                self._reserved[topic] = None

    def at(self, topics: TopicsRead, kept: Mapping[str, Any], positions: Positions) -> None:
        """All before `positions` is done; `kept` is an offset in Spark's checkpoint. Raises
        SubscriptionBusy, LedgerFenced (a newer run has it)."""
        if self._name is None or self._over:
            return
        signed = kept.get(QUERY)
        if isinstance(signed, str):
            self._query_id, self._kept = signed, True
        if not self._kept:
            self.wanted(topics, positions)
            return
        for topic, parts in positions.items():
            cursor = self._cursors.get(topic) or self._open(topics, topic, parts)
            cursor.check()
            cursor.advance(parts)

    def check(self) -> None:
        """Raises LedgerFenced once another run has the subscription."""
        for cursor in self._cursors.values():
            cursor.check()

    def release(self) -> None:
        """Write where the query is and let the subscription go: this run is over."""
        self._over = True
        for cursor in self._cursors.values():
            cursor.release()
        self._cursors.clear()

    def _open(self, topics: TopicsRead, topic: str, positions: Mapping[int, int]) -> BlockingCursor:
        assert self._name is not None
        assert self._query_id is not None
        made = open_cursor(
            topics.cluster,
            topics.infos[topic],
            *(self._name, self._query_id, self._run_id),
            start=dict(positions),
            partitions=_assigned(topics, topic),
        )
        before_termination(release_all)
        self._cursors[topic] = made
        return made


def _assigned(topics: TopicsRead, topic: str) -> tuple[int, ...] | None:
    assigned = topics.options.assigned
    return None if assigned is None else assigned[topic]
