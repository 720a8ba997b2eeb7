"""Batches that wait to be stored in a partition, their outcome, and the last sequence ids of each
producer.

Always true: a batch is a duplicate if its producer has sent its last sequence id, or a higher one,
before. A duplicate is not sent to a ledger; its producer gets the answer for it as soon as the
first batch is stored (hazard 31). After batches have failed with unknown outcome, no batch counts
as a duplicate until the log has shown which batches are stored. Of a message in chunks only the
last chunk is recognised as a duplicate: earlier chunks are stored again, and belong to no message.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import NamedTuple, Protocol

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import Rowless, Share, encode_header
from spark_ledger.topic.entry.pulsar_batch import frame_batches
from spark_ledger.topic.log.producers import newest_producers

ENTRY_ROWS_MAX = 1 << 26
ENTRY_UNPACKED_MAX = 16 << 20
"""Limits of an entry of several runs: messages, and their bytes decompressed."""
REFUSED_MAX = 1000
"""How many refused messages in chunks the owner of a partition keeps in memory."""
JOINED_BYTES_MAX = 4096
"""Batches of at most this average size are copied into one buffer for an entry."""
NEW_BYTES_MAX, NAME_OVERHEAD_BYTES = 128 << 10, 24
"""The owner of a partition forgets producers when the names of new producers take more than
NEW_BYTES_MAX. NAME_OVERHEAD_BYTES is added for each name."""


class Chunk(Enum):
    EARLIER = "not the last chunk of a message"
    LAST = "the last chunk of a message; the row of the message has this chunk's offset"


class WaitingRun(Protocol):
    """A run: successive batches of a producer until they are stored, all in one entry. With
    deduplication their last sequence ids rise. A method whose name is a participle notes that event
    of the run."""

    batches: list[bytes]
    counts: list[int]
    """How many messages each batch has."""
    size: int
    unpacked: int
    """The size of the batches decompressed, by the sizes that the batches declare."""
    messages: int
    """How many messages the run has."""
    batched: bool
    """Whether the batches have metadata of each message."""
    producer_name: str
    chunk: Chunk | None
    """Which chunk of a message this run is; None for a run of batches."""

    @property
    def producer(self) -> object:
        """The producer that sent the run; another producer may have the same name."""

    @property
    def first_sequence_id(self) -> int:
        """The last sequence id of the first batch."""

    @property
    def last_sequence_id(self) -> int:
        """The last sequence id of the last batch."""

    def each(self) -> Sequence["WaitingRun"]:
        """The run's batches, each as a run by itself."""

    def sent(self, offset: int) -> None:
        """The run goes into an entry; if the entry is stored, the first message has this offset."""

    def duplicate(self) -> None:
        """The batches were stored before."""

    def stored(self, offset: int) -> None:
        """The batches are stored, and the first message has this offset."""

    def failed(self, error: errors.LedgerError) -> None:
        """The batches may or may not be stored, and are not sent again here."""


@dataclass(slots=True)
class PendingEntry:
    """An entry under way, with its runs. `rowless`: the offsets without a row in its segment,
    including those of this entry."""

    runs: list[WaitingRun]
    rows: int
    rowless: Rowless
    acked: "asyncio.Future[int]"

    def drop(self) -> None:
        """Ignore the outcome of the entry."""
        self.acked.add_done_callback(lambda acked: acked.cancelled() or acked.exception())


class EntryRuns(NamedTuple):
    """The runs of an entry, with their bytes and messages."""

    runs: list[WaitingRun]
    size: int
    rows: int


def take_runs(queue: deque[WaitingRun], bytes_max: int) -> EntryRuns:
    """The runs of the next entry, from the head of the queue: one run of any size, several runs
    within `bytes_max` and the limits above, or a chunk by itself."""
    runs = [queue.popleft()]
    size, rows, unpacked = runs[0].size, runs[0].messages, runs[0].unpacked
    while (
        queue
        and runs[-1].chunk is None
        and queue[0].chunk is None
        and size + queue[0].size <= bytes_max
        and rows + queue[0].messages <= ENTRY_ROWS_MAX
        and unpacked + queue[0].unpacked <= ENTRY_UNPACKED_MAX
    ):
        runs.append(queue.popleft())
        size += runs[-1].size
        unpacked += runs[-1].unpacked
        rows += runs[-1].messages
    return EntryRuns(runs, size, rows)


