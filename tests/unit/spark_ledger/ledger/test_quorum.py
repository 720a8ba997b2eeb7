"""Quorum predicates against their definitions as sets, for every (E, Qw, Qa) up to 7."""

import itertools
from typing import Any

import pytest

from bookie_server.api.status import Meaning
from spark_ledger.ledger.quorum import Quorum, Verdict, recovery_verdict

SIZES = [Quorum(e, w, a) for e in range(1, 8) for w in range(1, e + 1) for a in range(1, w + 1)]
BIG_IDS = [base + step for base in (0, 2**31, 2**32, 2**53, 2**63 - 8) for step in range(8)]


def windows(quorum: Quorum) -> list[list[int]]:
    e = quorum.ensemble_size
    return [[(s + i) % e for i in range(quorum.write_quorum)] for s in range(e)]


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_a_write_set_is_consecutive_slots_from_the_entrys_own_also_for_large_ids(quorum):
    for entry_id in BIG_IDS:
        expected = [(entry_id + i) % quorum.ensemble_size for i in range(quorum.write_quorum)]
        assert list(quorum.write_set(entry_id)) == expected
        mask = quorum.write_masks()[entry_id % quorum.ensemble_size]
        assert mask == sum(1 << slot for slot in expected)


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_four_forms_of_coverage_agree_for_every_set_of_silent_bookies(quorum):
    for silent in range(1 << quorum.ensemble_size):
        quiet = {slot for slot in range(quorum.ensemble_size) if silent >> slot & 1}
        by_heard = all(
            len(set(window) - quiet) >= quorum.negatives_needed for window in windows(quorum)
        )
        by_silent = all(len(set(window) & quiet) < quorum.ack_quorum for window in windows(quorum))
        by_ack_quorums_hit = all(
            set(acks) - quiet
            for window in windows(quorum)
            for acks in itertools.combinations(window, quorum.ack_quorum)
        )
        no_silent_ack_quorum = not any(
            set(acks) <= quiet
            for window in windows(quorum)
            for acks in itertools.combinations(window, quorum.ack_quorum)
        )
        assert quorum.covers_ensemble(silent) == by_heard == by_silent
        assert by_silent == by_ack_quorums_hit == no_silent_ack_quorum


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_writable_means_that_each_write_set_keeps_an_ack_quorum(quorum):
    for failed in range(1 << quorum.ensemble_size):
        left = {slot for slot in range(quorum.ensemble_size) if not failed >> slot & 1}
        expected = all(len(set(w) & left) >= quorum.ack_quorum for w in windows(quorum))
        assert quorum.is_writable(failed) == expected


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_a_cover_has_a_copy_of_every_entry(quorum):
    for first in range(quorum.ensemble_size):
        cover = set(quorum.covering_slots(first))
        assert first in cover
        assert all(cover & set(window) for window in windows(quorum))


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_an_ack_quorum_is_any_so_many_of_a_write_set(quorum):
    for window in windows(quorum):
        for acks in range(1 << quorum.write_quorum):
            by = {slot for at, slot in enumerate(window) if acks >> at & 1}
            expected = any(
                set(some) <= by for some in itertools.combinations(window, quorum.ack_quorum)
            )
            assert quorum.is_acked(sum(1 << slot for slot in by)) == expected


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_after_coverage_no_add_can_be_acknowledged_any_more(quorum):
    """Who was heard is fenced: only the silent still take adds, and they are no ack quorum. As
    long as it is not covered, some entry still could be."""
    for silent in range(1 << quorum.ensemble_size):
        still_taking = [mask & silent for mask in quorum.write_masks()]
        assert quorum.covers_ensemble(silent) == (not any(map(quorum.is_acked, still_taking)))


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_each_slot_keeps_the_entries_whose_write_sets_it_is_in(quorum):
    for slot in range(quorum.ensemble_size):
        kept = [e for e in range(quorum.ensemble_size) if slot in quorum.write_set(e)]
        assert len(kept) == quorum.write_quorum
        masks = [e for e, mask in enumerate(quorum.write_masks()) if mask >> slot & 1]
        assert kept == masks


PAIRS = [Quorum(7, w, a) for w in range(1, 8) for a in range(1, w + 1)]


def widest_slow(quorums: list[Quorum]) -> list[Any]:
    """Of seven copies there are more vectors of answers than of all others together."""
    return [
        pytest.param(one, marks=pytest.mark.slow if one.write_quorum == 7 else ())
        for one in quorums
    ]


@pytest.mark.parametrize("quorum", widest_slow(PAIRS), ids=str)
def test_the_tail_verdict_equals_its_definition_for_every_vector_of_answers(quorum):
    """By sets: absent is an entry if no ack quorum of its write set can have had it. A torn member
    may have had it as long as somebody else of the write set may who did not deny it: one whose
    answer is outstanding or unknown."""
    answers = [Meaning.POSITIVE, Meaning.NEGATIVE, Meaning.TORN, Meaning.UNKNOWN, None]
    for said in itertools.product(answers, repeat=quorum.write_quorum):
        silent = {at for at, answer in enumerate(said) if answer in (Meaning.UNKNOWN, None)}
        torn = {at for at, answer in enumerate(said) if answer is Meaning.TORN}
        may_hold = silent | torn if silent else silent
        by_number = len(silent | torn) < quorum.ack_quorum
        if Meaning.POSITIVE in said:
            expected = Verdict.RECOVER
        elif by_number or not may_hold:
            expected = Verdict.ABSENT
        elif None in said:
            expected = Verdict.WAIT
        else:
            expected = Verdict.UNDECIDABLE
        assert recovery_verdict(quorum, list(said)) is expected


