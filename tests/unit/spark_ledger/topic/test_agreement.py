import asyncio
from dataclasses import replace

from spark_ledger.topic.log import state, topic_log
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.state import SHARED_COMMITS_MAX
from tests.unit.spark_ledger.topic.stage import segment


def topics(names, commits):
    """States of the topics after commits, each given as the names of the topics it is over."""
    states = {name: state.empty(name, 1) for name in names}
    for number, over in enumerate(commits):
        for name in over:
            others = tuple(other for other in over if other != name)
            commit = Commit(
                f"c{number}", "q", "*", number, "r", "i", (Append((segment(number, 1),)),),
                others=others,
            )  # fmt: skip
            states[name] = state.apply(states[name], states[name].next, commit, 100)
    return states


def test_states_agree_when_each_shared_commit_is_in_all_of_them():
    states = topics("abc", ["ab", "a", "abc", "c", "bc"])

    assert topic_log.states_agree(states.values())
    assert topic_log.states_agree([states["a"]])
    assert topic_log.states_agree([])


def test_a_state_that_lacks_what_another_has_is_found():
    before = topics("abc", ["ab"])
    after = topics("abc", ["ab", "bc"])
    first = topics("abc", [])

    assert topic_log.disagreeing_topics([before["b"], after["c"]]) == ["b", "c"]
    assert topic_log.disagreeing_topics([after["b"], before["c"], after["a"]]) == ["b", "c"]
    assert topic_log.disagreeing_topics([first["a"], before["b"]]) == ["a", "b"]
    assert topic_log.states_agree([before["a"], after["b"]]), "b and c share it, a does not"


def test_however_many_commits_there_were_the_last_shared_with_each_topic_is_remembered():
    pairs = ["ab", *["ac"] * (2 * SHARED_COMMITS_MAX), "ab"]
    before, after = topics("abc", pairs[:-1]), topics("abc", pairs)

    assert len(after["a"].shared_commits) == 2
    assert topic_log.states_agree(after.values())
    assert topic_log.disagreeing_topics([before["b"], after["a"]]) == ["a", "b"]
    assert topic_log.disagreeing_topics([after["b"], before["a"]]) == ["a", "b"]


def test_what_a_state_may_have_forgotten_is_taken_to_be_in_it():
    names = ["a", "b", *(f"t{n}" for n in range(SHARED_COMMITS_MAX))]
    states = topics(names, [["a", "b"], *([["a", name] for name in names[2:]])])

    assert len(states["a"].shared_commits) == SHARED_COMMITS_MAX
    assert topic_log.states_agree([states["a"], states["b"]])


class Log:
    """Gives out one state after another, the last one for ever."""

    def __init__(self, *states):
        self.topic_id = states[0].topic_id
        self.states = list(states)

    async def fold(self, *, fresh):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def test_topics_are_folded_again_until_they_agree():
    before, after = topics("ab", ["ab"]), topics("ab", ["ab", "ab"])

    folded = asyncio.run(topic_log.fold_agreeing([Log(before["a"], after["a"]), Log(after["b"])]))

    assert [one.next for one in folded] == [2, 2]
    assert topic_log.states_agree(folded)
    assert not topic_log.states_agree([replace(before["a"]), after["b"]])
