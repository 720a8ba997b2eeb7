"""Which topics a client's pattern names, and the hash of a list."""

import asyncio
import subprocess
import sys

import pytest

from spark_ledger.broker.topic_lists import (
    PATTERN_CHARS_MAX,
    STEPS_MAX,
    PatternRefused,
    TopicsPattern,
    check_length,
    steps_of,
    topics_hash,
)
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.topic.log.topics import Topics
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.unit.spark_ledger.broker.sessions import session_of
from tests.unit.spark_ledger.topic.stage import play

A, B = "persistent://public/default/a-partition-0", "persistent://public/default/b"


def test_the_hash_of_a_list_is_that_of_pulsars_client():
    assert topics_hash([B, A]) == topics_hash([A, B]) == "75d7a367"  # TopicList.calculateHash
    assert topics_hash([]) == "00000000"


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("persistent://public/default/a", [A]),
        ("^persistent://public/default/.$", [A, B]),
        ("public/default/.*", [A, B]),
        ("non-persistent://public/default/b", [B]),
        (".*/[b-z]", [B]),
        ("a|b", []),
        ("public/default/a-partition-0", []),
        (r"\Qpublic/default/b\E", [B]),
    ],
)
def test_a_pattern_is_for_whole_names_without_domain_and_partition(pattern, matching):
    assert TopicsPattern.parse(pattern).matching([A, B]) == matching


MATCHES_ALONE = """
import sys

from spark_ledger.broker.topic_lists import TopicsPattern

print(len(TopicsPattern.parse("a/b/c.*").matching(["persistent://a/b/c"] * 100)))
assert "pandas" not in sys.modules
"""


def test_a_pattern_is_matched_without_loading_pandas_which_stops_all_clients_for_half_a_second():
    command = [sys.executable, "-c", MATCHES_ALONE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) == 100


@pytest.mark.parametrize(
    "pattern",
    ["a(?!b)", "(", r"(a)\1", "x" * (PATTERN_CHARS_MAX + 1), "(.?){501}", "((.?){50}){20}y"],
)
def test_a_pattern_that_is_too_long_or_costly_or_not_of_re2_is_left_to_the_client(pattern):
    with pytest.raises(PatternRefused, match="filter the list yourself") as refused:
        TopicsPattern.parse(pattern)
    assert refused.value.code is ServerError.NOT_ALLOWED


def test_counted_repetitions_count_as_often_as_they_repeat():
    assert steps_of(r"logs-\d{4}") == 10 * 4
    assert steps_of("(a{2,30}){0}") == 12 * 30
    assert steps_of("a{2,}b{x}") == 9 * 2
    TopicsPattern.parse(r"logs-\d{4}-\d{2}")
    assert steps_of("a" * 9 + "{60}") > STEPS_MAX


def watch(watcher_id=7, pattern="public/default/n.*", **fields):
    names = {"namespace": "public/default", "topics_pattern": pattern}
    return {"request_id": watcher_id, "watcher_id": watcher_id} | names | fields


def test_a_watch_sees_what_comes_and_goes_and_what_grows_after_a_minute():
    async def act(stage):
        broker, session = await session_of(stage)
        topics = broker.client.topics
        await topics.create("n0", policies={"partitioned": False})
        name = "watch_topic_list"
        listed = await session.answer(f"{name}_success", name, **watch())
        prefix = "persistent://public/default/"
        assert listed.topic == [f"{prefix}n0"]
        same = await session.answer(f"{name}_success", name, **watch(8, topics_hash="b"))
        assert (same.topic, same.topics_hash) == (listed.topic, listed.topics_hash)
        same = await session.answer(
            f"{name}_success", name, **watch(8, topics_hash=listed.topics_hash)
        )
        assert same.topic == []
        await session.answer("success", f"{name}_close", request_id=9, watcher_id=8)

        await topics.create("x")
        await topics.create("n1", 2)
        update = await session.socket.answer("watch_topic_update")
        new = [f"{prefix}n1-partition-0", f"{prefix}n1-partition-1"]
        assert (update.watcher_id, update.new_topics, update.deleted_topics) == (7, new, [])
        assert update.topics_hash == topics_hash([f"{prefix}n0", *new])
        await topics.delete("n0")
        update = await session.socket.answer("watch_topic_update")
        assert (update.new_topics, update.deleted_topics) == ([], [f"{prefix}n0"])
        await TopicAdmin(broker.client).grow("n1", 3)
        update = await session.socket.answer("watch_topic_update")
        assert update.new_topics == [f"{prefix}n1-partition-2"]

        session.connection.connection_lost(None)
        await asyncio.sleep(0.1)
        assert not broker.topic_lists.namespaces and not broker.topic_lists.watches

    play(act)


