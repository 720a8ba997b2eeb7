"""Every finished micro-batch of a Spark process, reported to its parent as it ends."""

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger.demo import worker


def report(progress: StreamingQueryProgress) -> None:
    """One `batch` event. The same batch may be reported twice; it is one batch all the same."""
    worker.report(
        "batch",
        query=progress.name,
        batch=progress.batchId,
        rows=progress.numInputRows,
        seconds=progress.durationMs.get("triggerExecution", 0) / 1000,
        dropped=sum(state.numRowsDroppedByWatermark for state in progress.stateOperators),
    )


def report_all(query: StreamingQuery) -> None:
    """At the end of a query: Spark's listeners may still owe its last batches."""
    for progress in query.recentProgress:
        report(progress)


class BatchListener(StreamingQueryListener):
    """Spark calls it after each micro-batch; asking a query instead costs more with every batch."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        report(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass
