"""A topic's state kept current in memory, so that an idle poll needs no round trip (hazard 47).

Always true: one watch, on head, is outstanding at most; a change is folded as soon as it is heard
of, re-arming at most every 50 ms; without a change head is read again every 10 s; a state that
was not confirmed for 30 s is not given out.
"""

from spark_ledger.topic.state import TopicState
from spark_ledger.topic.topic_log import TopicLog


class TopicFollower:
    """`state` may be called from any thread; the rest belongs to the loop."""

    def __init__(self, log: TopicLog) -> None:
        self.log = log

    async def start(self) -> TopicState:
        """Fold freshly (sync first) and go on following in the background."""
        raise NotImplementedError

    def state(self) -> TopicState:
        """The newest state, from memory. Raises errors.Unavailable after 30 s without contact,
        and the error that ended the following if one did."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
