"""What consumers have acknowledged up to now, for a query that begins at their subscription."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.acks import asking
from spark_ledger.topic.acks.asking import OwnedAcks, decode_answer, encode_answer
from spark_ledger.topic.acks.entries import AckKey, AckState, BadAckEntry
from spark_ledger.topic.subscription.acked_now import acked_now
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker, acknowledge
from tests.unit.spark_ledger.topic.consumers import NAME, play_here
from tests.unit.spark_ledger.topic.subscription_stage import fill, opened


async def seen(stage, *answering, before=None):
    """(position, rows beyond it) in partition 0, when these brokers answer. `before`: happens
    before they do."""

    async def ask(store, topic_id, name, brokers):
        if before is not None:
            await before()
        answers = [encode_answer(broker.topic_acks.of_subscription(name)) for broker in answering]
        return [owned for answer in answers for owned in decode_answer(answer)]

    client = await stage.another()
    now = await acked_now(client.ledgers, stage.topic.id, NAME, ask)
    return now.positions[0], list(now.acked.get(0, ()))


def test_a_living_owner_answers_with_what_is_not_durable_yet():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        acks.add(7, 9)
        assert await seen(stage, a) == (1, [4, 7, 8])
        await acknowledge(cursor, acks, 1)
        assert await seen(stage, a) == (2, [4, 7, 8])

    play_here(act)


def test_an_owner_is_asked_about_the_subscription_whatever_its_name(monkeypatch):
    async def act(stage):
        asked = []

        async def ask(url):
            asked.append(url)
            return {"partitions": {}}

        monkeypatch.setattr(asking.http, "ask", ask)
        node = json.dumps({"url": "pulsar://a:1", "admin_url": "http://a:2"}).encode()
        await stage.client.store.create(paths.broker("a"), node, parents=True)
        name = "a/b&c=%20 #?\u00fc"
        assert await asking.ask_owners(stage.client.store, "id", name, ["a", "gone"]) == []
        (url,) = map(urlsplit, asked)
        assert (url.netloc, url.path) == ("a:2", f"{asking.ACKNOWLEDGED_PATH}/id")
        assert parse_qs(url.query) == {"subscription": [name]}

    play_here(act)


def test_without_an_answer_every_receipt_counts_and_the_owner_goes_on():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        for offset in (0, 4, 6):
            await acknowledge(cursor, acks, offset)
            assert (await seen(stage))[1] == list(acks.rows)
        await acknowledge(cursor, acks, 8)
        await a.die()
        assert await seen(stage) == (1, [4, 6, 8])

    play_here(act)


def test_an_owner_that_lost_the_partition_does_not_count():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        later, later_acks = await b.consume(2)
        await acknowledge(later, later_acks, 5)
        acks.add(9, 10)
        assert await seen(stage, a) == (1, [4, 5])
        assert await seen(stage, a, b) == (1, [4, 5])

        async def b_takes_more():
            await acknowledge(later, later_acks, 6)

        assert await seen(stage, b, a, before=b_takes_more) == (1, [4, 5, 6])

    play_here(act)


def test_a_broker_that_takes_over_meanwhile_counts():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)

        async def take_over():
            await acknowledge(*await b.consume(2), 6)

        assert await seen(stage, b, a, before=take_over) == (1, [4, 6])

    play_here(act)


@pytest.mark.parametrize("answers", [True, False])
def test_a_released_subscription_has_its_gaps_and_one_without_gaps_its_position(answers):
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        await a.release(cursor)
        assert await seen(stage, *[a] * answers) == (1, [4])
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 1, 2, 3)

        async def release():
            await a.release(cursor)

        assert await seen(stage, *[a] * answers, before=release) == (5, [])

    play_here(act)


def test_a_subscription_that_is_moved_meanwhile_is_read_again():
    async def act(stage):
        await fill(stage, 20)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4, 9)
        moves = [7]

        async def move():
            if moves:
                to = moves.pop()
                await stage.client.subscriptions.move_up(stage.topic.id, NAME, lambda *_: to)

        assert await seen(stage, a, before=move) == (7, [9])

    play_here(act)


def test_a_querys_subscription_has_its_position_only():
    async def act(stage):
        await fill(stage, 20)
        cursor = await opened(stage)
        cursor.advance({0: 7})
        await cursor.durable()
        client = await stage.another()
        now = await acked_now(client.ledgers, stage.topic.id, "s")
        assert (now.positions[0], now.acked) == (7, {})
        with pytest.raises(errors.SubscriptionNotFound, match="no subscription 'other'"):
            await acked_now(client.ledgers, stage.topic.id, "other")

    play_here(act)


STATES = st.builds(
    lambda position, beyond, epoch: AckState(
        position, BitMap64(position + distance for distance in beyond), epoch
    ),
    *(st.integers(0, 2**50), st.sets(st.integers(0, 10**6), max_size=9), st.integers(0, 9)),
)
KEYS = st.builds(AckKey, st.just("s"), st.text(max_size=5), st.integers(0, 9))


@settings(max_examples=30)
@given(st.dictionaries(st.integers(0, 99), st.dictionaries(KEYS, STATES, max_size=3), max_size=4))
def test_an_answer_reads_as_it_was_given(by_partition):
    owned = [OwnedAcks(partition, 7, states) for partition, states in by_partition.items()]
    assert decode_answer(json.loads(json.dumps(encode_answer(owned)))) == owned


@pytest.mark.parametrize(
    "answer",
    [None, [], {"partitions": {"0": {}}}, {"partitions": {"x": {"epoch": 1, "entries": []}}}]
    + [{"partitions": {"0": {"epoch": 1, "entries": [entry]}}} for entry in ("%", "AAAA", 7)],
)
def test_a_malformed_answer_is_refused(answer):
    with pytest.raises(BadAckEntry):
        decode_answer(answer)