def test_growth_is_seen_in_time_also_while_other_topics_come_and_go(monkeypatch):
    monkeypatch.setattr("spark_ledger.broker.topic_lists.REREAD_S", 8.0)

    async def act(stage):
        broker, session = await session_of(stage)
        topics, name = broker.client.topics, "watch_topic_list"
        await topics.create("n1", 2)
        await session.answer(f"{name}_success", name, **watch())
        await TopicAdmin(broker.client).grow("n1", 3)
        for number in range(5):
            await asyncio.sleep(2)
            await topics.create(f"x{number}")
        assert not session.socket.answers.empty()
        update = await session.socket.answer("watch_topic_update")
        assert update.new_topics == ["persistent://public/default/n1-partition-2"]

    play(act)


def test_watches_beyond_the_limit_and_those_of_no_namespace_are_refused(monkeypatch):
    async def act(stage):
        _, session = await session_of(stage)
        name = "watch_topic_list"
        refused = await session.answer("error", name, **watch(pattern="x" * 51))
        assert (refused.error, "51 characters" in refused.message) == (22, True)
        refused = await session.answer("error", name, **watch(namespace="a/b"))
        assert (refused.error, "no namespace 'a/b'" in refused.message) == (11, True)
        monkeypatch.setattr("spark_ledger.broker.topic_lists.WATCHES_MAX", 1)
        await session.answer(f"{name}_success", name, **watch())
        refused = await session.answer("error", name, **watch(8))
        assert (refused.error, "too many watches" in refused.message) == (22, True)
        await session.answer("success", f"{name}_close", request_id=9, watcher_id=7)
        await session.answer(f"{name}_success", name, **watch(8))

    play(act)


def test_a_client_without_room_gets_later_what_is_left_of_the_changes():
    async def act(stage):
        broker, session = await session_of(stage)
        name, topics = "watch_topic_list", broker.client.topics
        await session.answer(f"{name}_success", name, **watch())
        session.connection.has_room.clear()
        await topics.create("n1", policies={"partitioned": False})
        await asyncio.sleep(1)
        await topics.create("n2", policies={"partitioned": False})
        await asyncio.sleep(1)
        await topics.delete("n1")
        await asyncio.sleep(1)
        assert session.socket.answers.empty()
        session.connection.has_room.set()
        update = await session.socket.answer("watch_topic_update")
        assert update.new_topics == ["persistent://public/default/n2"]

    play(act)


def test_a_list_that_no_client_takes_is_refused():
    assert check_length([A, B]) == [A, B]
    with pytest.raises(Refusal, match="the names of 100000 topics"):
        check_length([A + "x" * 20] * 100_000)


def test_a_namespace_that_does_not_exist_has_no_topics():
    async def main(stage):
        broker, session = await session_of(stage)
        asked = {"namespace": "no/where", "request_id": 3}
        answer = await session.answer(
            "topics_of_namespace_response", "topics_of_namespace", **asked
        )
        assert list(answer.topics) == []
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_lists_have_the_partitions_of_a_topic_that_software_of_an_earlier_version_has_grown(
    monkeypatch,
):
    async def note_nothing(*_):
        """As that software, which does not write the topic's record when a topic grows."""

    async def main(stage):
        broker, session = await session_of(stage)
        await broker.client.topics.create("n", 1, {"partitioned": True})
        with monkeypatch.context() as patched:
            patched.setattr(Topics, "note_growth", note_nothing)
            await TopicAdmin(broker.client).grow("n", 3)
        prefix = "persistent://public/default/n"
        asked = {"topic": prefix, "request_id": 1}
        name = "partitioned_metadata"
        answer = await session.answer(f"{name}_response", name, **asked)
        assert answer.partitions == 3
        asked = {"namespace": "public/default", "request_id": 3}
        name = "topics_of_namespace"
        answer = await session.answer(f"{name}_response", name, **asked)
        listed = [topic for topic in answer.topics if topic.startswith(prefix)]
        assert listed == [f"{prefix}-partition-{number}" for number in range(3)]
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)
