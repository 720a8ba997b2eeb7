"""The source's process as Spark talks to it, with a real cluster and no session of Spark."""

import asyncio
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest

from spark_ledger.errors import (
    LedgerFenced,
    PartitionRemoved,
    RowsTrimmed,
    SubscriptionBusy,
    TopicDeleted,
    TopicRecreated,
    Unavailable,
)
from spark_ledger.metadata.store import StoreUnavailable
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.read.source import LedgerStreamReader
from spark_ledger.spark.rows.columns import DEFAULT_SCHEMA
from spark_ledger.topic import blocking
from spark_ledger.topic.log.actions import Trim
from spark_ledger.topic.upkeep.janitor import remove_tree
from tests.spark.by_hand import Cluster, Owner
from tests.spark.source_runs import poll, read
from tests.spark.topics import wait_until


@pytest.fixture
def by_hand(cluster) -> Cluster:
    return Cluster(cluster.service_url)


@pytest.fixture
def source(cluster):
    """Makes the source of one run; ends them all."""
    made = []

    def make(**options) -> LedgerStreamReader:
        given = {"serviceUrl": cluster.service_url, **options}
        if "startingSubscription" not in given:
            given.setdefault("startingOffsets", "earliest")
        made.append(LedgerStreamReader(stream_read_options(given), DEFAULT_SCHEMA))
        return made[-1]

    make.made = made
    yield make
    for one in made:
        one.stop()


@pytest.fixture
def driver(cluster):
    """The client that the sources of this process share."""
    options = stream_read_options({"serviceUrl": cluster.service_url, "topic": "any"})
    return blocking.topics(options.service_url, options.outage_timeout_s).client


def test_a_pattern_is_looked_at_again_when_a_run_begins(by_hand, source, topic):
    by_hand.write(f"{topic}-a", range(5))
    options = {"subscribePattern": f"{topic}-[ab]", "startingOffsets": "latest"}
    first = source(**options)
    start = first.initialOffset()
    assert poll(first, start) is start
    by_hand.write(f"{topic}-a", range(5, 10))
    by_hand.write(f"{topic}-b", range(10, 15), partitions=2)
    again = source(**options)
    end = poll(again, start)
    assert sorted(read(again, start, end)) == list(range(5, 15))
    assert poll(again, end) is end


def test_a_running_source_finds_topics_and_partitions_that_come(
    by_hand, source, topic, monkeypatch
):
    monkeypatch.setattr("spark_ledger.spark.read.topics_read.RESCAN_S", 0.1)
    by_hand.write(f"{topic}-a", range(5))
    run = source(subscribePattern=f"{topic}-[ab]")
    start = run.initialOffset()
    end = poll(run, start)
    by_hand.grow(f"{topic}-a", 3)
    by_hand.write(f"{topic}-b", range(5, 9))
    wait_until(lambda: len(poll(run, end).get(f"{topic}-a", {})) == 3 and poll(run, end) != end)
    wait_until(lambda: f"{topic}-b" in poll(run, end))
    assert sorted(read(run, start, end) + read(run, end, poll(run, end))) == list(range(9))


@pytest.fixture
def later(monkeypatch):
    """The source's clock stands. `later(seconds)`: it is so much later than at the beginning."""
    began_s = time.monotonic()

    def go_to(seconds: float) -> None:
        clock = SimpleNamespace(monotonic=lambda: began_s + seconds)
        monkeypatch.setattr("spark_ledger.spark.read.topics_read.time", clock)

    go_to(0)
    return go_to


def test_the_first_poll_after_a_pause_has_the_topics_that_came_meanwhile(
    by_hand, source, topic, later
):
    by_hand.write(f"{topic}-a", range(5))
    run = source(subscribePattern=f"{topic}-[abc]")
    end = poll(run, run.initialOffset())
    for name, minute in (("b", 1), ("c", 2)):
        by_hand.write(f"{topic}-{name}", range(5, 9))
        later(60 * minute)
        start, end = end, poll(run, end)
        assert read(run, start, end) == list(range(5, 9))


