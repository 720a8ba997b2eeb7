"""How far producers had come: in seals, in a topic's state, in a checkpoint's root."""

import pytest

from spark_ledger.topic.log import actions, checkpoint, producers, records, state
from spark_ledger.topic.log.actions import OpenLive, SealLive
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit

APP = {"commit_id": "c", "app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}

OPEN = OpenLive(0, 7, 1, "owner", 1, True)


def folded(*sealed, partitions=1):
    found = state.empty("t", partitions)
    for names in sealed:
        for action in (OPEN, SealLive(0, 7, None, names)):
            found = state.apply(found, found.next, Commit(**APP, actions=(action,)), 1)
    return found


def test_actions_are_the_same_in_json_and_without_producers_as_they_were():
    for action in (OPEN, SealLive(0, 7, None, (("a", 3), ("b", 4)))):
        assert actions.from_json(actions.to_json(action)) == action
    assert "producers" not in actions.to_json(SealLive(0, 7, None))
    assert "deduplicated" not in actions.to_json(OpenLive(0, 7, 1, "owner", 1))


def test_a_state_has_the_highest_that_any_seal_told():
    found = folded((("a", 3), ("b", 9)), (("a", 5), ("b", 2)))
    assert dict(found.partitions[0].producers) == {"a": 5, "b": 9}


def test_those_that_sent_longest_ago_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 2)
    found = folded((("a", 1),), (("b", 1),), (("a", 2), ("c", 1)))
    assert dict(found.partitions[0].producers) == {"a": 2, "c": 1}


def test_a_checkpoints_root_keeps_them():
    found = folded((("a", 3),))
    opened = state.apply(found, found.next, Commit(**APP, actions=(OPEN,)), 1)
    again = checkpoint.decode_root(checkpoint.encode_root(Root(opened, ()))).state
    assert again.partitions[0].producers == {"a": 3}
    assert again.partitions[0].live == opened.partitions[0].live


# -- a limit in bytes ------------------------------------------------------------------------------

CHARACTERS = {"ascii": "x", "escaped": "\x01", "wide": "\U0001f600"}


def many(count, character="x", size=1000):
    size //= len(character.encode())
    return tuple((f"{n:05}" + character * size, n) for n in range(count))


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=CHARACTERS)
def test_producers_of_long_names_take_a_bounded_part_of_a_record_the_newest_of_them(character):
    known = many(5000, character)
    kept = producers.newest_producers(dict(known))
    text = actions.to_json(SealLive(0, 7, None, tuple(kept.items())))["producers"]
    assert 0.9 < len(records.dump({"producers": text})) / producers.PRODUCERS_BYTES_MAX <= 1
    assert tuple(kept.items()) == known[-len(kept) :]


def test_producers_of_usual_names_are_all_kept():
    known = {f"app-0123456789abcdef-{n}": n for n in range(producers.PRODUCERS_MAX)}
    assert list(producers.newest_producers(known)) == list(known)


def test_a_name_that_brokers_took_before_names_had_a_limit_takes_no_place_of_others():
    known = {"a": 1, "x" * (2 << 20): 2, "b": 3}
    assert producers.newest_producers(known) == {"a": 1, "b": 3}


def test_a_state_keeps_what_all_partitions_of_its_topic_can_keep(monkeypatch):
    monkeypatch.setattr(producers, "PRODUCERS_TOGETHER_BYTES_MAX", 100_000)
    alone, of_ten = (
        folded(many(60), many(200), partitions=count).partitions[0].producers for count in (1, 10)
    )
    for kept, bytes_max in ((alone, 100_000), (of_ten, 10_000)):
        assert 0.8 * bytes_max < producers.record_bytes(kept) <= bytes_max
        assert list(kept.items()) == list(many(200)[-len(kept) :])


def test_seals_of_many_partitions_fit_into_one_commit(monkeypatch):
    monkeypatch.setattr(producers, "PRODUCERS_TOGETHER_BYTES_MAX", 100_000)
    sealing = [SealLive(p, 7 + p, None, many(60)) for p in range(10)]
    planned = producers.with_fewer_producers((*sealing, OPEN))
    assert planned[-1] == OPEN
    assert [(one.partition, one.ledger_id) for one in planned[:-1]] == [
        (one.partition, one.ledger_id) for one in sealing
    ]
    body = records.encode_commit(Commit(**APP, actions=planned))
    assert 0.8 < len(body) / 100_000 < 1.05
    assert planned[0].producers == many(60)[-len(planned[0].producers) :]
