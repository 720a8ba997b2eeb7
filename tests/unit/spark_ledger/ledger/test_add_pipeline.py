"""Adds under way, answer by answer: lanes that keep what they are given until the test answers."""

import asyncio
from types import SimpleNamespace

import pytest

from bookie_server.api.codec import encode_add
from bookie_server.api.messages import Add, AddResult
from bookie_server.api.status import Status
from spark_ledger import errors
from spark_ledger.config import ClientConfig
from spark_ledger.ledger.add_pipeline import AddPipeline
from spark_ledger.ledger.quorum import PendingAdd
from spark_ledger.ledger.transitions import with_replacements
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord
from tests.unit.spark_ledger.ledger.fakes import simulated

OK, BUSY = AddResult(Status.OK), AddResult(Status.BUSY, 10)
NO_ANSWER = AddResult(Status.IO_ERROR, 0, "no answer")


class Lane:
    """Sends nothing: the test answers by `answer`, the oldest send of an entry first."""

    def __init__(self):
        self.sends = []  # (add, done)
        self.log = []

    def submit(self, add, done):
        self.sends.append((add, done))
        self.log.append(add.entry_id)

    def answer(self, entry_id, result=OK):
        at = [add.entry_id for add, _ in self.sends].index(entry_id)
        add, done = self.sends.pop(at)
        done([add], [result])

    def answer_all(self, result=OK):
        """What was sent, in one frame."""
        sends, self.sends = self.sends, []
        sends[0][1]([add for add, _ in sends], [result] * len(sends))


class Pipe:
    """A pipeline over bookies "a", "b", ... in the slots 0, 1, ..."""

    def __init__(self, sizes=(3, 3, 2), last=-1, **settings):
        self.lanes = {name: Lane() for name in "abcdefghij"}
        ensemble = tuple("abcdefghij"[: sizes[0]])
        record = LedgerRecord(7, *sizes, fragments=(Fragment(0, ensemble),))
        cluster = SimpleNamespace(
            config=ClientConfig(**settings),
            bookies=SimpleNamespace(lane=lambda name, recovery: self.lanes[name]),
            directory=SimpleNamespace(writable=list),
            describe=str,
        )
        self.pipeline = AddPipeline(cluster, record, last)
        self.next = last + 1
        self.acked = []

    def push(self, count=1):
        """Adds; `acked` takes the ids in the order in which they are acknowledged."""
        futures = []
        for _ in range(count):
            future = asyncio.get_running_loop().create_future()
            entry_id, self.next = self.next, self.next + 1
            add = encode_add(Add([str(entry_id).encode()], False, b""))
            now = asyncio.get_running_loop().time()
            self.pipeline.push(PendingAdd(entry_id, add, 1, 0, 0, now, Waiter(self, future)))
            futures.append(future)
        return futures

    def change(self, replacements, flag=True):
        """An ensemble change, from the flag to the adoption."""
        pipeline = self.pipeline
        pipeline.pending.change_in_flight = flag
        first = pipeline.pending.last_add_confirmed + 1
        pipeline.adopt(with_replacements(pipeline.record, replacements, first), replacements)


class Waiter:
    """Takes the outcome of an add at the moment it is delivered."""

    def __init__(self, pipe, future):
        self.pipe, self.future = pipe, future

    def set_result(self, entry_id):
        self.pipe.acked.append(entry_id)
        self.future.set_result(entry_id)

    def set_exception(self, failure):
        self.future.set_exception(failure)

    def exception(self):
        return self.future.exception()


@simulated
async def test_confirmed_adds_that_wait_for_a_last_copy_are_in_flight_beyond_the_allowed_bytes():
    pipe = Pipe(inflight_bytes=3)
    pipe.push(5)
    assert pipe.pipeline.inflight_bytes == 5
    for name in "ab":
        pipe.lanes[name].answer_all()
    assert (pipe.acked, pipe.pipeline.inflight_bytes) == ([0, 1, 2, 3, 4], 2)
    pipe.push(2)
    assert pipe.pipeline.inflight_bytes == 4
    room = asyncio.ensure_future(pipe.pipeline.room())
    await asyncio.sleep(0)
    assert not room.done()
    pipe.lanes["c"].answer(0)
    pipe.lanes["c"].answer(1)
    await room
    assert pipe.pipeline.inflight_bytes == 2


