"""What the driver knows of the topics that a query reads, and how it turns offsets into tasks.

Always true: `ends` answers from memory (topic/follower.py says how old it may be); `fresh_ends`
begins with a sync, so a user reads what he wrote; a topic keeps the id it was opened with, and
one that was deleted is an error.
"""

from collections.abc import Iterable, Mapping

from spark_ledger.errors import TopicDeleted
from spark_ledger.spark import losses
from spark_ledger.spark.offsets import Positions, TopicEnds, rows_between, within
from spark_ledger.topic import blocking
from spark_ledger.topic.follower import TopicFollower
from spark_ledger.topic.names import parse_topic
from spark_ledger.topic.read_plan import Cutting, ReadTask, plan_read
from spark_ledger.topic.state import TopicState


class TopicsRead:
    """The topics of one reader, in its driver-side process. Names are in their short form."""

    def __init__(self, service_url: str, topics: Iterable[str]) -> None:
        """Connects and folds the topics. Raises Unavailable, TopicNotFound, TopicNameInvalid."""
        names = [parse_topic(topic).short for topic in topics]
        self._cluster = blocking.topics(service_url)
        client = self._cluster.client
        self._ids = {name: self._cluster.run(client.topics.open(name)).id for name in names}
        self._followers: dict[str, TopicFollower] = {}
        self._ledger_ends = losses.LedgerEnds(client.ledgers)

    def follow(self) -> None:
        """Keep the states current from now on, without a round trip for `ends`."""
        client = self._cluster.client
        for name, topic_id in self._ids.items():
            self._followers[name] = self._cluster.run(client.follow(topic_id))

    def ends(self) -> dict[str, TopicEnds]:
        """From memory. Raises Unavailable when that is too old; TopicDeleted."""
        return _ends({name: follower.state() for name, follower in self._followers.items()})

    def fresh_ends(self) -> dict[str, TopicEnds]:
        """With all that was committed before this call."""
        return _ends(self._fresh_states())

    def plan(
        self, start: Positions, end: Positions, min_partitions: int, fail_on_data_loss: bool
    ) -> list[ReadTask]:
        """Tasks that read from `start` to `end`. Raises RowsLost unless told to leave such rows
        out: then the tasks hold exactly the others."""
        states = self._states_with(end)
        rows = max(1, rows_between(start, end))
        tasks: list[ReadTask] = []
        for topic, state in states.items():
            part = rows_between({topic: start[topic]}, end)
            ranges = {p: (at, end[topic][p]) for p, at in start[topic].items()}
            share = max(1, -(-min_partitions * part // rows))
            state, read = self._cluster.run(self._cluster.client.readable(state, ranges))
            tasks += plan_read(state, ranges, topic=topic, cutting=Cutting(share), read=read)
        return self._readable(tasks, fail_on_data_loss)

    def _states_with(self, end: Positions) -> Mapping[str, TopicState]:
        """States that reach `end`, from memory where they do."""
        client = self._cluster.client
        known = {name: client.log(topic_id).known for name, topic_id in self._ids.items()}
        states = {name: state for name, state in known.items() if state is not None}
        reached = states.keys() == known.keys() and within(end, _ends(states))
        return states if reached else self._fresh_states()

    def _fresh_states(self) -> dict[str, TopicState]:
        client, run = self._cluster.client, self._cluster.run
        return {
            name: run(client.log(topic_id).fold(fresh=True)) for name, topic_id in self._ids.items()
        }

    def _readable(self, tasks: list[ReadTask], fail_on_data_loss: bool) -> list[ReadTask]:
        last_entries = self._cluster.run(self._ledger_ends.of(tasks))
        return losses.readable(tasks, last_entries, fail_on_data_loss)


def _ends(states: Mapping[str, TopicState]) -> dict[str, TopicEnds]:
    return {name: _ends_of(name, state) for name, state in states.items()}


def _ends_of(name: str, state: TopicState) -> TopicEnds:
    if state.deleted:
        raise TopicDeleted(f"topic {name!r} (id {state.topic_id}) was deleted", topic=name)
    return TopicEnds(
        state.topic_id,
        tuple(partition.start_offset for partition in state.partitions),
        tuple(partition.end_offset for partition in state.partitions),
    )
