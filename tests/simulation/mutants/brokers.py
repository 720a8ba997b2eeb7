"""Bugs of brokers: what is sent and when, what a fenced ledger decides, what a seal says, who is
told what, what consumers have acknowledged and sought, who is the only producer or consumer, and
who owns a topic."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.broker.dispatch.active_dispatcher import ActiveDispatcher
from spark_ledger.broker.dispatch.subscriptions import TopicSubscriptions
from spark_ledger.broker.log import ownership, topic_commits
from spark_ledger.broker.log.holds import SegmentHold
from spark_ledger.broker.log.partition import OpenEnd
from spark_ledger.broker.log.probes import Burials
from spark_ledger.broker.log.topic_commits import TopicCommits
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.broker.produce import live_writer, opening
from spark_ledger.broker.produce.admission import Admission, Admitted
from spark_ledger.broker.produce.chunks import ChunkRun
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.opening import Openings
from spark_ledger.broker.produce.step import WriterState
from spark_ledger.broker.wire.commands import AccessMode
from spark_ledger.topic.acks import partition_acks
from spark_ledger.topic.acks.partition_acks import PartitionAcks
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.seal import EMPTY_EXTENT, Extent, seal_action
from spark_ledger.topic.log.actions import SealLive
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.read.live import LiveEnds
from tests.simulation.mutants.mutant import Mutant

SERVES: Mapping[str, Any] = {
    "topics": True,
    "brokers": True,
    "churn": False,
    "also": (),
    "faults": ("slow network", "kill"),
    "between_s": 1.0,
    "chaos_s": 20.0,
    "writers": 0,
    "recoverers": 0,
    "tailers": 0,
    "operators": False,
    "lasting": False,
}
IN_CHUNKS = {**SERVES, "also": ("chunks",)}
CUT = {**SERVES, "faults": ("slow network", "partition", "clog")}
CLEANED = {**SERVES, "churn": True, "faults": ("pause", "slow network")}


def sends_before_it_is_read_back(commit: Any) -> Any:
    """The commit that opens the ledger is under way, and adds are sent."""

    async def at_once(self: Any, *, seal_only: bool) -> Any:
        if seal_only:
            return await commit(self, seal_only=True)
        state = await self._commits.state()
        self.asked.forget()
        held = state.partitions[self._number]
        live, actions, base = held.live, [], held.end_offset
        if live is not None and self._is_next(live):
            return self._opened(live, state)
        if live is not None:
            seal = self._ended
            if seal is None or not opening.is_seal_of(seal, live):
                seal = await opening.seal_live_segment(self._commits.client.ledgers, live)
            base += 0 if seal.segment is None else seal.segment.rows
            actions.append(seal)
        following = await self._next_ledger()
        opened = self._commits.opening(self._number, following)
        committing = asyncio.get_running_loop().create_task(
            self._commits.commit([*actions, opened])
        )
        committing.add_done_callback(lambda done: done.cancelled() or done.exception())
        names = (self._number, opened.ledger_id, opened.metadata_version, base, state.next)
        before = (opened.first_entry, opened.rows_before, opened.bytes_before)
        live = LiveSegment(*names, opened.owner, opened.epoch, opened.deduplicated, *before)
        return self._opened(live, state)

    return at_once


def sends_again_what_was_under_way(decide: Any) -> Any:
    """What its CLOSED record has of it is not asked."""

    async def again(self: Any, *after: Any) -> None:
        writer, backlog = self._ledger.writer, self.backlog
        writer.abandon()
        await self._commits.recovered(writer.ledger_id, self._number, lambda: self._closing)
        for entry in reversed(backlog.under_way):
            backlog.waiting.extendleft(reversed(entry.runs))
        backlog.under_way.clear()
        backlog.take_ids()
        self._ledger, self._state = None, WriterState.NOTHING
        self.open_end.close()

    return again


def takes_all_for_stored(decide: Any) -> Any:
    """What was under way is told to be stored, whatever the CLOSED record has."""

    async def stored(self: Any, *after: Any) -> None:
        while self.backlog.under_way:
            self._store_entry(self.backlog.under_way.popleft())
        await decide(self, *after)

    return stored


def sends_again_in_another_order(decide: Any) -> Any:
    async def reversed_(self: Any, *after: Any) -> None:
        before = len(self.backlog.waiting)
        await decide(self, *after)
        queue = self.backlog.waiting
        again = [queue.popleft() for _ in range(len(queue) - before)]
        queue.extendleft(again)

    return reversed_


def forgets_producers(seal_action: Any) -> Any:
    return lambda *args: replace(seal_action(*args), producers=())


def seals_one_row_less(seal_action: Any) -> Any:
    """The last row of the ledger is not counted."""

    def sealed(*args: Any) -> Any:
        seal = seal_action(*args)
        segment = seal.segment
        if segment is None or segment.rows < 2:
            return seal
        return replace(seal, segment=replace(segment, rows=segment.rows - 1))

    return sealed


def knows_no_producers(start: Any) -> Any:
    """What seals tell of producers is not loaded by the next owner."""

    async def started(self: Any) -> None:
        deduplicates, self.backlog.deduplicates = self.backlog.deduplicates, False
        await start(self)
        self.backlog.deduplicates = deduplicates

    return started


def seals_what_is_confirmed_now(sealed: Any) -> Any:
    """The next owner reads as far as it is confirmed, and fences nobody."""

    async def unfenced(ledgers: Any, live: LiveSegment) -> SealLive:
        reader = await ledgers.open(live.ledger_id, recover=False)
        last, has = reader.last_add_confirmed, EMPTY_EXTENT
        version = (await ledgers.record(live.ledger_id)).version
        if last >= live.first_entry:
            header = (await reader.read_entry(last, known_confirmed=last)).header
            has = Extent(last + 1, header.cumulative_rows, header.cumulative_bytes)
        else:
            has = replace(has, entries=live.first_entry)
        return seal_action(live, version, has, [1])

    return unfenced


def serves_what_is_sent(send: Any) -> Any:
    """What is under way counts as confirmed."""

    def sent(self: Any, now: Any) -> None:
        if not isinstance(self.open_end, OfWriter):
            self.open_end = OfWriter(self.open_end)
        send(self, now)
        of_readers = self.open_end.of_readers
        counts = self._ledger.counts
        of_readers.end = self.open_end.live.origin + counts.rows
        of_readers.last_entry = counts.entries - 1

    return sent


class OfWriter(OpenEnd):
    """The end as the writer counts on; readers have another one."""

    def __init__(self, of_readers: OpenEnd) -> None:
        super().__init__(of_readers.live, of_readers.end, of_readers.last_entry)
        self.of_readers = of_readers

    def open(self, live: LiveSegment) -> None:
        super().open(live)
        self.of_readers.open(live)

    def close(self) -> None:
        super().close()
        self.of_readers.close()


def tells_duplicates_at_once(settled: Any) -> Any:
    """A producer that comes back is let in at once, and what it sent before, which is under way
    still, counts as stored."""

    async def counts_as_stored(self: Any, of: Any) -> bool:
        self.backlog.sequence_ids._stored.update(self.backlog.sequence_ids._sent)
        return True

    return counts_as_stored


def holds_for_ever(past: Any) -> Any:
    """What is held for somebody is held until he commits."""

    async def waits(self: Any, partition: int, hold: Any) -> Any:
        return await past(
            self, partition, SegmentHold(hold.ledger_id, hold.opened, hold.until_s + 1e6)
        )

    return waits


def keeps_the_epoch(encoded: Any) -> Any:
    def first(owners: Any) -> Any:
        kept = {p: replace(one, epoch=1) for p, one in owners.by_partition.items()}
        return encoded(replace(owners, by_partition=kept))

    return first


def never_asks_who_owns(check: Any) -> Any:
    async def asked(self: Any, partition: int) -> None: ...

    return asked


def writes_past_what_is_not_acknowledged(record: Any) -> Any:
    """The position of each write of changes is one past the first message to be sent."""
    return lambda key, epoch, position, rows, replaces: record(
        *(key, epoch, position + 1, rows, replaces)
    )


def acknowledges_all_before(add: Any) -> Any:
    """One message that is acknowledged by itself takes those before it along."""
    return lambda self, start, end: self.add_up_to(end)


def counts_on(goes_on: Any) -> Any:
    """Offsets of the next segment are counted from what the ledger had before it."""

    def went_on(self: Any, live: Any, *others: Any) -> None:
        goes_on(self, live, *others)
        self.open_end.open(replace(live, rows_before=0))
        self.open_end.end += live.rows_before

    return went_on


def is_any_of_the_ledger(is_seal_of: Any) -> Any:
    """A seal of an earlier segment of the ledger passes for one of the live segment."""
    return lambda seal, live: live is not None and seal.ledger_id == live.ledger_id


def goes_on_without_a_commit(commit: Any) -> Any:
    """Where the committer that asked for the segment has not committed by the end of the hold, the
    owner sends again."""

    async def at_once(self: Any, *, seal_only: bool) -> Any:
        following, state = self._next, await self._state_after_hold()
        live = state.partitions[self._number].live
        if following is None or live is None or live.opened != following.after:
            return await commit(self, seal_only=seal_only)
        self.asked.forget()
        extent = following.extent
        base = live.base + extent.rows - live.rows_before
        before = {"rows_before": extent.rows, "bytes_before": extent.bytes}
        live = replace(live, base=base, first_entry=extent.entries, **before)
        return self._opened(live, state)

    return at_once


def receipt_when_it_is_sent(send: Any) -> Any:
    """A batch is told to be stored when it is sent."""

    def sent(self: Any, now: Any) -> None:
        before = len(self.backlog.under_way)
        offset = self.open_end.live.base + self._ledger.counts.rows
        send(self, now)
        for entry in list(self.backlog.under_way)[before:]:
            for run in entry.runs:
                run.stored(offset)
                offset += run.messages
            entry.runs[:] = [Told(run) for run in entry.runs]

    return sent


class Told:
    """A run that has its receipts."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def stored(self, offset: int) -> None: ...


