"""The table of the tail: what answers to a recovery read decide, for every E, Qw, Qa up to 4.

The oracle knows no counts. It asks which entries may have been acknowledged: those of which some
set of Qa members of the write set may hold a copy, and a member that denied the entry holds none.
One that lacks it after a torn tail may have held it, unless all the others are heard to lack it.
"""

import itertools

import pytest

from bookie_server.api.entry import EntryHeader, pack_header, payload_crc
from bookie_server.api.messages import EntryResult, ReadResponse
from bookie_server.api.status import Meaning, Status
from spark_ledger.ledger.quorum import Quorum, Verdict, recovery_verdict
from spark_ledger.ledger.recovery import TailWindow

LEDGER = 7
SIZES = [Quorum(e, w, a) for e in range(1, 5) for w in range(1, e + 1) for a in range(1, w + 1)]
YES, NO, TORN, UNKNOWN, SILENT = "Y", "N", "T", "?", "."
MEANINGS = {
    YES: Meaning.POSITIVE,
    NO: Meaning.NEGATIVE,
    TORN: Meaning.TORN,
    UNKNOWN: Meaning.UNKNOWN,
    SILENT: None,
}
STATUSES = {
    NO: Status.NO_SUCH_ENTRY,
    TORN: Status.LIMBO_TORN,
    UNKNOWN: Status.IO_ERROR,
}
RECOVER, DROP, ABORT, WAIT = "recover", "drop", "abort", "wait"
VERDICTS = {
    RECOVER: Verdict.RECOVER,
    DROP: Verdict.ABSENT,
    ABORT: Verdict.UNDECIDABLE,
    WAIT: Verdict.WAIT,
}


def oracle(quorum, said):
    """What the members' words, in the order of the write set, decide of one entry."""
    if YES in said:
        return RECOVER
    may_hold = [member for member, word in enumerate(said) if word != NO]
    if not list(itertools.combinations(may_hold, quorum.ack_quorum)):
        return DROP  # no quorum can have acknowledged it
    if UNKNOWN not in said and SILENT not in said:
        return DROP  # all were heard, and none of a quorum that acknowledged it would have it
    return WAIT if SILENT in said else ABORT


def entry(entry_id):
    crc = payload_crc([b"x"])
    return pack_header(EntryHeader(LEDGER, entry_id, -1, entry_id + 1, entry_id + 1, 1, crc)) + b"x"


def result(word, entry_id):
    if word == YES:
        return EntryResult(Status.OK, entry(entry_id))
    return EntryResult(STATUSES[word])


def response(words, first):
    results = [result(word, first + place) for place, word in enumerate(words)]
    return ReadResponse(Status.OK, results)


def outcome(tail):
    return [found.header.entry_id for found in tail.entries], tail.is_end_after


def expected(quorum, first, window, heard):
    """What is found, and whether it ends there: decided in the order of ids, up to the first that
    is not recovered. `heard` is what each slot said, by entry."""
    found = []
    for place in range(window):
        slots = quorum.write_set(first + place)
        said = [heard[slot][place] if slot in heard else SILENT for slot in slots]
        verdict = oracle(quorum, said)
        if verdict != RECOVER:
            return found, verdict == DROP
        found.append(first + place)
    return found, False


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_every_vector_of_answers_of_a_write_set_is_judged_as_the_oracle_does(quorum):
    for said in itertools.product(MEANINGS, repeat=quorum.write_quorum):
        verdict = recovery_verdict(quorum, [MEANINGS[word] for word in said])
        assert verdict is VERDICTS[oracle(quorum, said)], said


@pytest.mark.parametrize("quorum", SIZES, ids=str)
def test_every_vector_of_answers_of_an_ensemble_finds_or_ends_as_the_oracle_does(quorum):
    slots = range(quorum.ensemble_size)
    for first in slots:  # each write set
        for said in itertools.product(MEANINGS, repeat=quorum.ensemble_size):
            tail = TailWindow(quorum, LEDGER, first, 1)
            for slot in slots:
                if said[slot] != SILENT:
                    tail.take_response(slot, response([said[slot]], first))
            verdict = oracle(quorum, [said[slot] for slot in quorum.write_set(first)])
            assert outcome(tail) == ([first] if verdict == RECOVER else [], verdict == DROP)
            if verdict == ABORT:
                assert tail.is_decided, "nobody is left who could decide it"
            if verdict == WAIT:
                assert not tail.is_decided


