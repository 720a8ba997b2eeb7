"""Lists of topics that clients ask for and watch, at real brokers."""

import uuid

import pytest

from spark_ledger.broker.topic_lists import topics_hash
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.integration.pulsar_socket import Socket

DEFAULT = "public/default"


@pytest.fixture
def stem():
    """The beginning of names that no other test has."""
    return f"l{uuid.uuid4().hex[:8]}"


@pytest.fixture
def socket(cluster):
    made = Socket(cluster.broker_url)
    yield made
    made.close()


def asked(socket, **fields):
    name, answer = socket.ask("topics_of_namespace", **{"namespace": DEFAULT} | fields)
    assert name == "topics_of_namespace_response", answer
    return answer


def test_a_list_is_filtered_by_its_pattern_and_left_out_if_it_has_not_changed(socket, topics, stem):
    for name, partitions in ((f"{stem}-a", 2), (f"{stem}b", 1)):
        policies = {"partitioned": partitions > 1}
        topics.run(topics.client.topics.create(name, partitions, policies))
    full = f"persistent://{DEFAULT}/{stem}"
    partitions = [f"{full}-a-partition-0", f"{full}-a-partition-1"]
    answer = asked(socket, topics_pattern=f"persistent://{DEFAULT}/{stem}-.*")
    assert (list(answer.topics), answer.filtered) == (partitions, True)
    assert (answer.changed, answer.topics_hash) == (True, topics_hash(partitions))
    pattern = f"persistent://{DEFAULT}/{stem}-.*"
    same = asked(socket, topics_pattern=pattern, topics_hash=answer.topics_hash)
    assert (list(same.topics), same.filtered, same.changed) == ([], True, False)
    for left_to_the_client in (f"{pattern}(?!x)", "x" * 51):
        whole = asked(socket, topics_pattern=left_to_the_client)
        assert not whole.filtered and {*partitions, f"{full}b"} <= set(whole.topics)
    assert set(asked(socket, mode=2).topics) >= {*partitions}
    assert all(topic.startswith("non-persistent://") for topic in asked(socket, mode=1).topics)
    assert list(asked(socket, namespace="no/where").topics) == []
    assert socket.refused("topics_of_namespace", namespace=DEFAULT, mode=3)[0] == 22


def test_a_watch_sees_topics_of_spark_within_a_second_and_their_end(socket, topics, stem):
    name, listed = socket.ask(
        "watch_topic_list",
        watcher_id=3,
        namespace=DEFAULT,
        topics_pattern=f"{DEFAULT}/{stem}.*",
    )
    assert (name, list(listed.topic)) == ("watch_topic_list_success", [])
    topics.run(topics.client.topics.create(f"{stem}-a", 2))
    update = socket.until("watch_topic_update")
    names = [f"persistent://{DEFAULT}/{stem}-a-partition-{number}" for number in range(2)]
    assert (list(update.new_topics), update.topics_hash) == (names, topics_hash(names))
    topics.run(TopicAdmin(topics.client).delete(f"{stem}-a"))
    assert list(socket.until("watch_topic_update").deleted_topics) == names
    assert socket.ask("watch_topic_list_close", watcher_id=3)[0] == "success"