class EntryBytesLimit:
    """How many bytes of runs go into an entry. The limit falls when a bookie refuses an entry as
    too large: the bookie's limit may be below this process' limit."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max

    def shrink(self, entries: Sequence[PendingEntry], entry_id: int) -> list[object]:
        """Lower `bytes_max` if a bookie refused the first of these entries as too large. The
        entries are not stored; `entry_id` is the id of the first. If the refused entry has one run,
        that run fails here; returns the run's producer, which then has to send the following runs
        again: without the failed chunk the later chunks make no message."""
        head = entries[0] if entries else None
        if head is None or not head.acked.done() or head.acked.cancelled():
            return []
        failure = head.acked.exception()
        if not isinstance(failure, errors.MessageTooBig):
            return []
        if failure.facts.get("entry_id", entry_id) != entry_id:  # another entry was refused
            return []
        self.bytes_max = min(self.bytes_max, sum(run.size for run in head.runs)) // 2
        if len(head.runs) > 1:
            return []
        run = head.runs.pop()
        run.failed(failure)
        return [run.producer]


def encode_entry(
    runs: Sequence[WaitingRun],
    size: int,
    share: Share,
    now_ms: int,
    rowless: Rowless,
    *,
    at_offset: bool,
) -> list[Buffer]:
    """The bytes of the entry that has these runs of `size` bytes, in parts. `rowless`: the offsets
    without a row in its segment, this entry included; `at_offset`: the header of the entry has its
    offset."""
    head = encode_header(
        [share],
        now_ms,
        has_batches=True,
        chunks=0 if runs[0].chunk is None else 1,
        rowless=rowless,
        at_offset=at_offset,
    )
    pairs = (zip(run.counts, run.batches, strict=True) for run in runs)
    body = frame_batches(chain.from_iterable(pairs))
    if size <= JOINED_BYTES_MAX * len(body):  # one copy is cheaper than many parts
        body = [b"".join(body)]
    return [head, *body]


class Waiters:
    """Tasks that wait for conditions, which may hold after a change."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, None] = {}

    def wake_all(self) -> None:
        """Wake the waiting tasks after a change."""
        for change in self._waiting:
            change.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return as soon as the condition holds; the condition is checked after each change."""
        change = asyncio.Event()
        self._waiting[change] = None
        try:
            while not holds():
                change.clear()
                await change.wait()
        finally:
            del self._waiting[change]


def sends_bytes(producer: object) -> bool:
    """Whether the producer's values are not objects under a JSON schema."""
    return not getattr(producer, "sends_objects", False)


class RunCounts:
    """How many runs of each producer wait or are under way. The runs are counted, not searched: a
    queue may have thousands, and a writer asks for a producer's runs after each stored entry."""

    def __init__(self) -> None:
        self._counts: dict[object, int] = {}

    def add(self, runs: Iterable[WaitingRun]) -> None:
        for run in runs:
            self._counts[run.producer] = self._counts.get(run.producer, 0) + 1

    def remove(self, runs: Iterable[WaitingRun]) -> None:
        for run in runs:
            self._counts[run.producer] -= 1
            if not self._counts[run.producer]:
                del self._counts[run.producer]

    def count(self, *queues: Iterable[WaitingRun]) -> None:
        """Count anew: these queues have all runs."""
        self._counts.clear()
        self.add(chain(*queues))

    def has_any(self, matches: Callable[[object], bool]) -> bool:
        """Whether a producer that matches has a run."""
        return any(map(matches, self._counts))


def without_gone(
    queue: deque[WaitingRun],
    gone: Collection[object],
    ids: "SequenceIds | None",
    sent: Iterable[PendingEntry],
) -> tuple[deque[WaitingRun], list[WaitingRun]]:
    """The queue without the runs of producers that have gone, and the runs taken out. `sent` has
    the entries under way, which stay. With `ids`, runs of other producers with the same names are
    taken out too: such a producer may continue one that has gone, and then has to send its runs
    again after that producer's runs."""
    names: dict[str, None] = {}
    if ids is not None:
        waiting = (*queue, *ids.repeated)
        names = dict.fromkeys(run.producer_name for run in waiting if run.producer in gone)

    def goes(run: WaitingRun) -> bool:
        return run.producer in gone or run.producer_name in names

    dropped = [run for run in queue if goes(run)]
    if ids is not None:
        dropped += ids.drop(goes, names, [run for entry in sent for run in entry.runs])
    return deque(run for run in queue if not goes(run)), dropped


class RefusedMessages:
    """Messages in chunks that the owner of a partition has refused, the newest REFUSED_MAX, by
    producer and uuid. A client that got only the refusal of the first chunk sends the later chunks
    again on its next connection: by this list the owner recognises them. Else it would take them
    for chunks of a stored message."""

    def __init__(self) -> None:
        self._hashes: dict[int, None] = {}  # hashes: a client may choose a long uuid

    def add(self, producer_name: str, uuid: str) -> None:
        """Note that the message is refused."""
        key = hash((producer_name, uuid))
        self._hashes.pop(key, None)
        self._hashes[key] = None
        if len(self._hashes) > REFUSED_MAX:
            del self._hashes[next(iter(self._hashes))]

    def remove(self, producer_name: str, uuid: str) -> None:
        """Remove the message: its producer sends it anew, from the first chunk on."""
        self._hashes.pop(hash((producer_name, uuid)), None)

    def has(self, producer_name: str, uuid: str) -> bool:
        """Whether the message was refused, and not sent anew since."""
        return hash((producer_name, uuid)) in self._hashes