@pytest.mark.parametrize("quorum", PAIRS, ids=str)
def test_a_verdict_that_waits_can_still_be_decided_and_one_that_does_not_cannot(quorum):
    """WAIT: some way to answer what is outstanding decides. UNDECIDABLE: nothing is outstanding,
    and both worlds, acknowledged and never written, explain every answer."""
    answers = [Meaning.NEGATIVE, Meaning.TORN, Meaning.UNKNOWN, None]
    for said in itertools.combinations_with_replacement(answers, quorum.write_quorum):
        verdict = recovery_verdict(quorum, list(said))
        if verdict is Verdict.WAIT:
            filled = [Meaning.POSITIVE if answer is None else answer for answer in said]
            assert recovery_verdict(quorum, filled) is Verdict.RECOVER
        if verdict is Verdict.UNDECIDABLE:
            assert None not in said
            assert Meaning.UNKNOWN in said
            may_hold = said.count(Meaning.UNKNOWN) + said.count(Meaning.TORN)
            assert may_hold >= quorum.ack_quorum


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_an_acknowledged_entry_is_never_judged_absent(quorum):
    """Honest members: who holds the entry says so or is silent; who does not may deny it."""
    members = range(quorum.write_quorum)
    for holders in itertools.combinations(members, quorum.ack_quorum):
        choices = [
            (Meaning.POSITIVE, Meaning.UNKNOWN, None)
            if member in holders
            else (Meaning.NEGATIVE, Meaning.UNKNOWN, None)
            for member in members
        ]
        for said in itertools.product(*choices):
            assert recovery_verdict(quorum, list(said)) is not Verdict.ABSENT


@pytest.mark.parametrize("quorum", widest_slow(SIZES), ids=str)
def test_an_acknowledged_entry_is_never_judged_absent_while_one_holder_of_it_is_not_torn(quorum):
    """Torn members may have lost what they acknowledged, all but one; that one says that it has
    it, or nothing of use."""
    members = range(quorum.write_quorum)
    for holders in itertools.combinations(members, quorum.ack_quorum):
        for whole in holders:
            choices: list[tuple[Meaning | None, ...]] = [
                (Meaning.POSITIVE, Meaning.TORN, Meaning.UNKNOWN, None)
                if member in holders and member != whole
                else (Meaning.NEGATIVE, Meaning.TORN, Meaning.UNKNOWN)
                for member in members
            ]
            choices[whole] = (Meaning.POSITIVE, Meaning.UNKNOWN, None)
            for said in itertools.product(*choices):
                assert recovery_verdict(quorum, list(said)) is not Verdict.ABSENT


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_when_power_failed_everywhere_the_end_is_found_once_all_have_answered(quorum):
    torn = [Meaning.TORN] * quorum.write_quorum
    assert recovery_verdict(quorum, torn) is Verdict.ABSENT
    for silent in range(quorum.write_quorum):
        said: list[Meaning | None] = [*torn]
        said[silent] = None
        assert recovery_verdict(quorum, said) is Verdict.WAIT
        said[silent] = Meaning.UNKNOWN
        assert recovery_verdict(quorum, said) is Verdict.UNDECIDABLE


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("NTT", Verdict.ABSENT),
        ("TTT", Verdict.ABSENT),
        ("NNT", Verdict.ABSENT),
        ("NT?", Verdict.UNDECIDABLE),
        ("TT?", Verdict.UNDECIDABLE),
        ("TT.", Verdict.WAIT),
        ("NT.", Verdict.WAIT),
        ("TTY", Verdict.RECOVER),
        ("YNN", Verdict.RECOVER),
        ("YY?", Verdict.RECOVER),
        ("Y??", Verdict.RECOVER),
        ("??N", Verdict.UNDECIDABLE),
        ("?N.", Verdict.WAIT),
        ("NN.", Verdict.ABSENT),
        ("NN?", Verdict.ABSENT),
        ("NNN", Verdict.ABSENT),
        ("???", Verdict.UNDECIDABLE),
        ("...", Verdict.WAIT),
    ],
)
def test_the_tail_decisions_of_three_copies_with_two_acks(said, expected):
    letters = {
        "Y": Meaning.POSITIVE,
        "N": Meaning.NEGATIVE,
        "T": Meaning.TORN,
        "?": Meaning.UNKNOWN,
        ".": None,
    }
    assert recovery_verdict(Quorum(3, 3, 2), [letters[letter] for letter in said]) is expected


def test_quorums_out_of_order_are_refused():
    for sizes in ((2, 3, 2), (3, 2, 3), (3, 3, 0)):
        with pytest.raises(ValueError, match="does not hold"):
            Quorum(*sizes)
