"""Queries that come back after others moved the subscription that follows them."""

import pytest

from spark_ledger.errors import SubscriptionBusy, SubscriptionMoved
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.read.source import LedgerStreamReader
from spark_ledger.spark.rows.columns import DEFAULT_SCHEMA
from tests.spark.by_hand import Cluster
from tests.spark.source_runs import poll, read
from tests.spark.topics import wait_until

BOTH = {"subscription": "both"}


@pytest.fixture
def by_hand(cluster, topic) -> Cluster:
    made = Cluster(cluster.service_url)
    made.write(topic, range(40))
    return made


@pytest.fixture
def run(cluster, topic):
    """Makes the source of one run; ends them all."""
    made = []

    def make(policy, **options):
        given = {"serviceUrl": cluster.service_url, "subscribe": topic, **BOTH, **options}
        given |= {"onSubscriptionMoved": policy} if policy else {}
        given.setdefault("startingOffsets", "earliest")
        made.append(LedgerStreamReader(stream_read_options(given), DEFAULT_SCHEMA))
        return made[-1]

    yield make
    for source in made:
        source.stop()


def first_run(run, policy, **options):
    """A run that has read 20 rows of 40 and ended; the end of its batch."""
    source = run(policy, maxOffsetsPerTrigger="20", **options)
    start = source.initialOffset()
    end = poll(source, start)
    assert read(source, start, end) == list(range(20))
    source.commit(end)
    source.stop()
    return end


def seek(by_hand, topic, offset):
    info = by_hand.info(topic)
    by_hand.run(by_hand.client.subscriptions.seek(info.id, "both", {0: offset}, force=True))


def position(by_hand, topic):
    info = by_hand.info(topic)
    return by_hand.run(by_hand.client.subscriptions.positions(info.id, "both"))[0]


@pytest.mark.parametrize("policy", [None, "checkpoint", "subscription", "fail"])
def test_a_subscription_that_nothing_moved_goes_on_with_its_query(by_hand, run, topic, policy):
    end = first_run(run, policy)
    again = run(policy)
    last = poll(again, end)
    assert read(again, end, last) == list(range(20, 40))
    again.commit(last)
    again.stop()
    assert position(by_hand, topic) == 40


@pytest.mark.parametrize("to", [7, 31])
def test_by_default_the_checkpoint_decides_and_the_subscription_follows(by_hand, run, topic, to):
    end = first_run(run, None)
    seek(by_hand, topic, to)
    again = run("checkpoint")
    last = poll(again, end)
    assert read(again, end, last) == list(range(20, 40))


@pytest.mark.parametrize("to", [7, 31])
def test_a_query_goes_on_where_its_subscription_is(by_hand, run, topic, to):
    end = first_run(run, "subscription")
    seek(by_hand, topic, to)
    again = run("subscription")
    last = poll(again, end)
    assert position(by_hand, topic) == to, "until the batch is in the checkpoint"
    assert read(again, end, last) == list(range(to, 40))
    assert read(again, last, last) == [], "it is also the end of an empty batch"
    by_hand.write(topic, range(40, 45))
    wait_until(lambda: poll(again, last) is not last)
    later = poll(again, last)
    assert read(again, last, later) == list(range(40, 45))
    again.commit(later)
    again.stop()
    assert position(by_hand, topic) == 45
    replay = run("subscription")
    assert read(replay, end, last) == list(range(to, 40)), "the batch says where it begins"


def test_a_run_that_was_killed_before_its_batch_was_kept_goes_on_there_again(by_hand, run, topic):
    end = first_run(run, "subscription")
    seek(by_hand, topic, 31)
    killed = run("subscription")
    poll(killed, end)
    again = run("subscription")
    assert read(again, end, poll(again, end)) == list(range(31, 40))


def test_a_batch_of_before_is_done_again_before_the_query_goes_on_elsewhere(by_hand, run, topic):
    source = run("subscription", maxOffsetsPerTrigger="10")
    start = source.initialOffset()
    first = poll(source, start)
    assert read(source, start, first) == list(range(10))
    second = poll(source, first)
    assert read(source, first, second) == list(range(10, 20))
    source.stop()
    seek(by_hand, topic, 35)
    again = run("subscription")
    assert read(again, first, second) == list(range(10, 20)), "as it was planned"
    again.commit(second)
    assert position(by_hand, topic) == 35
    assert read(again, second, poll(again, second)) == list(range(35, 40))


def test_a_subscription_at_the_end_waits_for_rows_and_moves_on_with_others(by_hand, run, topic):
    end = first_run(run, "subscription")
    seek(by_hand, topic, 40)
    again = run("subscription")
    assert poll(again, end) is end
    seek(by_hand, topic, 38)
    by_hand.write(topic, range(40, 45))
    rows = []
    while len(rows) < 7:
        end, begin = poll(again, end), end
        rows += read(again, begin, end) if end is not begin else []
    assert rows == list(range(38, 45))


@pytest.mark.parametrize("to", [7, 31])
def test_a_query_fails_with_both_positions_before_it_reads(by_hand, run, topic, to):
    end = first_run(run, "fail")
    seek(by_hand, topic, to)
    again = run("fail")
    moved = (
        rf"\[LEDGER_SUBSCRIPTION.MOVED\] subscription 'both' was moved .* in partition 0 of topic"
        rf" '.*{topic}' it is at {to}, the query at 20\. Give onSubscriptionMoved=checkpoint"
    )
    for _ in range(2):
        with pytest.raises(SubscriptionMoved, match=moved):
            poll(again, end)
    assert position(by_hand, topic) == to
    as_before = run("checkpoint")
    assert read(as_before, end, poll(as_before, end)) == list(range(20, 40))


def test_another_query_that_has_the_subscription_is_not_pushed_aside(by_hand, run, topic):
    end = first_run(run, "subscription")
    other = run(None)
    begin = other.initialOffset()
    read(other, begin, poll(other, begin))
    with pytest.raises(SubscriptionBusy):
        poll(run("subscription"), end)


def test_a_subscription_that_was_deleted_is_made_again_at_the_checkpoint(by_hand, run, topic):
    end = first_run(run, "subscription")
    info = by_hand.info(topic)
    by_hand.run(by_hand.client.subscriptions.delete(info.id, "both"))
    again = run("subscription")
    assert read(again, end, poll(again, end)) == list(range(20, 40))


def test_a_new_query_begins_as_it_is_asked_to(by_hand, run, topic):
    info = by_hand.info(topic)
    by_hand.run(by_hand.client.subscriptions.create(info.id, "both", {0: 30}))
    source = run("fail")
    start = source.initialOffset()
    assert read(source, start, poll(source, start)) == list(range(40))