def seeks_in_memory(seek: Any) -> Any:
    """A seek is answered before it is durable."""

    async def sought(self: Any, name: str, dispatcher: Any, offset: int) -> None:
        dispatcher.seek(offset)

    return sought


def receipts_at_once(when_durable: Any) -> Any:
    """The receipt of an acknowledgement is given before the write that has it."""

    def given(self: Any, key: Any, receipt: Any) -> None:
        receipt(None)

    return given


def deletes_nothing(unsubscribe: Any) -> Any:
    """The consumer is gone, and the subscription stays."""

    async def left(self: Any, name: str, consumer: Any, **options: Any) -> None:
        consumer.dispatcher.leave(consumer)

    return left


def stays_active(choose: Any) -> Any:
    """A consumer that was active gets messages also after another one became active."""

    def for_ever(self: Any) -> None:
        before = self.active
        choose(self)
        if before in self.consumers:
            self.active = before

    return for_ever


def fences_nobody(admit: Any) -> Any:
    """A producer that is fenced goes on until it comes back."""

    def admitted(self: Any, producer: Any, *limits: Any) -> Any:
        if producer.mode is not AccessMode.EXCLUSIVE_WITH_FENCING:
            return admit(self, producer, *limits)
        self.present[:] = [producer]
        self._note_exclusive(producer)
        return Admitted(True, [])

    return admitted


