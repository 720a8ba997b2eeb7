"""Subscriptions for Spark's driver, which has no event loop.

Always true: `advance` and `check` never wait, neither for a bookie nor for the metadata store
(hazard 38): the cursor writes in the background. A process has one cursor of a subscription and
run: Spark makes a query's source anew as it likes.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future

from spark_ledger import errors
from spark_ledger.process import OncePerProcess, background_loop
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.seek_target import End, SeekTarget

_log = logging.getLogger(__name__)

_open: OncePerProcess[tuple[str, str, str], "BlockingCursor"] = OncePerProcess()
"""By topic id, subscription and run."""


def open_cursor(
    topics: BlockingTopics,
    topic: TopicInfo,
    name: str,
    query_id: str,
    run_id: str,
    *,
    start: SeekTarget = End.LATEST,
    partitions: tuple[int, ...] | None = None,
) -> "BlockingCursor":
    """See Subscriptions.open; the same cursor again for the same run while it is not released."""

    def opened() -> BlockingCursor:
        return BlockingCursor(
            topics.run(
                topics.client.subscriptions.open(
                    topic, name, query_id, run_id, start=start, partitions=partitions
                )
            )
        )

    _open.forget(lambda cursor: cursor.released)
    return _open.get((topic.id, name, run_id), opened, lambda cursor: not cursor.released)


def release_all() -> None:
    """Let go every subscription that this process has."""
    for cursor in _open.values():
        cursor.release()


class BlockingCursor:
    """A cursor.Cursor whose methods may be called from any thread."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._releasing: Future[None] | None = None
        self._told: dict[int, int] = {}

    def advance(self, positions: Mapping[int, int]) -> None:
        """See Cursor.advance. The same positions again cost nothing."""
        if positions != self._told:
            self._told = dict(positions)
            background_loop().loop.call_soon_threadsafe(self._cursor.advance, self._told)

    def check(self) -> None:
        """See Cursor.check."""
        self._cursor.check()

    @property
    def failure(self) -> errors.LedgerError | None:
        """See Cursor.failure."""
        return self._cursor.failure

    @property
    def confirmed(self) -> Mapping[int, int]:
        """What is durable."""
        return self._cursor.confirmed

    def recovered(self) -> dict[int, int]:
        """See Cursor.recovered: waits for bookies."""
        return background_loop().run(self._cursor.recovered())

    def durable(self) -> None:
        """See Cursor.durable: waits for bookies."""
        background_loop().run(self._cursor.durable())

    @property
    def released(self) -> bool:
        """Whether it is let go, or will be soon."""
        return self._releasing is not None

    def release(self, timeout_s: float = 10.0) -> None:
        """See Cursor.release. Never raises: a query that ends could not act on it. A signal's
        handler may call it while the thread that it came to does: both wait for the one end."""
        try:
            if self._releasing is None:
                self._releasing = background_loop().start(self._cursor.release(timeout_s))
            self._releasing.result()
        except (errors.LedgerError, RuntimeError) as error:
            _log.warning("a subscription was not released: %s", error)
