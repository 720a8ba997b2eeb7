"""Intents: which run makes ledgers for topics, and whether it may still do so.

Always true: an intent begins open and ends once, as done or condemned, by compare-and-set. Every
commit checks in its multi that its intent is open, and so does the multi that records a block of
ledger ids (hazard 4). So after an intent is condemned no commit can add one of its ledgers to a
topic, and the janitor knows every ledger that the run can have made. Intents of queries stay after
their end, so that a zombie run that opens an intent again meets its own ended intent; other intents
stay for a while (intent_expiry.py). One query on one target has one current run: the multi that
makes a new run's intent condemns the older run's intent as superseded (hazard 11)."""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    ANY_VERSION,
    BadVersion,
    Check,
    Create,
    MetadataStore,
    MultiFailed,
    NoNode,
    Operation,
    OutcomeUnknown,
    SessionState,
    Set,
    StoreError,
    StoreUnavailable,
    Versioned,
)
from spark_ledger.metadata.store_calls import (
    TRIES_MAX,
    Tries,
    ensure,
    look_up,
    read,
    unavailable_while,
)
from spark_ledger.process import LruCache
from spark_ledger.topic.log import records
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.log.records import (
    IdBlock,
    IntentRecord,
    IntentState,
    QueryPointer,
    TxnRecord,
)

SUPERSEDED = "superseded"
STALE = "stale"
QUERY = "query"
PARTS = "parts"
BATCH = "batch"
SYSTEM = "system"
CURSOR = "cursor"
NAMED_ONCE_KINDS = (BATCH, PARTS, SYSTEM)
"""Kinds of intents under which a ledger is written for one commit or one checkpoint. After such a
ledger is CLOSED and dropped, no node names it again, so the janitor may delete it
(upkeep/garbage.py)."""
IDS_PER_BLOCK = 8
IDS_KEPT_S = 86_400.0  # later the rest of a block is not used: intent_expiry.py removes the block
HEARTBEAT_S = 60.0
INTENTS_REMEMBERED_MAX = 256
"""A process remembers the ids and heartbeats of this many intents. If the process forgets an
intent, some of the intent's ids stay unused, or its heartbeat is written too soon."""


@dataclass(frozen=True, slots=True)
class Intent:
    """An intent that was read; picklable, so a driver can send it to its tasks. `version` is the
    version of the intent's node: as long as the node has this version, the state is unchanged."""

    id: str
    record: IntentRecord
    version: int

    @property
    def is_open(self) -> bool:
        return self.record.state is IntentState.OPEN

    @property
    def app_id(self) -> str:
        return self.record.app_id

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def target(self) -> str:
        return self.record.target

    @property
    def names_once(self) -> bool:
        """Whether only one node ever names a ledger of this intent: the node of the commit or of
        the checkpoint for which the ledger is written."""
        return self.record.kind in NAMED_ONCE_KINDS

    def ended_error(self) -> errors.LedgerFenced:
        """The error for a run that goes on under this intent, which is not open."""
        state, why = self.record.state.value, self.record.why
        return errors.LedgerFenced(
            f"the run {self.record.run_id} may not write to '{self.record.target}' any more:"
            f" its intent {self.id} is {state}" + (f" ({why})" if why else ""),
            intent=self.id,
            why=why,
        )


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one observer saw of an intent's heartbeat: the version of its node, since when the node
    has this version, and the observer's session at that time."""

    heartbeat: int
    since_s: float
    session: int

    def matches(self, heartbeat: int, session: int) -> bool:
        return (self.heartbeat, self.session) == (heartbeat, session)


@dataclass(frozen=True, slots=True)
class _Pointer:
    """A query's pointer as it was read; if `version` is None, there is no pointer."""

    path: str
    current: QueryPointer | None = None
    version: int | None = None

    def names_run(self, run_id: str) -> bool:
        return self.current is not None and self.current.run_id == run_id

    def operation_to(self, pointer: QueryPointer) -> Operation:
        value = records.encode_query_pointer(pointer)
        if self.version is None:
            return Create(self.path, value)
        return Set(self.path, value, self.version)