def forgets_who_is_fenced(is_fenced: Any) -> Any:
    return lambda self, producer: False


def knows_what_it_knew(learn: Any) -> Any:
    """A partition that another had meanwhile is served by what was known of it before."""
    return lambda self, number, epoch: None


def opens_under_any_intent(made_under: Any) -> Any:
    """A ledger is opened under the intent that is current, whichever it was made under."""
    return lambda intent, some: some


def spares_nobody(spares: Any) -> Any:
    """Who was taken for dead and registers again is taken for dead again at the next probe."""
    return lambda self, broker_id, now_s: False


def looks_once(refresh: Any) -> Any:
    """What bookies say they took, and readers have not heard is confirmed, is not waited for."""

    async def looked(self: Any, lives: Any) -> None:
        for one in lives:
            reader = await self._open(one)
            if reader is not None:
                await reader.refresh_last_add_confirmed()
                await self._update(one, reader)

    return looked


def receipt_of_each_chunk(received: Any) -> Any:
    """Each chunk has its receipt once it is stored, as a message by itself has."""

    def at_once(self: Any, ledger: int, entries: Any) -> None:
        message, offset = self._message, next(iter(entries))
        for send, number in message.sends:
            if send == self._sends[0]:
                message.producer.answer(number, 1, message.producer.receipt(send, offset))
                message.sends.remove((send, number))
                break
        message.producer.connection.stored(self.waiting_bytes)

    return at_once