def test_polls_that_follow_one_another_do_not_wait_for_a_look_at_the_topics(
    by_hand, source, driver, topic, later, monkeypatch
):
    by_hand.write(f"{topic}-a", range(5))
    run = source(subscribePattern=f"{topic}-[ab]")
    end = poll(run, run.initialOffset())
    looks, names = [], Future()

    async def slow():
        looks.append(time.monotonic())
        return await asyncio.wrap_future(names)

    monkeypatch.setattr(driver.topics, "names", slow)
    monkeypatch.setattr("spark_ledger.spark.read.topics_read.wait", None)
    later(0.9)
    assert poll(run, end) is end
    assert poll(run, end) is end
    wait_until(lambda: looks)
    monkeypatch.setattr("spark_ledger.spark.read.topics_read.wait", wait)
    monkeypatch.setattr("spark_ledger.spark.read.topics_read.RESCAN_WAIT_S", 0.05)
    later(60)
    assert poll(run, end) is end  # it waits so long, and not for the answer
    assert len(looks) == 1
    names.set_result([])


def test_looking_for_topics_that_a_pattern_matches_reads_none_that_is_known_or_does_not_match(
    by_hand, source, driver, topic, monkeypatch
):
    monkeypatch.setattr("spark_ledger.spark.read.topics_read.RESCAN_S", 0.05)
    by_hand.write(f"{topic}-a", range(5))
    by_hand.write(f"{topic}-elsewhere", range(5))
    run = source(subscribePattern=f"{topic}-[ab]")
    start = run.initialOffset()
    by_hand.write(f"{topic}-b", range(5, 9))
    topics, read_paths, looks = driver.topics, [], []
    get, names = topics.store.get, topics.names

    async def watched(path, watch=None):
        read_paths.append(path)
        return await get(path, watch)

    async def looked(*of, **how):
        looks.append(None)
        return await names(*of, **how)

    monkeypatch.setattr(topics.store, "get", watched)
    monkeypatch.setattr(topics, "names", looked)
    wait_until(lambda: f"{topic}-b" in poll(run, start))
    looks.clear()
    wait_until(lambda: poll(run, start) and len(looks) > 4)
    named = [path.rpartition("/")[2] for path in read_paths]
    assert named.count(f"{topic}-b") == 1
    assert not {f"{topic}-a", f"{topic}-elsewhere"} & set(named)


def test_a_subscription_is_at_the_end_when_an_available_now_run_is(by_hand, source, topic):
    by_hand.write(topic, range(20))
    run = source(subscribe=topic, subscription="mine", maxOffsetsPerTrigger="15")
    run.prepareForTriggerAvailableNow()
    start = run.initialOffset()
    first = poll(run, start)
    assert read(run, start, first) == list(range(15))
    last = poll(run, first)
    assert read(run, first, last) == list(range(15, 20))
    assert poll(run, last) is last
    topic_id = by_hand.info(topic).id
    lag = by_hand.run(by_hand.client.subscriptions.lag(topic_id, "mine", 0))
    assert (lag[0].position, lag[0].rows) == (20, 0)


def test_a_subscription_has_one_query_and_of_it_the_newest_run(by_hand, source, topic):
    by_hand.write(topic, range(20))
    options = {"subscribe": topic, "subscription": "mine"}
    old = source(**options)
    start = old.initialOffset()
    end = poll(old, start)
    assert read(old, start, end) == list(range(20))
    stranger = source(**options)
    with pytest.raises(SubscriptionBusy, match=r"\[LEDGER_SUBSCRIPTION.BUSY\]"):
        poll(stranger, stranger.initialOffset())
    new = source(**options)
    assert poll(new, end) is end

    def fenced():
        try:
            poll(old, end)
        except LedgerFenced:
            return True
        return False

    wait_until(fenced)
    assert poll(new, end) is end


