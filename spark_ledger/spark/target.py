"""The topic that a sink writes to: opened, or made by the first write."""

from collections.abc import Sequence

from pyspark.sql.datasource import WriterCommitMessage

from spark_ledger.errors import OptionInvalid, TopicNotFound
from spark_ledger.spark.options import WriteOptions
from spark_ledger.spark.write_tasks import Written
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.names import parse_topic
from spark_ledger.topic.policies import TopicPolicies
from spark_ledger.topic.task_writer import TaskResult
from spark_ledger.topic.topics import TopicInfo


def target_name(options: WriteOptions) -> str:
    """What transactions are recorded under: the topic, however it was spelled."""
    return parse_topic(options.target).short


def open_target(cluster: BlockingTopics, options: WriteOptions) -> TopicInfo:
    """The topic, made with the options' partitions and quorums if it is not there."""
    topics = cluster.client.topics
    try:
        return cluster.run(topics.open(options.target, fresh=False))
    except TopicNotFound:
        policies = policies_of(options)
    return cluster.run(topics.create(options.target, options.partitions, policies, exist_ok=True))


def policies_of(options: WriteOptions) -> TopicPolicies:
    """What was given, the rest as near to the defaults as it allows. Raises OptionInvalid."""
    default = TopicPolicies()
    ensemble = options.ensemble_size or max(default.ensemble_size, options.write_quorum or 0)
    write = options.write_quorum or min(default.write_quorum, ensemble)
    ack = options.ack_quorum or min(default.ack_quorum, write)
    if not ensemble >= write >= ack >= 1:
        raise OptionInvalid(
            f"ensembleSize {ensemble}, writeQuorum {write}, ackQuorum {ack}",
            "Give ensembleSize >= writeQuorum >= ackQuorum.",
        )
    return TopicPolicies(ensemble, write, ack)


def results_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """What the tasks wrote, in the order of their indexes."""
    results = [message.result for message in messages if isinstance(message, Written)]
    return sorted(results, key=lambda result: result.task_index)
