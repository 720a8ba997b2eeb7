"""option("metadata", ...) through Spark."""

import pytest
from pyspark.errors import PySparkException

from spark_ledger.spark.read import listings
from spark_ledger.topic import blocking
from spark_ledger.topic.subscription.seek_target import End


@pytest.fixture
def listed(topics):
    """`listed(view, **options)`: the view as a DataFrame."""

    def make(view, schema=None, **options):
        reader = topics.spark.read.format("ledger").option("serviceUrl", topics.service_url)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.option("metadata", view).options(**options).load()

    return make


def test_every_view_is_a_dataframe_with_its_columns(topics, topic, keyed, listed):
    topics.write(keyed(4000), topic, partitions=3)  # too many to be in the commit itself
    for view in listings.VIEWS:
        frame = listed(view)
        assert frame.schema == listings.schema_of(view), view
        assert frame.count() > 0 or view in ("subscriptions", "lag"), view


def test_what_is_listed_of_a_topic_is_what_was_written(topics, topic, keyed, listed):
    topics.write(keyed(100), topic, partitions=3, userMetadata="the first load")
    (one,) = listed("topics", subscribe=topic).collect()
    assert (one.topic, one.partitions, one.rows, one.commits) == (topic, 3, 100, 1)
    partitions = listed("partitions", subscribe=topic)
    assert partitions.agg({"latestOffset": "sum"}).first()[0] == 100
    segments = listed("segments", subscribe=topic)
    assert segments.agg({"rows": "sum"}).first()[0] == 100
    (commit,) = listed("commits", subscribe=topic).collect()
    assert (commit.rows, commit.kinds, commit.userMetadata) == (100, ["append"], "the first load")
    (same,) = listed("topics", subscribePattern=f"{topic}|nothing").collect()
    assert same == one


def test_the_path_of_load_names_the_topic_that_is_listed(topics, topic, keyed, listed):
    topics.write(keyed(10), topic)
    reader = topics.spark.read.format("ledger").option("serviceUrl", topics.service_url)
    (one,) = reader.option("metadata", "topics").load(topic).collect()
    assert one.topic == topic


def test_bookies_are_listed_with_their_free_space(listed):
    rows = listed("bookies").collect()
    assert [row.state for row in rows] == ["writable"] * 3
    assert all(row.freeBytes > 0 for row in rows)


def test_subscriptions_and_lag_are_listed(topics, topic, keyed, listed):
    topics.write(keyed(100), topic, partitions=2)
    cluster = blocking.topics(topics.service_url)
    info = cluster.run(cluster.client.topics.open(topic))
    cluster.run(cluster.client.subscriptions.create(info.id, "mine", End.EARLIEST))
    (one,) = listed("subscriptions", subscribe=topic).collect()
    assert (one.subscription, one.inUse) == ("mine", False)
    lag = listed("lag", subscribe=topic)
    assert lag.agg({"rowsBehind": "sum"}).first()[0] == 100


def test_a_schema_of_ones_own_is_a_projection_of_a_listing(topics, topic, keyed, listed):
    topics.write(keyed(10), topic)
    rows = listed("topics", "ROWS BIGINT, topic STRING", subscribe=topic)
    assert rows.columns == ["ROWS", "topic"]
    assert rows.collect() == [(10, topic)]


@pytest.mark.parametrize(
    ("schema", "error_class"),
    [("nothing STRING", "LEDGER_SCHEMA.UNKNOWN_COLUMN"), ("rows STRING", "TYPE_MISMATCH")],
)
def test_a_column_that_a_listing_has_not_is_an_error(listed, schema, error_class):
    with pytest.raises(PySparkException, match=error_class):
        listed("topics", schema).collect()


def test_a_listing_that_is_not_there_and_a_topic_that_is_not_are_errors(listed):
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.INVALID_VALUE"):
        listed("tables").collect()
    with pytest.raises(PySparkException, match=r"LEDGER_TOPIC\.NOT_FOUND"):
        listed("topics", subscribe="there-is-none").collect()


def test_a_listing_takes_no_option_of_reading_rows(listed):
    with pytest.raises(PySparkException, match=r"LEDGER_OPTION\.CONFLICT"):
        listed("topics", startingOffsets="earliest").collect()