@pytest.fixture
def killed(by_hand, source, driver, monkeypatch):
    """`killed(run)`: its process is gone without a word."""
    cursors, open_plain = [], driver.subscriptions.open

    async def noted(*about, **options):
        cursors.append(await open_plain(*about, **options))
        return cursors[-1]

    def kill(run) -> None:
        source.made.remove(run)
        for cursor in cursors:
            by_hand.run(cursor.abandon())

    monkeypatch.setattr(driver.subscriptions, "open", noted)
    return kill


def test_a_query_killed_before_spark_kept_an_offset_of_it_has_its_subscription_at_once_again(
    by_hand, source, killed, topic
):
    by_hand.write(topic, range(20))
    options = {"subscribe": topic, "subscription": "mine"}
    first = source(**options)
    poll(first, first.initialOffset())
    killed(first)
    again = source(**options)
    start = again.initialOffset()
    end = poll(again, start)
    assert read(again, start, end) == list(range(20))


def test_a_query_killed_in_its_batch_0_has_its_subscription_at_once_again(
    by_hand, source, killed, topic
):
    by_hand.write(topic, range(20))
    options = {"subscribe": topic, "subscription": "mine"}
    first = source(**options)
    start = first.initialOffset()
    end = poll(first, start)
    assert read(first, start, end) == list(range(20))
    killed(first)
    again = source(**options)
    assert read(again, again.initialOffset(), end) == list(range(20))
    assert poll(again, end) is end


def test_rows_are_held_for_a_query_with_a_subscription_before_its_first_batch(
    by_hand, source, topic
):
    by_hand.write(topic, range(20))
    run = source(subscribe=topic, subscription="mine", startingOffsets="latest")
    start = run.initialOffset()
    assert poll(run, start) is start
    client, topic_id = by_hand.client, by_hand.info(topic).id
    (held,) = by_hand.run(client.subscriptions.list(topic_id))
    assert (held.name, held.live, held.positions) == ("mine", False, {0: 20})


def test_of_two_sources_with_one_subscription_the_second_that_has_rows_is_refused(
    by_hand, source, topic
):
    by_hand.write(topic, range(20))
    options = {"subscribe": topic, "subscription": "mine"}
    one, other = source(**options), source(**options)
    starts = [run.initialOffset() for run in (one, other)]
    ends = [poll(run, start) for run, start in zip((one, other), starts, strict=True)]
    assert read(one, starts[0], ends[0]) == list(range(20))
    with pytest.raises(SubscriptionBusy, match="a query that reads a topic twice needs two"):
        other.partitions(starts[1], ends[1])


def test_batch_0_begins_where_a_subscription_was_although_its_owner_went_on(by_hand, source, topic):
    by_hand.write(topic, range(20))
    client, topic_id = by_hand.client, by_hand.info(topic).id
    by_hand.run(client.subscriptions.create(topic_id, "theirs", {0: 5}))
    options = {"subscribe": topic, "startingSubscription": "theirs"}
    first = source(**options)
    end = poll(first, first.initialOffset())
    by_hand.run(client.subscriptions.seek(topic_id, "theirs", {0: 18}))
    again = source(**options)
    assert read(again, again.initialOffset(), end) == list(range(5, 20))


def test_a_live_segment_is_followed_through_its_seal(by_hand, source, topic):
    by_hand.write(topic, range(25))
    run = source(subscribe=topic)
    start = poll(run, run.initialOffset())
    owner = Owner(by_hand, topic, 25)
    owner.append(5)
    wait_until(lambda: poll(run, start) is not start)
    middle = poll(run, start)
    assert read(run, start, middle) == list(range(25, 30))
    owner.append(7)
    wait_until(lambda: poll(run, middle) is not middle)
    owner.seal()
    by_hand.write(topic, range(37, 40))
    wait_until(lambda: poll(run, middle)[topic] == {"0": 40})
    end = poll(run, middle)
    assert read(run, middle, end) == list(range(30, 40))
    assert read(run, start, end) == list(range(25, 40))