@simulated
async def test_an_add_is_acknowledged_by_its_ack_quorum_in_id_order():
    pipe = Pipe()
    pipe.push(2)
    for name in "ab":
        pipe.lanes[name].answer(1)
    assert pipe.acked == []
    for name in "bc":
        pipe.lanes[name].answer(0)
    assert pipe.acked == [0, 1]


@simulated
async def test_a_frame_of_answers_counts_for_each_of_its_adds():
    pipe = Pipe()
    pipe.push(3)
    pipe.lanes["a"].answer_all()
    assert pipe.acked == []
    pipe.lanes["b"].answer(1)
    pipe.lanes["c"].answer_all()
    assert pipe.acked == [0, 1, 2]
    assert [add.entry_id for add in pipe.pipeline.awaiting_response()] == [
        0,
        2,
    ]  # b has not answered
    pipe.lanes["b"].answer_all()
    assert (pipe.pipeline.inflight_bytes, pipe.pipeline.awaiting_response()) == (0, [])


@simulated
async def test_a_frame_of_late_oks_of_a_replaced_bookie_does_not_count():
    pipe = Pipe(sizes=(3, 3, 3))
    pipe.push(2)
    pipe.lanes["a"].answer_all()
    pipe.lanes["c"].answer_all()
    pipe.pipeline.slot_failed(1, "no answer")
    pipe.change({1: "d"})
    pipe.lanes["b"].answer_all()
    assert pipe.acked == []
    pipe.lanes["d"].answer_all()
    assert pipe.acked == [0, 1]


@simulated
async def test_a_frame_that_straddles_an_ensemble_change_counts_for_each_fragment_by_itself():
    """Entry 0 was confirmed by the old ensemble, whose member b was replaced and has come back
    since: b's word counts for its copy of entry 0, which is b's to keep, and not for entry 1."""
    pipe = Pipe(sizes=(3, 3, 2))
    pipe.push(2)
    for name in "ac":
        pipe.lanes[name].answer(0)
    pipe.pipeline.slot_failed(1, "no answer")
    pipe.change({1: "d"})
    pipe.lanes["b"].answer_all()
    assert pipe.acked == [0]
    assert pipe.pipeline.lacking(0) == []
    assert next(iter(pipe.pipeline.pending)).acks == 0


@simulated
async def test_a_late_ok_of_a_replaced_bookie_does_not_count():
    pipe = Pipe()
    pipe.push()
    pipe.lanes["a"].answer(0)
    pipe.pipeline.slot_failed(1, "no answer")
    pipe.change({1: "d"})
    pipe.lanes["b"].answer(0)
    assert pipe.acked == []
    pipe.lanes["d"].answer(0)
    assert pipe.acked == [0]


@simulated
async def test_an_ok_that_came_before_the_bookie_was_replaced_is_taken_back():
    pipe = Pipe(sizes=(3, 3, 3))
    pipe.push()
    pipe.lanes["b"].answer(0)
    pipe.pipeline.slot_failed(1, "no answer")
    pipe.change({1: "d"})
    for name in "ac":
        pipe.lanes[name].answer(0)
    assert pipe.acked == []
    pipe.lanes["d"].answer(0)
    assert pipe.acked == [0]


@simulated
async def test_all_acks_are_taken_back_before_any_add_is_delivered():
    """E=3 Qw=2: write sets ab, bc, ca. The head does not sit in the replaced slot c, the others
    do, and all have their acks when the change ends (BK#3005, BK#4097)."""
    pipe = Pipe(sizes=(3, 2, 2))
    pipe.push(3)
    pipe.pipeline.slot_failed(2, "no answer")
    pipe.pipeline.pending.change_in_flight = True
    for name, entry in (("a", 0), ("b", 0), ("b", 1), ("c", 1), ("c", 2), ("a", 2)):
        pipe.lanes[name].answer(entry)
    assert pipe.acked == []
    pipe.change({2: "d"})
    assert pipe.acked == [0]
    assert pipe.lanes["d"].log == [1, 2]
    pipe.lanes["d"].answer(2)
    assert pipe.acked == [0]
    pipe.lanes["d"].answer(1)
    assert pipe.acked == [0, 1, 2]


