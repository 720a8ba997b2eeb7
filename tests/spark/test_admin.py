"""spark_ledger.Admin on a cluster that Spark writes to, as cells of a notebook use it."""

import threading

import pyarrow as pa
import pytest

import spark_ledger
from spark_ledger import errors


@pytest.fixture
def admin(topics):
    with spark_ledger.Admin(topics.service_url) as one:
        yield one


def test_a_cell_that_makes_a_topic_can_be_run_again(admin, topic):
    made = admin.create_topic(topic, 2, retention_ms=1000)
    assert admin.create_topic(topic, 2, retention_ms=1000) == made
    assert admin.create_topic(topic) == made
    assert made in admin.topics()
    with pytest.raises(errors.TopicExists, match="2 partitions, not 3"):
        admin.create_topic(topic, 3)
    with pytest.raises(errors.TopicExists, match="retention_ms 1000, not 2000"):
        admin.create_topic(topic, retention_ms=2000)
    with pytest.raises(errors.BadConfig, match="Did you mean 'retention_ms'"):
        admin.create_topic(topic, retentionms=1)


def test_a_topic_grows_once_and_never_shrinks(admin, topic):
    admin.create_topic(topic)
    admin.grow(topic, 3)
    admin.grow(topic, 3)
    assert len(admin.describe(topic).partitions) == 3
    assert admin.create_topic(topic, 1)
    with pytest.raises(errors.BadConfig):
        admin.grow(topic, 2)


def test_policies_rows_and_the_topic_go_by_one_call_each(admin, topics, topic, keyed):
    topics.write(keyed(10), topic)
    assert admin.set_policies(topic, retention_ms=5000).policies.retention_ms == 5000
    assert admin.trim(topic, {0: 4}).rows == 4
    assert admin.trim(topic, {0: 4}).rows == 0
    assert len(topics.values(topic)) == 6
    assert admin.truncate(topic).rows == 6
    assert topics.values(topic) == []
    admin.terminate(topic)
    admin.terminate(topic)
    assert admin.describe(topic).terminated
    assert admin.delete_topic(topic) is True
    assert admin.delete_topic(topic) is False


def test_a_subscription_is_made_sought_measured_and_deleted(admin, topics, topic, keyed):
    topics.write(keyed(10), topic)
    assert admin.create_subscription(topic, "mine", "earliest") == {0: 0}
    assert admin.create_subscription(topic, "mine", "latest") == {0: 0}
    with pytest.raises(errors.SubscriptionBusy):
        admin.truncate(topic)
    assert admin.seek(topic, "mine", {0: 7}) == admin.seek(topic, "mine", {0: 7}) == {0: 7}
    assert admin.lag(topic, "mine")[0].rows == 3
    (one,) = admin.subscriptions(topic)
    assert (one.name, dict(one.positions)) == ("mine", {0: 7})
    assert admin.seek(topic, "mine", "2020-01-01") == {0: 0}
    assert admin.delete_subscription(topic, "mine") is True
    assert admin.delete_subscription(topic, "mine") is False


def test_many_small_segments_become_one(admin, topics, topic, keyed):
    for start in (0, 5):
        topics.write(keyed(5, tasks=1, start=start), topic)
    before = sorted(topics.values(topic))
    admin.compact(topic)
    assert sorted(topics.values(topic)) == before
    assert admin.compact(topic).commits == 0


def test_what_retention_does_not_keep_goes_by_one_call(admin, topics, topic, keyed):
    topics.write(keyed(10), topic)
    assert topic not in admin.clean().trimmed
    admin.set_policies(topic, retention_ms=1)
    assert admin.clean(dry_run=True).trimmed[topic].rows == 10
    assert len(topics.values(topic)) == 10
    report = admin.clean()
    assert report.trimmed[topic].rows == 10 and not report.problems.get(topic)
    assert topics.values(topic) == []


def test_a_schema_is_registered_once_by_sparks_types_or_arrows(admin, spark, topic):
    admin.create_topic(topic)
    columns = spark.range(1).selectExpr("id", "cast(id as string) AS name").schema
    first = admin.register_schema(topic, columns)
    assert first.number == 1 and first.schema.names == ["id", "name"]
    assert admin.register_schema(topic, columns) == first
    admin.set_compatibility(topic, "none")
    second = admin.register_schema(topic, pa.schema([("other", pa.int32())]))
    assert [one.number for one in admin.schema(topic).versions] == [1, 2] and second.number == 2
    with pytest.raises(errors.BadConfig, match="backward"):
        admin.set_compatibility(topic, "sideways")
    with pytest.raises(TypeError):
        admin.register_schema(topic, "id BIGINT")


def test_a_closed_admin_says_so_and_others_of_the_process_go_on(topics, topic):
    first, second = (spark_ledger.Admin(topics.service_url) for _ in range(2))
    first.close()
    with pytest.raises(errors.ClientClosed):
        first.topics()
    found = []
    asking = threading.Thread(target=lambda: found.append(second.create_topic(topic)))
    asking.start()
    asking.join()
    assert found[0].name.short == topic