def test_rows_trimmed_before_they_were_read_are_told_with_their_number_or_left_out(
    by_hand, source, topic
):
    by_hand.write(topic, range(20))
    run = source(subscribe=topic)
    start = run.initialOffset()
    end = poll(run, start)
    by_hand.commit(topic, Trim(((0, 14),)))
    again = source(subscribe=topic)
    with pytest.raises(RowsTrimmed, match="14 rows to be read were removed"):
        again.partitions(start, end)
    lossy = source(subscribe=topic, failOnDataLoss="false")
    assert read(lossy, start, end) == list(range(14, 20))


@pytest.mark.parametrize("whole", [True, False], ids=["kept", "removed"])
def test_a_topic_deleted_while_others_are_read_is_told_or_left_out_with_its_rows(
    by_hand, source, topic, whole
):
    here, gone = f"{topic}-a", f"{topic}-b"
    by_hand.write(here, range(5))
    by_hand.write(gone, range(90, 95))
    options = {"subscribe": f"{here},{gone}"}
    lossy, strict = source(**options, failOnDataLoss="false"), source(**options)
    start = poll(lossy, lossy.initialOffset())
    poll(strict, start)
    info = by_hand.run(by_hand.client.topics.delete(gone))
    if not whole:
        by_hand.run(remove_tree(by_hand.client.store, info.id))
    by_hand.write(here, range(5, 9))
    wait_until(lambda: poll(lossy, start) is not start and gone not in poll(lossy, start))
    end = poll(lossy, start)
    assert read(lossy, start, end) == list(range(5, 9))
    assert poll(lossy, end) is end
    again = source(subscribePattern=f"{topic}-[ab]", failOnDataLoss="false")
    assert read(again, start, poll(again, start)) == list(range(5, 9))
    with pytest.raises(TopicDeleted, match=f"topic '{gone}' .* was deleted"):
        wait_until(lambda: poll(strict, start) is None)


def delete(by_hand, topic) -> str:
    """Returns the id it had."""
    return by_hand.run(by_hand.client.topics.delete(topic)).id


@pytest.mark.parametrize("strict", ["true", "false"])
@pytest.mark.parametrize("named_by", ["subscribe", "subscribePattern"])
def test_a_running_source_whose_topic_is_made_again_says_so_whatever_may_be_lost(
    by_hand, source, topic, strict, named_by
):
    by_hand.write(topic, range(5))
    run = source(**{named_by: topic, "failOnDataLoss": strict})
    start = run.initialOffset()
    end = poll(run, start)
    poll(run, end)
    old = delete(by_hand, topic)
    by_hand.write(topic, range(5, 9))
    new = by_hand.info(topic).id
    told = f"topic '{topic}' with id {old} was deleted; the topic of that name now has id {new}"
    with pytest.raises(TopicRecreated, match=told):
        wait_until(lambda: poll(run, end) is not end)


def test_a_source_goes_on_without_a_deleted_topic_with_one_warning_until_it_is_made_again(
    by_hand, source, driver, topic, monkeypatch, caplog
):
    monkeypatch.setattr("spark_ledger.spark.read.topics_read.RESCAN_S", 0.1)
    by_hand.write(topic, range(5))
    run = source(subscribe=topic, failOnDataLoss="false")
    start = run.initialOffset()
    end = poll(run, start)
    old = delete(by_hand, topic)

    def warnings() -> list[str]:
        assert poll(run, end) is end
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        return [text for text in said if old in text]

    wait_until(warnings)
    looks, find = [], driver.topics.find

    async def looked(name, **how):
        looks.append(name)
        return await find(name, **how)

    monkeypatch.setattr(driver.topics, "find", looked)
    wait_until(lambda: poll(run, end) is end and looks)
    assert warnings() == [
        f"topic '{topic}' (id {old}) was deleted: as failOnDataLoss is false, it is left out"
    ]
    by_hand.write(topic, range(5, 9))
    with pytest.raises(TopicRecreated, match=f"of that name now has id {by_hand.info(topic).id}"):
        wait_until(lambda: poll(run, end) is not end)