class Intents:
    """All methods raise errors.Unavailable if the metadata store does not respond."""

    def __init__(self, store: MetadataStore, ledgers: LedgerStore, rng: random.Random) -> None:
        self.store = store
        self._ledgers = ledgers
        self._rng = rng
        self._ids = LruCache[str, tuple[float, int, deque[int]]](INTENTS_REMEMBERED_MAX)
        self._allocating = asyncio.Lock()
        self._heartbeats_s = LruCache[str, float](INTENTS_REMEMBERED_MAX)

    async def open_query_intent(
        self,
        query_id: str,
        run_id: str,
        target: str,
        *,
        overwrites: Sequence[str] = (),
        kind: str = QUERY,
    ) -> Intent:
        """The open intent of a streaming query's run on `target`, made if it does not exist. The
        kind is CURSOR if the target is a subscription, PARTS if each task commits (parts.py).

        Any number of tasks may call this at once: all get the same intent. The first call of a new
        run condemns the intent of the older run. A run whose intent was condemned as stale goes on
        under a new generation. A run that overwrites topics names their ids in each call. The
        intent records how far their logs went when the run began, so that the run does not
        overwrite rows that others add later. Raises errors.LedgerFenced if a newer run has taken
        over, errors.TopicNotFound.
        """
        path = f"{paths.QUERIES}/{escape(query_id)}@{escape(target)}"
        record = IntentRecord(kind, query_id, run_id, target, w0=records.NO_VERSION)
        with unavailable_while(f"opening the intent of query {query_id}"):
            tries = Tries(self._rng, tries_without_pause=1)
            while True:
                pointer = await self._read_pointer(path)
                current = await self._current_intent(pointer, record)
                if current is not None:
                    return current
                await self._make_query_intent(pointer, record, overwrites)
                await tries.retry_or_raise(
                    f"other runs of query {query_id} took over again and again"
                )
                await self.store.sync(path)

    async def open_batch_intent(
        self,
        app_id: str,
        run_id: str,
        target: str,
        *,
        overwrites: Sequence[str] = (),
        random: bool = False,
    ) -> Intent:
        """A new intent of a batch job; the driver makes the intent and sends it to its tasks.
        `overwrites` as in open_query_intent. With `random` no other intent has this app id, so the
        transaction record is removed with the intent. Raises errors.TopicNotFound."""
        record = IntentRecord(BATCH, app_id, run_id, target, w0=records.NO_VERSION, random=random)
        token = f"{self._rng.getrandbits(128):032x}"
        with unavailable_while(f"opening the intent of batch job {app_id}"):
            snapshots = await self._read_snapshots(overwrites)
            return await self._open_new(f"batch-{token}", replace(record, snapshots=snapshots))

    async def open_system_intent(self, purpose: str, target: str) -> Intent:
        """A new intent of maintenance on `target`; `purpose` is "compact", "trim" and so on. One
        process makes ledgers and commits actions under the intent (TopicClient.commit_actions), and
        ends the intent."""
        token = f"{self._rng.getrandbits(128):032x}"
        app_id, w0 = f"{purpose}-{token}", records.NO_VERSION
        record = IntentRecord(SYSTEM, app_id, token, target, w0, random=True)
        with unavailable_while(f"opening an intent to {purpose} '{target}'"):
            return await self._open_new(f"system-{token}", record)

    async def _open_new(self, intent_id: str, record: IntentRecord) -> Intent:
        """A new intent; no other process can have made an intent with this id."""
        await ensure(self.store, paths.INTENTS)
        tries = Tries(self._rng)
        while True:
            await self._make(intent_id, record, [])
            node = await read(self.store, paths.intent(intent_id))
            if node is not None:
                return _decode_intent(intent_id, node)
            await tries.retry_or_raise(f"others committed as {record.app_id} again and again")
            await self.store.sync(paths.INTENTS)

    async def get(self, intent_id: str) -> Intent:
        """The intent as it is now. Raises errors.LedgerFenced if there is no such intent."""
        with unavailable_while(f"reading intent {intent_id}"):
            node = await look_up(self.store, paths.intent(intent_id))
        if node is None:
            raise errors.LedgerFenced(f"there is no intent {intent_id}", intent=intent_id)
        return _decode_intent(intent_id, node)

    async def txn_record(self, intent: Intent) -> TxnRecord:
        """The transaction record of the intent's app id and target, not older than this call."""
        path = paths.txn(escape(intent.app_id), escape(intent.target))
        with unavailable_while(f"reading the transaction record of '{intent.app_id}'"):
            await self.store.sync(path)
            node = await look_up(self.store, path)
        return TxnRecord() if node is None else records.decode_txn(node.value)

    async def heartbeat(self, intent: Intent) -> None:
        """Raises the intent's heartbeat; this process does so once in HEARTBEAT_S at most. Ignores
        failures of the store: the next commit reports them."""
        if self.store.session_state is not SessionState.CONNECTED:
            return  # the write, and the rows that wait for it, would wait for an outage's end
        now = asyncio.get_running_loop().time()
        last_s = self._heartbeats_s.get(intent.id)
        if last_s is not None and now - last_s < HEARTBEAT_S:
            return
        self._heartbeats_s.put(intent.id, now)
        try:
            await self.store.set(paths.intent_heartbeat(intent.id), b"", ANY_VERSION)
        except (NoNode, OutcomeUnknown, StoreUnavailable):
            return

    async def finish(self, intent_id: str) -> Intent:
        """Sets the intent to done if it is open. The janitor may then delete those ledgers of the
        intent to which no segment refers. Returns the ended intent. Raises errors.LedgerFenced if
        there is no such intent."""
        return await self._end(intent_id, IntentState.DONE, "")

    async def try_finish(self, intent: Intent) -> None:
        """As `finish`, but raises no error: if it fails, the janitor ends the intent."""
        with suppress(errors.LedgerError, StoreError):
            await self.finish(intent.id)

    async def condemn(self, intent_id: str, why: str) -> Intent:
        """Condemns the intent if it is open; returns the ended intent. Raises errors.LedgerFenced
        if there is no such intent."""
        return await self._end(intent_id, IntentState.CONDEMNED, why)

    async def ledger_id(self, intent: Intent) -> int:
        """A ledger id that only this intent may use, from a block recorded under the intent.

        Raises errors.LedgerFenced if the intent is not open any more, errors.MetadataHeld.
        """
        with unavailable_while(f"taking ledger ids for intent {intent.id}"):
            async with self._allocating:
                now_s = asyncio.get_running_loop().time()
                invalidations = self._ledgers.invalidations
                since_s, invalidations_then, ids = self._ids.get(intent.id) or (
                    now_s,
                    invalidations,
                    deque[int](),
                )
                if not ids or invalidations_then != invalidations or now_s - since_s >= IDS_KEPT_S:
                    ids = deque(await self._record_block(intent))
                    self._ids.put(intent.id, (now_s, invalidations, ids))
                return ids.popleft()

    async def _record_block(self, intent: Intent) -> range:
        """New ids, recorded under the intent while it is open."""
        ids = await self._ledgers.allocate_ids(IDS_PER_BLOCK)
        path = f"{paths.intent_blocks(intent.id)}/{ids.start:019d}"
        block = Create(path, records.encode_block(IdBlock(ids.start, len(ids))))
        check = Check(paths.intent(intent.id), intent.version)
        for _ in range(TRIES_MAX):
            try:
                await self.store.multi([check, block])
                return ids
            except MultiFailed as failed:
                if failed.index == 1:  # the block is recorded: an earlier response was lost
                    return ids
                await self.store.sync(path)
                raise (await self.get(intent.id)).ended_error() from failed
            except OutcomeUnknown:
                await self.store.sync(path)
        raise StoreUnavailable(f"{TRIES_MAX} responses were lost")

    async def _end(self, intent_id: str, state: IntentState, why: str) -> Intent:
        with unavailable_while(f"ending intent {intent_id}"):
            for _ in range(TRIES_MAX):
                await self.store.sync(paths.intent(intent_id))
                intent = await self.get(intent_id)
                if not intent.is_open:
                    return intent
                record = replace(intent.record, state=state, why=why)
                value = records.encode_intent(record)
                try:
                    version = await self.store.set(paths.intent(intent_id), value, intent.version)
                    return Intent(intent_id, record, version)
                except (BadVersion, OutcomeUnknown):
                    continue
            raise StoreUnavailable(f"{TRIES_MAX} responses were lost")

    async def _read_pointer(self, path: str) -> _Pointer:
        node = await read(self.store, path)
        if node is None:
            return _Pointer(path)
        return _Pointer(path, records.decode_query_pointer(node.value), node.version)

    async def _current_intent(self, pointer: _Pointer, record: IntentRecord) -> Intent | None:
        """The run's open intent; None if it must be made. Raises errors.LedgerFenced."""
        if not pointer.names_run(record.run_id):
            earlier = await read(self.store, paths.intent(_query_intent_id(record)))
            if earlier is None:
                return None
            # so the pointer was written, by the multi that made this intent or by a later multi
            pointer = await self._read_pointer(pointer.path)
            if not pointer.names_run(record.run_id):
                raise _superseded_error(_decode_intent(_query_intent_id(record), earlier))
        assert pointer.current is not None
        intent = await self.get(pointer.current.intent)
        if not intent.is_open and intent.record.why != STALE:
            raise intent.ended_error()
        return intent if intent.is_open else None

    async def _read_snapshots(self, topic_ids: Sequence[str]) -> dict[str, int]:
        """For each topic the number that its next commit takes, not older than this call."""
        snapshots = {}
        for topic_id in topic_ids:
            await self.store.sync(paths.topic_head(topic_id))
            node = await read(self.store, paths.topic_head(topic_id))
            if node is None:
                raise errors.TopicNotFound(
                    f"there is no topic with id {topic_id}", topic_id=topic_id
                )
            snapshots[topic_id] = records.decode_head(node.value).next
        return snapshots

    async def _make_query_intent(
        self, pointer: _Pointer, record: IntentRecord, overwrites: Sequence[str]
    ) -> None:
        """Tries once to make the run's next intent, as the query's current intent."""
        current = pointer.current
        operations: list[Operation] = []
        if current is not None and current.run_id == record.run_id:
            older = await self.get(current.intent)
            snapshots = {**await self._read_snapshots(overwrites), **older.record.snapshots}
            record = replace(record, generation=current.generation + 1, snapshots=snapshots)
        else:
            record = replace(record, snapshots=await self._read_snapshots(overwrites))
        if current is not None and current.run_id != record.run_id:
            older = await self.get(current.intent)
            if older.is_open:
                condemned = replace(older.record, state=IntentState.CONDEMNED, why=SUPERSEDED)
                value = records.encode_intent(condemned)
                operations.append(Set(paths.intent(older.id), value, older.version))
        intent_id = _query_intent_id(record)
        new_pointer = QueryPointer(intent_id, record.run_id, record.generation)
        await ensure(self.store, paths.INTENTS)
        await ensure(self.store, paths.QUERIES)
        await self._make(intent_id, record, [*operations, pointer.operation_to(new_pointer)])

    async def _make(
        self, intent_id: str, record: IntentRecord, others: Sequence[Operation]
    ) -> None:
        """Sends one multi: the intent, with the version in the transaction record as `w0`, and
        the operations `others`. For a random app id the same multi makes the transaction record: a
        record without an intent would stay for ever. A lost race or a lost response is not an
        error: the caller reads the intent."""
        txn = paths.txn(escape(record.app_id), escape(record.target))
        record_operations: list[Operation]
        if record.random:
            await ensure(self.store, paths.TXNS)
            new = records.encode_txn(TxnRecord())
            record_operations = [Create(txn.rpartition("/")[0]), Create(txn, new)]
        else:
            await ensure(self.store, txn, records.encode_txn(TxnRecord()))
            node = await self.store.get(txn)
            record = replace(record, w0=records.decode_txn(node.value).version)
            record_operations = [Check(txn, node.version)]
        operations = [
            *record_operations,
            Create(paths.intent(intent_id), records.encode_intent(record)),
            Create(paths.intent_heartbeat(intent_id)),
            Create(paths.intent_blocks(intent_id)),
            *others,
        ]
        try:
            await self.store.multi(operations)
        except (MultiFailed, OutcomeUnknown):
            return


def _query_intent_id(record: IntentRecord) -> str:
    names = (record.app_id, record.run_id, record.target, str(record.generation))
    return "@".join(escape(name) for name in names)


def _decode_intent(intent_id: str, node: Versioned) -> Intent:
    return Intent(intent_id, records.decode_intent(node.value), node.version)


def _superseded_error(intent: Intent) -> errors.LedgerFenced:
    return errors.LedgerFenced(
        f"a newer run of query {intent.record.app_id} writes to '{intent.record.target}'",
        intent=intent.id,
        why=SUPERSEDED,
    )