EVERY = (
    Mutant(
        *("sent before the open was read back", "hazard 28", Openings, "commit"),
        *(sends_before_it_is_read_back, SERVES),
    ),
    Mutant(
        *("sent again before the CLOSED record decided", "hazard 31", LiveWriter, "_decide"),
        *(sends_again_what_was_under_way, CUT),
    ),
    Mutant(
        *("all under way taken for stored", "hazard 31", LiveWriter, "_decide"),
        *(takes_all_for_stored, CUT),
    ),
    Mutant(
        *("sent again in another order", "hazard 31", LiveWriter, "_decide"),
        *(sends_again_in_another_order, CUT),
    ),
    Mutant(
        *("seal without its producers", "hazard 31", live_writer, "seal_action"),
        *(forgets_producers, SERVES),
    ),
    Mutant(
        *("seal of one row less", "hazard 32", live_writer, "seal_action"),
        *(seals_one_row_less, SERVES),
    ),
    Mutant(
        *("producers of before not loaded", "hazard 31", LiveWriter, "start"),
        *(knows_no_producers, SERVES),
    ),
    Mutant(
        *("broker takes over without a fence", "hazard 30", opening, "seal_live_segment"),
        *(seals_what_is_confirmed_now, CUT),
    ),
    Mutant(
        *("under way taken for confirmed", "invariant 9", LiveWriter, "_send"),
        *(serves_what_is_sent, SERVES),
    ),
    Mutant(
        *(
            "duplicate reported before the first is stored",
            "hazard 31",
            LiveWriter,
            "until_decided",
        ),
        *(tells_duplicates_at_once, CUT),
    ),
    Mutant(
        *("hold without an end", "hazard 29", TopicCommits, "past"),
        *(holds_for_ever, CUT),
    ),
    Mutant("epoch not raised", "hazard 45", ownership, "_encoded", keeps_the_epoch, SERVES),
    Mutant(
        *("no owner checks that it owns", "hazard 30", TopicCommits, "check_owner"),
        *(never_asks_who_owns, SERVES),
    ),
    Mutant(
        *("cursor past what is not acknowledged", "hazard 38", partition_acks, "AckRecord"),
        *(writes_past_what_is_not_acknowledged, SERVES),
    ),
    Mutant(
        *("one acknowledged with all before it", "broker", Acks, "add"),
        *(acknowledges_all_before, SERVES),
    ),
    Mutant(
        *("offsets counted on in the next ledger", "hazard 32", LiveWriter, "_begin_segment"),
        *(counts_on, SERVES),
    ),
    Mutant(
        *("late seal of an earlier segment", "hazard 29", commit_draft, "is_seal_of"),
        *(is_any_of_the_ledger, CUT),
    ),
    Mutant(
        *("goes on after a hold without a commit", "hazard 29", Openings, "commit"),
        *(goes_on_without_a_commit, CUT),
    ),
    Mutant(
        *("receipt when it is sent", "hazard 30", LiveWriter, "_send"),
        *(receipt_when_it_is_sent, SERVES),
    ),
    Mutant(
        *("seek in memory alone", "hazard 38", TopicSubscriptions, "seek"),
        *(seeks_in_memory, SERVES),
    ),
    Mutant(
        *("subscription left and not deleted", "broker", TopicSubscriptions, "unsubscribe"),
        *(deletes_nothing, SERVES),
    ),
    Mutant(
        *("two consumers active", "broker", ActiveDispatcher, "_choose"),
        *(stays_active, SERVES),
    ),
    Mutant(
        *("fenced producer goes on", "broker", Admission, "admit"),
        *(fences_nobody, SERVES),
    ),
    Mutant(
        *("fenced producer comes back", "broker", Admission, "is_fenced"),
        *(forgets_who_is_fenced, SERVES),
    ),
    Mutant(
        *("partition as it was known before", "hazard 45", OwnedTopic, "learn"),
        *(knows_what_it_knew, SERVES),
    ),
    Mutant(
        *("opened under the next intent", "hazard 4", topic_commits, "_made_under"),
        *(opens_under_any_intent, CLEANED),
    ),
    Mutant(
        *("read that does not wait for what was taken", "broker", LiveEnds, "refresh"),
        *(looks_once, {**SERVES, "faults": ()}),
    ),
    Mutant(
        *("receipt of each chunk by itself", "chunks", ChunkRun, "_send_receipts"),
        *(receipt_of_each_chunk, IN_CHUNKS),
    ),
    Mutant(
        *("receipt before the append", "ack ledger", PartitionAcks, "when_durable"),
        *(receipts_at_once, SERVES),
    ),
    Mutant(
        *("two that bury each other are not spared", "hazard 74", Burials, "spares"),
        *(spares_nobody, {**SERVES, "faults": ()}),
    ),
)

AT_POINTS: Mapping[str, tuple[str, ...]] = {
    "epoch not raised": ("broker that comes back",),
    "late seal of an earlier segment": ("commit past an owner",),
    "goes on after a hold without a commit": ("commit past an owner",),
    "no owner checks that it owns": ("broker beside its successor",),
    "opened under the next intent": ("broker whose intent ended",),
    "seek in memory alone": ("broker that comes back",),
    "partition as it was known before": ("broker that comes back",),
}
"""Those for which several things have to come together: at the points of these deeds."""
MUTANTS = tuple(mutant for mutant in EVERY if mutant.name not in AT_POINTS)
REACHED = tuple((mutant, AT_POINTS[mutant.name]) for mutant in EVERY if mutant.name in AT_POINTS)