def test_the_first_poll_after_a_pause_sees_that_a_topic_it_left_out_is_made_again(
    by_hand, source, topic, later, caplog
):
    by_hand.write(topic, range(5))
    run = source(subscribe=topic, failOnDataLoss="false")
    end = poll(run, run.initialOffset())
    delete(by_hand, topic)
    wait_until(lambda: poll(run, end) is end and "it is left out" in caplog.text)
    by_hand.write(topic, range(5, 9))
    later(60)
    with pytest.raises(TopicRecreated):
        poll(run, end)


def test_a_target_of_available_now_does_not_leave_out_a_topic_that_is_made_again(
    by_hand, source, topic
):
    by_hand.write(topic, range(5))
    run = source(subscribe=topic, failOnDataLoss="false")
    run.initialOffset()
    delete(by_hand, topic)
    run.prepareForTriggerAvailableNow()
    by_hand.write(topic, range(5, 9))
    with pytest.raises(TopicRecreated):
        run.prepareForTriggerAvailableNow()


@pytest.mark.parametrize("whole", [True, False])
def test_a_topic_that_goes_while_a_pattern_finds_it_does_not_end_the_query(
    by_hand, source, driver, topic, whole, monkeypatch
):
    by_hand.write(f"{topic}-a", range(5))
    run = source(subscribePattern=f"{topic}-[ab]")
    start = run.initialOffset()
    end = poll(run, start)
    by_hand.write(f"{topic}-b", range(5, 9))
    gone = by_hand.run(by_hand.client.topics.delete(f"{topic}-b"))
    if not whole:
        by_hand.run(remove_tree(by_hand.client.store, gone.id))
    looks = []

    async def seen_just_before(*_, **__):
        looks.append(None)
        return gone

    with monkeypatch.context() as before:
        before.setattr(driver.topics, "names", lambda: asyncio.sleep(0, [gone.name]))
        before.setattr(driver.topics, "find", seen_just_before)
        wait_until(lambda: poll(run, end) is end and len(looks) > 1)
    by_hand.write(f"{topic}-b", range(9, 12))
    wait_until(lambda: poll(run, end) is not end)
    assert read(run, end, poll(run, end)) == list(range(9, 12))


def test_a_metadata_store_that_goes_away_is_told_as_unavailable(
    by_hand, source, driver, topic, monkeypatch
):
    by_hand.write(topic, range(5))
    run = source(subscribe=topic)
    start = run.initialOffset()
    end = poll(run, start)

    async def silent(*_, **__):
        raise StoreUnavailable("no answer in time")

    monkeypatch.setattr(driver.store, "sync", silent)
    for ask in (
        run.prepareForTriggerAvailableNow,
        lambda: source(subscribe=topic).initialOffset(),
        lambda: poll(run, {**end, topic: {"0": 9}}),
    ):
        with pytest.raises(Unavailable, match=r"\[LEDGER_UNAVAILABLE\]"):
            ask()


def test_rows_trimmed_while_their_chunks_are_read_are_no_less_told(
    by_hand, source, driver, topic, monkeypatch
):
    by_hand.write(topic, range(20))
    run = source(subscribe=topic)
    start = run.initialOffset()
    end = poll(run, start)
    client, ready = driver, driver.state_with_tables

    async def trimmed_meanwhile(state, ranges):
        monkeypatch.setattr(client, "state_with_tables", ready)
        intent = await client.intents.open_system_intent("by hand", state.topic_id)
        await client.commit_actions(state.topic_id, [Trim(((0, 14),))], intent)
        newer = await client.log(state.topic_id).fold(fresh=True)
        return newer, await client.tables(newer, {0: (14, 20)})

    monkeypatch.setattr(client, "state_with_tables", trimmed_meanwhile)
    with pytest.raises(RowsTrimmed, match="14 rows to be read were removed"):
        run.partitions(start, end)


def test_a_partition_that_an_offset_names_and_nobody_reads_any_more_is_told(by_hand, source, topic):
    by_hand.write(topic, range(20), partitions=2)
    both = source(subscribe=topic)
    end = poll(both, both.initialOffset())
    with pytest.raises(PartitionRemoved, match="partition 1"):
        poll(source(assign='{"%s":[0]}' % topic), end)  # noqa: UP031
