"""The copies of a subscription's acknowledgements by which a streaming query plans, for one source.

    {"_acked": {"flights": {"id": "<copy id>", "ends": {"0": 120}, "tokens": {"0": 1364195962}}},
     "flights": {"0": 98}, ...}

Always true: an offset names the copy of each topic by which the batch that begins there is planned;
`ends` has, by partition, the end of the copy's offsets, and `tokens` the token of the commit that
made the last row before this end, if the row was known. A copy is durable before an offset that
names it is in Spark's checkpoint. A copy never changes, so a batch that is planned again leaves out
the same rows. A batch that begins at or after all `ends` needs no copy. A run that plans batch 0
again computes the query's first offset again, but stores no copy: the end of batch 0 names the
copies of the earlier run. When Spark has committed an end that is at or after all `ends`, the copy
is deleted, and later offsets do not name it. Upkeep deletes a copy that no process has deleted
(topic/acks/copies.py).
"""

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from spark_ledger.errors import OffsetsMalformed
from spark_ledger.spark.options.offsets import IN_CHECKPOINT, Positions
from spark_ledger.spark.options.start_positions import key_of
from spark_ledger.spark.read.planning import NOTHING_ACKED, Acked
from spark_ledger.spark.read.topics_read import TopicsRead
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.read.acked import AckedRows

ACKED = "_acked"
RENEWED_S = 86_400.0
"""How often a query renews its copies: upkeep deletes a copy after 30 days without renewal."""


NO_TOKENS: Mapping[int, int] = {}


class CopyName(NamedTuple):
    """The id of a topic's copy, and by partition the end of the copy's offsets, and the token of
    the commit that made the last row before this end."""

    id: str
    ends: Mapping[int, int]
    tokens: Mapping[int, int] = NO_TOKENS

    def is_passed(self, positions: Mapping[int, int]) -> bool:
        """Whether no row of the copy is at or after the positions. A partition without a position
        is not read, and counts as passed."""
        return all(positions.get(p, end) >= end for p, end in self.ends.items())


Names = dict[str, CopyName]
"""By topic, by its short name."""


def with_names(offset: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The offset, with the names of these copies."""
    if not names:
        return dict(offset)
    plain = {key_of(topic): _plain(name) for topic, name in sorted(names.items())}
    return dict(sorted({**offset, ACKED: plain}.items()))


def _plain(name: CopyName) -> dict[str, Any]:
    plain: dict[str, Any] = {"id": name.id, "ends": _by_text(name.ends)}
    if name.tokens:
        plain["tokens"] = _by_text(name.tokens)
    return plain


def _by_text(by_partition: Mapping[int, int]) -> dict[str, int]:
    return {str(p): number for p, number in by_partition.items()}


def _by_number(plain: Mapping[str, Any]) -> dict[int, int]:
    return {int(p): int(number) for p, number in plain.items()}


def names_in(offset: Mapping[str, Any]) -> Names:
    """The copies that the offset names. Raises OffsetsMalformed, TopicNameInvalid."""
    plain = offset.get(ACKED, {})
    try:
        return {
            parse_topic(key).short: CopyName(
                str(name["id"]), _by_number(name["ends"]), _by_number(name.get("tokens", {}))
            )
            for key, name in plain.items()
        }
    except (AttributeError, LookupError, TypeError, ValueError):
        raise OffsetsMalformed(f"{IN_CHECKPOINT} has {json.dumps(plain)} for {ACKED!r}") from None


def names_needed(offset: Mapping[str, Any], positions: Positions) -> Names:
    """The copies that the batch from this offset on needs; `positions` are the offset's. Raises as
    names_in."""
    return {
        topic: name
        for topic, name in names_in(offset).items()
        if topic in positions and not name.is_passed(positions[topic])
    }


class QueryCopies:
    def __init__(self) -> None:
        self.last: Acked = NOTHING_ACKED
        """The rows that the last batch leaves out."""
        self._rows: dict[str, AckedRows] = {}  # by copy id
        self._renewed_s: dict[str, float] = {}  # of durable copies, by id
        self._deleted: dict[str, None] = {}

    def begin(self, topics: TopicsRead, acked: Acked) -> Names:
        """The names of new copies, which are not durable yet."""
        names: Names = {}
        for topic, rows in acked.items():
            tokens = topics.tokens({topic: dict(rows.ends)}).get(topic, NO_TOKENS)
            names[topic] = CopyName(secrets.token_hex(16), rows.ends, tokens)
            self._rows[names[topic].id] = rows
        return names

    def store(self, topics: TopicsRead, names: Names) -> None:
        """Make durable the copies that are not durable yet. Raises LedgerError."""
        for topic, name in names.items():
            if name.id not in self._renewed_s and topic in topics.infos:
                info, rows = topics.infos[topic], self._rows[name.id]
                copies = topics.cluster.client.ack_copies(info.id)
                topics.cluster.run(copies.make(name.id, rows.offsets, info.policies))
                self._renewed_s[name.id] = time.monotonic()

    def acked(self, topics: TopicsRead, offset: Mapping[str, Any], positions: Positions) -> Acked:
        """The rows that the batch from this offset on leaves out; `positions` are the offset's.
        Raises CopyGone, LedgerError."""
        self.last = {
            topic: self._acked_rows(topics, topic, name)
            for topic, name in names_needed(offset, positions).items()
        }
        return self.last

    def names_after(self, offset: Mapping[str, Any]) -> Names:
        """The copies for the end of the batch from this offset on to name."""
        names = names_in(offset)
        return {topic: name for topic, name in names.items() if name.id not in self._deleted}

    def delete_passed(
        self, topics: TopicsRead, offset: Mapping[str, Any], positions: Positions
    ) -> None:
        """Delete the copies that no batch needs any more, as Spark has committed the offset."""
        for topic, name in names_in(offset).items():
            if name.id not in self._deleted and name.is_passed(positions.get(topic, {})):
                if topic in topics.infos:
                    copies = topics.cluster.client.ack_copies(topics.infos[topic].id)
                    topics.cluster.run(copies.delete(name.id))
                self._deleted[name.id] = None
                self._rows.pop(name.id, None)

    def _acked_rows(self, topics: TopicsRead, topic: str, name: CopyName) -> AckedRows:
        copies = topics.cluster.client.ack_copies(topics.infos[topic].id)
        rows = self._rows.get(name.id)
        if rows is None:
            rows = AckedRows(topics.cluster.run(copies.read(name.id)))
            self._rows[name.id], self._renewed_s[name.id] = rows, float("-inf")
        renewed_s = self._renewed_s.get(name.id)
        if renewed_s is not None and time.monotonic() >= renewed_s + RENEWED_S:
            topics.cluster.run(copies.renew(name.id))
            self._renewed_s[name.id] = time.monotonic()
        return rows