class SequenceIds:
    """The producers' last sequence ids in one partition; `of_segment` has the ids that are stored
    in the open segment, with the latest sender at the end. Always true: the id of a producer with a
    run under way is kept. Of the other producers, the latest senders are kept: as many as a seal
    keeps, and at most NEW_BYTES_MAX more."""

    def __init__(self) -> None:
        self.of_segment: dict[str, int] = {}
        # last stored id by producer, the latest sender at the end
        self._stored: dict[str, int] = {}
        self._sent: dict[str, int] = {}  # last sent id, of producers with runs under way
        self._new_bytes = 0  # of names that came after names were last forgotten
        self.repeated: deque[WaitingRun] = deque()
        """Runs that were sent again before the first sending was stored."""
        self._unsure = False

    def begin(self, last_ids: Mapping[str, int]) -> None:
        """Begin with the last ids from the log's seals, while no entry is under way."""
        self._stored, self._sent, self._unsure = dict(last_ids), {}, False

    def doubt(self) -> None:
        """Note that the entries under way have failed, and may still be stored."""
        self._unsure = True
        self._sent.clear()  # sent ids do not count until `begin`

    def last(self, producer_name: str) -> int:
        """The producer's last id that is stored or under way, else -1. Failed batches do not count:
        a client sends them again."""
        stored = self._stored.get(producer_name, -1)
        return stored if self._unsure else max(stored, self._sent.get(producer_name, -1))

    def new_part_of(self, run: WaitingRun) -> list[WaitingRun]:
        """The part of the run that was not sent before. The other batches are duplicates: they get
        their answer as soon as the first sending is stored."""
        name, last = run.producer_name, run.last_sequence_id
        if run.chunk is Chunk.EARLIER:
            return [run]
        if self._unsure or run.first_sequence_id > self.last(name):
            self._sent[name] = max(last, self._sent.get(name, last))
            return [run]
        if len(run.batches) > 1:
            return [new for single in run.each() for new in self.new_part_of(single)]
        if last <= self._stored.get(name, -1):
            run.duplicate()
        else:
            self.repeated.append(run)
        return []

    def still_new(self, queue: Iterable[WaitingRun]) -> deque[WaitingRun]:
        """The runs that are still new after `begin`, among these runs and the runs sent again."""
        return deque(
            new for run in (*queue, *self.take_repeated()) for new in self.new_part_of(run)
        )

    def note_stored(self, run: WaitingRun) -> None:
        """Note that the run is stored."""
        if run.chunk is Chunk.EARLIER:
            return
        name, last = run.producer_name, run.last_sequence_id
        if name not in self._stored or name not in self.of_segment:
            self._new_bytes += len(name.encode()) + NAME_OVERHEAD_BYTES
        self._stored[name] = max(last, self._stored.pop(name, last))
        self.of_segment[name] = max(last, self.of_segment.pop(name, last))
        if self._sent.get(name, -1) <= self._stored[name]:
            self._sent.pop(name, None)
        if self._new_bytes > NEW_BYTES_MAX:
            self._forget()
        if self.repeated:
            waiting, self.repeated = self.repeated, deque()
            for waiter in waiting:
                if waiter.last_sequence_id <= self._stored.get(waiter.producer_name, -1):
                    waiter.duplicate()
                else:
                    self.repeated.append(waiter)

    def _forget(self) -> None:
        """Forget the producers that sent longest ago and have no run under way."""
        kept = {**dict.fromkeys(newest_producers(self._stored)), **dict.fromkeys(self._sent)}
        self._stored = {name: last for name, last in self._stored.items() if name in kept}
        self.of_segment = newest_producers(self.of_segment)
        self._new_bytes = 0

    def drop(
        self,
        goes: Callable[[WaitingRun], bool],
        names: Iterable[str],
        under_way: Iterable[WaitingRun],
    ) -> list[WaitingRun]:
        """Set the sent ids of these names by the runs `under_way` alone. Takes the runs that `goes`
        selects out of the runs sent again, and returns them."""
        dropped = [run for run in self.repeated if goes(run)]
        self.repeated = deque(run for run in self.repeated if not goes(run))
        counted = [run for run in under_way if run.chunk is not Chunk.EARLIER]
        for name in names:
            sent = [run.last_sequence_id for run in counted if run.producer_name == name]
            last = max([*sent, -1])
            if last > self._stored.get(name, -1):
                self._sent[name] = last
            else:
                self._sent.pop(name, None)
        return dropped

    def take_repeated(self) -> list[WaitingRun]:
        """Take out the runs that were sent again: the caller fails them or adds them anew."""
        waiting, self.repeated = list(self.repeated), deque()
        return waiting
