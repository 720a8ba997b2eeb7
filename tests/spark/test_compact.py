"""Merging small segments as a Spark job."""

from pyspark import TaskContext

import spark_ledger
from spark_ledger.spark import jobs
from spark_ledger.topic import blocking

EVERYTHING = "key STRING, value STRING, partition INT, offset BIGINT, timestamp TIMESTAMP"


def segments(topics, topic):
    listed = topics.read(topic, metadata="segments").where("rows > 0")
    return [row.asDict() for row in listed.collect()]


def written(topics, keyed, topic, commits=3):
    """A topic of two partitions and so many commits."""
    with spark_ledger.Admin(topics.service_url) as admin:
        admin.create_topic(topic, 2)
    for number in range(commits):
        topics.write(keyed(4, tasks=1, start=4 * number), topic)
    return everything(topics, topic)


def everything(topics, topic):
    rows = topics.read(topic, EVERYTHING).collect()
    return sorted(rows, key=lambda row: (row.partition, row.offset))


def test_small_segments_of_many_commits_become_one_of_each_partition(spark, topics, topic, keyed):
    before = written(topics, keyed, topic)
    small = segments(topics, topic)
    assert len(small) > 2
    since = small[-1]["committedAt"].astimezone().isoformat()
    late = topics.values(
        topic, startingTimestamp=since, startingOffsetsByTimestampStrategy="latest"
    )

    done = spark_ledger.compact(spark, topic, topics.service_url)

    merged = segments(topics, topic)
    assert (done.segments, done.merged, done.commits) == (len(small), len(merged), 1)
    assert [row["entries"] for row in merged] == [1] * len({row.partition for row in before})
    assert everything(topics, topic) == before
    assert topics.values(topic, startingTimestamp=since) == late
    again = spark_ledger.compact(spark, topic, topics.service_url)
    assert (again.segments, again.commits) == (0, 0)


def test_a_merge_that_is_tried_again_changes_nothing_twice(spark, topics, topic, keyed):
    before = written(topics, keyed, topic, 2)
    client = blocking.topics(topics.service_url)

    def twice(group):
        """As if an attempt had died after its last write."""
        assert TaskContext.get() is not None
        jobs.merge_group(topics_url, info, intent, group)
        return jobs.merge_group(topics_url, info, intent, group)

    topics_url = topics.service_url
    info = client.run(client.client.topics.open(topic))
    compaction = jobs.Compaction(client.client, info)
    tasks = client.run(compaction.plan())
    intent = compaction.intent
    client.run(compaction.commit(jobs.run_tasks(spark, twice, tasks)))
    client.run(compaction.aclose())

    assert everything(topics, topic) == before
    assert client.run(compaction.plan()) == ()