@pytest.mark.slow
def test_three_copies_and_two_acks_are_decided_alike_in_every_order_of_arrival():
    """Two entries, every word of three bookies on each, all six orders, after every arrival."""
    quorum = Quorum(3, 3, 2)
    words = list(itertools.product((YES, NO, TORN, UNKNOWN), repeat=2))
    for first, said in itertools.product((0, 2), itertools.product(words, repeat=3)):
        for order in itertools.permutations(range(3)):
            tail, heard = TailWindow(quorum, LEDGER, first, 2), {}
            for slot in order:
                heard[slot] = said[slot]
                tail.take_response(slot, response(said[slot], first))
                assert outcome(tail) == expected(quorum, first, 2, heard), (said, order)
            assert tail.is_decided


@pytest.mark.parametrize("quorum", [Quorum(3, 2, 1), Quorum(3, 2, 2), Quorum(4, 3, 2)], ids=str)
def test_a_striped_window_is_decided_entry_by_entry_each_by_its_own_write_set(quorum):
    slots = range(quorum.ensemble_size)
    words = ("YY", "YN", "NY", "NN", "??")
    for said in itertools.product(words, repeat=quorum.ensemble_size):
        for order in (slots, reversed(slots)):
            tail, heard = TailWindow(quorum, LEDGER, 1, 2), {}
            for slot in order:
                heard[slot] = said[slot]
                tail.take_response(slot, response(said[slot], 1))
                assert outcome(tail) == expected(quorum, 1, 2, heard), said


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_what_lies_beyond_the_first_entry_that_nobody_has_is_discarded(order):
    tail = TailWindow(Quorum(3, 3, 2), LEDGER, 0, 4)
    for slot in order:
        tail.take_response(slot, response("YNYY", 0))
    assert outcome(tail) == ([0], True)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_answer_that_stops_before_an_entry_is_no_denial_of_it(order):
    """Two stop at their byte limit after entry 0, one denies entry 1."""
    tail = TailWindow(Quorum(3, 3, 2), LEDGER, 0, 2)
    for slot in order:
        tail.take_response(slot, response("Y" if slot else "YN", 0))
    assert outcome(tail) == ([0], False)
    assert tail.is_decided, "the rest is asked for again, from entry 1 on"


@pytest.mark.parametrize("copies", range(4))
@pytest.mark.parametrize("sizes", [(3, 3, 2), (3, 3, 3), (3, 3, 1)], ids=str)
def test_honest_members_lose_nothing_that_was_acknowledged(sizes, copies):
    """Holders say yes or nothing of use, the others deny or say nothing of use, in any order."""
    quorum = Quorum(*sizes)
    for holders in itertools.combinations(range(3), copies):
        choices = [(YES, UNKNOWN) if slot in holders else (NO, UNKNOWN) for slot in range(3)]
        for said in itertools.product(*choices):
            tail = TailWindow(quorum, LEDGER, 0, 1)
            for slot in range(3):
                tail.take_response(slot, response(said[slot], 0))
            found, ended = outcome(tail)
            if copies >= quorum.ack_quorum:
                assert not ended, "it may have been acknowledged"
            if copies == 0:
                assert not found, "nobody ever had it"


def test_why_members_did_not_deliver_an_entry_has_the_status_that_came_whatever_its_text():
    tail = TailWindow(Quorum(4, 4, 2), LEDGER, 0, 1)
    tail.take_response(0, ReadResponse(Status.BUSY, reason="LIMBO_TORN"))
    tail.take_response(1, response([TORN], 0))
    tail.take_response(2, response([], 0))
    statuses = {slot: why.status for slot, why in tail.reasons().items()}
    assert statuses == {0: Status.BUSY, 1: Status.LIMBO_TORN, 2: None, 3: None}