@simulated
async def test_what_is_delivered_at_a_change_sees_the_change_as_over():
    """BK#1857: delivery with the flag up hangs; before the resend it would be too early."""
    pipe = Pipe(sizes=(3, 2, 2))
    (first, _) = pipe.push(2)
    pipe.pipeline.slot_failed(2, "no answer")
    pipe.pipeline.pending.change_in_flight = True
    for name in "ab":
        pipe.lanes[name].answer(0)
    seen = []
    pipe.pipeline.on_confirmed = lambda: seen.append(
        (pipe.pipeline.pending.change_in_flight, list(pipe.lanes["d"].log))
    )
    pipe.change({2: "d"})
    assert first.done()
    assert seen == [(False, [1])]


@simulated
async def test_a_late_failure_of_an_earlier_owner_does_not_fail_the_slot():
    pipe = Pipe()
    pipe.push()
    pipe.pipeline.slot_failed(1, "no answer")
    pipe.change({1: "d"})
    pipe.lanes["b"].answer(0, NO_ANSWER)
    assert pipe.pipeline.failed_mask() == 0


@simulated
async def test_a_late_failure_of_an_earlier_turn_of_the_same_bookie_does_not_fail_it():
    """The bookie was replaced and came back, or was tried again, since (BK#4261)."""
    for changes in ([{1: "d"}, {1: "b"}], None):
        pipe = Pipe()
        pipe.push()
        pipe.pipeline.slot_failed(1, "no answer")
        if changes is None:
            pipe.pipeline.retry_slot(1)
        else:
            for replacements in changes:
                pipe.change(replacements)
        assert pipe.lanes["b"].log == [0, 0]
        pipe.lanes["b"].answer(0, NO_ANSWER)  # the first send
        assert pipe.pipeline.failed_mask() == 0
        pipe.lanes["b"].answer(0, NO_ANSWER)
        assert pipe.pipeline.failed_mask() == 0b010


@simulated
async def test_a_slot_that_went_to_another_bookie_and_back_is_sent_what_it_lacks():
    """C -> D -> C: old and new ensemble are equal, yet C is sent what it did not acknowledge since
    it failed, or the adds hang for ever (BK#4459, BK#4261)."""
    pipe = Pipe(sizes=(3, 3, 3))
    pipe.push(2)
    pipe.lanes["c"].answer(0)
    pipe.lanes["c"].answer(1, NO_ANSWER)
    pipe.change({2: "d"})
    pipe.pipeline.slot_failed(2, "no answer")
    pipe.push()  # while the slot is down
    pipe.change({2: "c"})
    assert pipe.lanes["d"].log == [0, 1]
    assert pipe.lanes["c"].log == [0, 1, 0, 1, 2]
    for entry in range(3):
        for name in "abc":
            pipe.lanes[name].answer(entry)
    assert pipe.acked == [0, 1, 2]


@simulated
async def test_a_bookie_taken_back_is_sent_only_what_it_has_not_acknowledged():
    pipe = Pipe(sizes=(3, 3, 3))
    pipe.push(2)
    pipe.lanes["c"].answer(0)
    pipe.lanes["c"].answer(1, NO_ANSWER)
    pipe.push()
    assert pipe.lanes["c"].log == [0, 1]  # a failed slot is sent nothing
    pipe.pipeline.retry_slot(2)
    assert pipe.lanes["c"].log == [0, 1, 1, 2]


@simulated
async def test_a_late_ok_of_a_bookie_that_is_owner_again_counts_for_it_has_the_entry():
    pipe = Pipe(sizes=(3, 3, 3))
    pipe.push()
    pipe.pipeline.slot_failed(2, "no answer")
    pipe.change({2: "d"})
    pipe.change({2: "c"})
    for name in "abc":
        pipe.lanes[name].answer(0)  # c's answer is that to the first send
    assert pipe.acked == [0]


@simulated
async def test_several_slots_change_at_once_and_some_may_stay_failed():
    """A partial replacement: two failed, there was one spare."""
    pipe = Pipe(sizes=(4, 4, 2))
    pipe.push()
    pipe.pipeline.slot_failed(1, "no answer")
    pipe.pipeline.slot_failed(2, "no answer")
    pipe.change({1: "e"})
    assert pipe.pipeline.failed_mask() == 0b0100
    assert [slot.bookie_id for slot in pipe.pipeline.slots] == ["a", "e", "c", "d"]
    pipe.lanes["e"].answer(0)
    pipe.lanes["d"].answer(0)
    assert pipe.acked == [0]


@simulated
async def test_a_slot_fails_once_and_says_so_once():
    pipe = Pipe()
    told = []
    pipe.pipeline.on_slot_failed = lambda: told.append(pipe.pipeline.failed_mask())
    pipe.push(3)
    for entry in range(3):
        pipe.lanes["c"].answer(entry, NO_ANSWER)
    assert told == [0b100]


