"""What producers sent and what is stored of it, by the log and the ledgers' entries.

Always true: what is stored is told by the seals that the store applied and by the entries that the
owner's writer was given, not by what a broker remembers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from spark_ledger.broker.produce.admission import EPOCH_BITS
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import decode_header
from spark_ledger.topic.log.actions import SealLive
from spark_ledger.topic.log.segments import LiveSegment
from tests.simulation import invariants
from tests.simulation.brokers.chunks import StoredChunks
from tests.simulation.ghost import Ghost
from tests.simulation.topic_ghost import LogGhost

Message = bytes
"""The value of a row, b"<producer>.<partition>.<life>:0:<number>": each is sent as another one."""


@dataclass
class Lane:
    """One producer's messages in one partition, as they are first stored."""

    last: tuple[int, int] = (-1, -1)


@dataclass
class Truth:
    """Of the topic that brokers serve."""

    ghost: Ghost
    log: LogGhost | None = None
    deduplicates: bool = False
    sent: dict[Message, dict[str, int]] = field(default_factory=dict)
    """By message: how often it was sent, by owner."""
    first_sent_s: dict[Message, float] = field(default_factory=dict)
    received: dict[Message, float] = field(default_factory=dict)
    """Messages with a receipt, and when it came."""
    stored: dict[Message, dict[str, int]] = field(default_factory=dict)
    """How often it is in sealed ledgers, by owner."""
    lanes: dict[str, Lane] = field(default_factory=dict)
    claims: dict[int, dict[str, None]] = field(default_factory=dict)
    """By partition: who wanted to be its only producer."""
    epochs: dict[Message, int] = field(default_factory=dict)
    """Of messages of exclusive producers the epoch in which they were sent."""
    alone: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)
    """By partition and owner: how far it was confirmed when a producer heard that it is the only
    one, and in which epoch."""
    newest: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """By partition and owner: the newest of these that is stored."""

    def __post_init__(self) -> None:
        self.chunks = StoredChunks(self.ghost)

    def is_sent(self, messages: list[Message], owner: str, topic_epoch: int, now_s: float) -> None:
        for message in messages:
            if topic_epoch:
                self.epochs.setdefault(message, topic_epoch)
            self.first_sent_s.setdefault(message, now_s)
            times = self.sent.setdefault(message, {})
            times[owner] = times.get(owner, 0) + 1

    def is_alone(self, partition: int, owner: str, epoch: int) -> None:
        """A producer heard that it is the only one."""
        heard = self.alone.setdefault((partition, owner), [])
        heard.append((self.confirmed(partition), epoch))

    # -- seals ----------------------------------------

    def sealed(self, live: LiveSegment, seal: SealLive) -> tuple[Message | None, ...]:
        """What the seal brings in at each offset, judged; None: it has no row."""
        last = self._ended_at(live.ledger_id)
        entries = self._entries(live, last)
        rows = [len(messages) for messages, _ in entries]
        segment, are = seal.segment, (sum(rows), last, rows)
        told = (0, live.first_entry - 1, rows)
        if segment is not None:  # its entries' headers count their rows, or it does
            told = (segment.rows, segment.entries[-1][1], [*segment.entry_rows] or rows)
        invariants.a_seal_says_what_its_entries_are(self.ghost, live.ledger_id, told, are)
        if live.deduplicated:
            producers: dict[str, int] = {}
            for _, some in entries:
                for name, last in some:
                    producers[name] = max(last, producers.get(name, last))
            invariants.a_seal_says_what_its_entries_are(
                self.ghost, live.ledger_id, dict(seal.producers), producers
            )
        self._say_their_offsets(live, last)
        if entries and live.first_entry:
            self.ghost.meet("segment within a ledger")
        found = [message for messages, _ in entries for message in messages]
        self.chunks.sealed(live, found, seal.rowless)
        for offset, message in enumerate(found, live.base):
            if message is None:
                continue
            self._store(message, live.owner)
            self._in_order_of_epochs(message, (live.partition, live.owner, live.epoch))
            self._after_who_is_alone(message, offset, live)
        return tuple(found)

    def _store(self, message: Message, owner: str) -> None:
        times = self.stored.setdefault(message, {})
        first = not times
        times[owner] = times.get(owner, 0) + 1
        if self.deduplicates:
            there, allowed = sum(times.values()), 1
        else:
            there, allowed = times[owner], self.sent.get(message, {}).get(owner, 0)
        invariants.a_message_is_stored_as_often_as_it_was_sent(self.ghost, message, there, allowed)
        if first:
            lane, place = place_of(message)
            known = self.lanes.setdefault(lane, Lane())
            invariants.messages_are_in_the_order_of_their_producer(
                self.ghost, lane, known.last, place
            )
            known.last = place

    def _in_order_of_epochs(self, message: Message, owner: tuple[int, str, int]) -> None:
        epoch = self.epochs.get(message)
        if epoch is not None:
            newest = self.newest.get(owner, epoch)
            invariants.who_is_fenced_stores_no_more(self.ghost, message, epoch, newest)
            self.newest[owner] = max(epoch, newest)

    def _after_who_is_alone(self, message: Message, offset: int, live: LiveSegment) -> None:
        epoch = self.epochs.get(message)
        for confirmed, newest in self.alone.get((live.partition, live.owner), ()):
            if epoch is not None and confirmed <= offset and newest >> EPOCH_BITS == live.epoch:
                invariants.who_is_fenced_stores_no_more(self.ghost, message, epoch, newest)

    # -- the open ends ----------------------------------------

    def _closed_at(self, ledger_id: int) -> int:
        last = self.ghost.ledgers[ledger_id].record.last_entry
        return -1 if last is None else last

    def _ended_at(self, ledger_id: int) -> int:
        """The last entry of a ledger that somebody closed, or whose owner has stopped: it has sent
        no other, and every one of them is acked."""
        ledger = self.ghost.ledgers[ledger_id]
        if ledger.record.last_entry is not None:
            return ledger.record.last_entry
        last = len(ledger.submitted) - 1
        invariants.a_seal_says_what_its_entries_are(self.ghost, ledger_id, last, ledger.acked)
        return last

    def _say_their_offsets(self, live: LiveSegment, last: int) -> None:
        """What a reader of an old log goes by: entries of segments that are not their ledger's
        first."""
        offset = live.base
        for payload in self.ghost.ledgers[live.ledger_id].submitted[live.first_entry : last + 1]:
            header = decode_header(payload)
            told = int(header.index["first_row"][0]) if header.at_offset else offset
            assert header.at_offset or not live.first_entry, "an entry says its offset"
            invariants.a_seal_says_what_its_entries_are(self.ghost, live.ledger_id, told, offset)
            offset += header.rows

    def _entries(
        self, live: LiveSegment, last: int
    ) -> list[tuple[list[Message | None], list[tuple[str, int]]]]:
        """Of each entry of the segment up to that what it has at each offset, and its batches'
        producers with their last sequence ids."""
        found, offset = [], live.base
        for payload in self.ghost.ledgers[live.ledger_id].submitted[live.first_entry : last + 1]:
            header = decode_header(payload)
            body = memoryview(payload)[header.body_at :]
            messages: list[Message | None] = []
            for _, data in pulsar_batch.split_frames(body, header.rows):
                at = offset + len(messages)
                messages += self.chunks.messages(live.partition, at, data)
            found.append((messages, [*_producers(body, header.rows)]))
            offset += header.rows
        return found

    def has_row(self, partition: int, offset: int) -> bool:
        """Of an offset that is confirmed: it is not that of a chunk before the last one."""
        assert self.log is not None
        live = self.log.state.partitions[partition].live
        submitted = [] if live is None else self.ghost.ledgers[live.ledger_id].submitted
        return self.chunks.has_row(partition, offset, live, submitted)

    def confirmed(self, partition: int) -> int:
        """One past the last offset that may be told of."""
        assert self.log is not None
        held = self.log.state.partitions[partition]
        live = held.live
        if live is None:
            return held.end_offset
        ledger = self.ghost.ledgers[live.ledger_id]
        last = max(ledger.acked, self._closed_at(live.ledger_id))
        return live.base + sum(ledger.submitted_rows[live.first_entry : last + 1])

    def is_there(self, partition: int, message: Message) -> bool:
        """Whether it is in a segment, or confirmed in the live ledger."""
        assert self.log is not None
        live = self.log.state.partitions[partition].live
        if message in self.stored or live is None:
            return message in self.stored
        last = max(self.ghost.ledgers[live.ledger_id].acked, self._closed_at(live.ledger_id))
        return any(message in some for some, _ in self._entries(live, last))

    def at_the_end(self) -> None:
        """Each message with a receipt is there."""
        assert self.log is not None
        there: dict[Message | None, None] = dict.fromkeys(self.stored)
        for held in self.log.state.partitions:
            if held.live is not None:
                last = self._closed_at(held.live.ledger_id)
                for messages, _ in self._entries(held.live, last):
                    there.update(dict.fromkeys(messages))
        for message in self.received:
            invariants.what_has_a_receipt_is_there(self.ghost, message, message in there)


def place_of(message: Message) -> tuple[str, tuple[int, int]]:
    """The lane of a message, and its place there."""
    name, _, number = message.decode().split(":")
    lane, _, life = name.rpartition(".")
    return lane, (int(life), int(number))


def _producers(body: memoryview, rows: int) -> Iterator[tuple[str, int]]:
    """Of each batch, as far as its message is whole."""
    for _, data in pulsar_batch.split_frames(body, rows):
        if not pulsar_batch.is_earlier_chunk(data):
            chunk = pulsar_batch.is_last_chunk(data)
            batch = pulsar_batch.parse(pulsar_batch.chunk_in(data) if chunk else data)
            yield batch.metadata.producer_name, batch.last_sequence_id
