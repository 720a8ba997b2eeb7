"""How far producers had come: in seals, in a topic's state, in a checkpoint's root."""

from spark_ledger.topic.log import actions, checkpoint, state
from spark_ledger.topic.log.actions import OpenLive, SealLive
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit

APP = {"commit_id": "c", "app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}

OPEN = OpenLive(0, 7, 1, "owner", 1, True)


def folded(*sealed):
    found = state.empty("t", 1)
    for producers in sealed:
        for action in (OPEN, SealLive(0, 7, None, producers)):
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
    monkeypatch.setattr(state, "PRODUCERS_MAX", 2)
    found = folded((("a", 1),), (("b", 1),), (("a", 2), ("c", 1)))
    assert dict(found.partitions[0].producers) == {"a": 2, "c": 1}


def test_a_checkpoints_root_keeps_them():
    found = folded((("a", 3),))
    opened = state.apply(found, found.next, Commit(**APP, actions=(OPEN,)), 1)
    again = checkpoint.decode_root(checkpoint.encode_root(Root(opened, ()))).state
    assert again.partitions[0].producers == {"a": 3}
    assert again.partitions[0].live == opened.partitions[0].live