@simulated
async def test_a_failure_after_the_ack_quorum_still_fails_the_slot():
    pipe = Pipe()
    pipe.push()
    for name in "ab":
        pipe.lanes[name].answer(0)
    assert pipe.acked == [0]
    pipe.lanes["c"].answer(0, NO_ANSWER)
    assert pipe.pipeline.failed_mask() == 0b100
    assert pipe.pipeline.lacking(0) == ["c"]


@simulated
async def test_busy_is_sent_again_to_the_same_bookie_and_fails_at_the_replica_timeout():
    pipe = Pipe(replica_timeout_s=5)
    pipe.push()
    for name in "ab":
        pipe.lanes[name].answer(0)
    began = asyncio.get_running_loop().time()
    while not pipe.pipeline.failed_mask():
        pipe.lanes["c"].answer(0, BUSY)
        await asyncio.sleep(0.011)
    assert 5 <= asyncio.get_running_loop().time() - began < 5.1
    assert set(pipe.lanes["c"].log) == {0}


@simulated
async def test_an_add_that_nobody_answers_fails_at_its_time_and_all_with_it():
    pipe = Pipe(add_timeout_s=3)
    (first,) = pipe.push()
    await asyncio.sleep(2)
    (second,) = pipe.push()
    await asyncio.sleep(0.99)
    assert not first.done()
    await asyncio.sleep(0.02)
    for future in (first, second):
        assert isinstance(future.exception(), errors.TimedOut)
    assert pipe.pipeline.inflight_bytes == 0


@simulated
async def test_nothing_is_acknowledged_after_the_pipeline_failed():
    pipe = Pipe()
    (adding,) = pipe.push()
    pipe.pipeline.fail(errors.LedgerFenced("taken over"))
    for name in "abc":
        pipe.lanes[name].answer(0)
    assert pipe.acked == []
    assert isinstance(adding.exception(), errors.LedgerFenced)


@simulated
async def test_a_waiter_that_gave_up_is_no_error():
    pipe = Pipe()
    (adding, after) = pipe.push(2)
    adding.cancel()
    for entry in range(2):
        for name in "ab":
            pipe.lanes[name].answer(entry)
    assert after.result() == 1


@pytest.mark.parametrize("base", [0, 2**31, 2**32, 2**53, 2**63 - 20])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 2), (5, 3, 2), (7, 4, 3)])
def test_an_entry_is_sent_to_its_write_set_also_with_a_large_id(base, sizes):
    @simulated
    async def test():
        pipe = Pipe(sizes, last=base - 1)
        pipe.push(15)
        names = list(pipe.lanes)
        for entry in range(base, base + 15):
            expected = [(entry + i) % sizes[0] for i in range(sizes[1])]
            assert sorted(n for n in names if entry in pipe.lanes[n].log) == sorted(
                names[slot] for slot in expected
            )
            assert pipe.pipeline.pending.write_mask(entry) == sum(1 << slot for slot in expected)

    test()


@simulated
async def test_a_confirmed_entry_stays_with_the_members_of_its_fragment():
    """An ack of a later owner says nothing of an entry that was confirmed before the change."""
    pipe = Pipe()
    pipe.push()
    for name in "ab":
        pipe.lanes[name].answer(0)
    pipe.pipeline.slot_failed(2, "no answer")
    pipe.change({2: "d"})
    assert pipe.lanes["d"].log == []
    pipe.lanes["c"].answer(0)  # late, and it was the member then
    assert pipe.pipeline.lacking(0) == []
    assert pipe.pipeline.record.fragments[0] == Fragment(0, ("a", "b", "c"))


@simulated
async def test_an_add_that_is_not_tried_again_after_busy_is_settled_once_it_is_confirmed():
    pipe = Pipe()
    pipe.push(2)
    for name in "ab":
        pipe.lanes[name].answer(0)
        pipe.lanes[name].answer(1)
    pipe.lanes["c"].answer(0, BUSY)
    pipe.lanes["c"].answer(1, BUSY)
    assert pipe.acked == [0, 1]
    pipe.pipeline.slot_failed(2, "no answer")
    await asyncio.sleep(60)
    assert (pipe.pipeline.awaiting_response(), pipe.pipeline.held_bytes) == ([], 0)
