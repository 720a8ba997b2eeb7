"""The subscription that follows a streaming query: `subscription=`.

Spark tells a source neither its query's id nor its run's. So the query is a token that its first
offset carries (`_query`) and every later one takes over: it is in Spark's checkpoint, and a restart
from there is the same query; a run is a process of the source. Always true: a cursor is opened
once for each topic, advanced only to positions that Spark says are done, and never waited for,
but at the end of an availableNow run (Spark may kill the process then), so that rowsBehind is 0
after it.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from spark_ledger.spark.driver_state import TopicsRead
from spark_ledger.spark.offsets import Positions
from spark_ledger.topic.blocking_cursor import BlockingCursor, open_cursor

QUERY = "_query"


class QueryCursor:
    """Of one source. `name` None: there is no subscription, and nothing happens."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._run_id = secrets.token_hex(16)
        self._query_id: str | None = None
        self._cursors: dict[str, BlockingCursor] = {}
        self._over = False

    def signed(self, offset: dict[str, Any]) -> dict[str, Any]:
        """The offset, with the query's token where there is a subscription."""
        if self._name is None:
            return offset
        self._query_id = self._query_id or secrets.token_hex(16)
        return dict(sorted({**offset, QUERY: self._query_id}.items()))

    def at(self, topics: TopicsRead, start: Mapping[str, Any], positions: Positions) -> None:
        """All before `positions` is done; `start` is the offset that they are from. Raises
        SubscriptionBusy, SubscriptionTypeMismatch, LedgerFenced (a newer run has it)."""
        if self._name is None or self._over:
            return
        signed = start.get(QUERY)
        if self._query_id is None and isinstance(signed, str):
            self._query_id = signed
        self.signed({})
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
        assigned = topics.options.assigned
        made = open_cursor(
            topics.cluster,
            topics.infos[topic],
            *(self._name, self._query_id, self._run_id),
            start=dict(positions),
            partitions=None if assigned is None else assigned[topic],
        )
        self._cursors[topic] = made
        return made
