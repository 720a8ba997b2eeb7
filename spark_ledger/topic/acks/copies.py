"""Copies of what a subscription's consumers acknowledged one by one. A query of Spark that begins
at a subscription leaves out the rows of its copy.

    /topic-ids/<id>/acks/copy-<copy id>   {"inline":["U0xB..."]} or {"ledger":[312,0,0,3]}

Always true: a copy never changes, so every plan, replay and restart of the query leaves out the
same rows, whatever consumers acknowledge meanwhile. The node is made after the ledger that it names
is durable. A copy belongs to its query, not to the subscription: the deletion of the subscription
leaves it. It holds no row against retention. The query deletes it after the last batch that needs
it. A query that ends before that leaves its copy: each run of a query renews the node, and `expire`
removes the copies that were not renewed for KEPT_MS, by the store's clock. `expire` runs in the
upkeep of every topic; a renewal under way makes its deletion fail. The janitor keeps the ledgers
that the nodes name.

The entries are those of one snapshot (entries.py, version 2); the name of a record is the
partition's number in decimal digits, its token is empty, its epochs are 0.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import multi_unless_held
from spark_ledger.metadata.store import (
    ANY_VERSION,
    BadVersion,
    Check,
    Create,
    MetadataStore,
    MultiFailed,
    NodeExists,
    NoNode,
    OutcomeUnknown,
    Versioned,
)
from spark_ledger.metadata.store_calls import (
    Tries,
    call_each,
    look_up,
    names_in,
    read,
    unavailable_while,
)
from spark_ledger.topic.acks.entries import (
    ENTRY_BYTES_MAX,
    AckEntry,
    AckFold,
    AckKey,
    AckState,
    BadAckEntry,
    WriteKind,
    decode,
    encode,
    state_records,
)
from spark_ledger.topic.acks.ledger import discard_ledger
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.acks.steps import INLINE_BYTES_MAX
from spark_ledger.topic.log.blobs import Blobs, StoredEntries
from spark_ledger.topic.log.intents import Intents
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.records import FIRST_VERSION, load

KEPT_MS = 30 * 86_400_000
"""How long a copy is kept after its query used it last. A copy is small, so it is kept long enough
for a query that was stopped for a vacation."""
COPIES_AT_ONCE = 16
_PREFIX = "copy-"

AckedOffsets = Mapping[int, BitMap64]
"""By partition the acknowledged offsets."""


@dataclass(frozen=True, slots=True)
class CopyPointer:
    """The record of a copy's node: the entries themselves, or the place of the entries."""

    inline: tuple[bytes, ...] = ()
    stored: StoredEntries | None = None


def encode_pointer(pointer: CopyPointer) -> bytes:
    plain: dict[str, Any] = {"min_reader": FIRST_VERSION, "min_writer": FIRST_VERSION}
    if pointer.stored is None:
        plain["inline"] = [base64.b64encode(entry).decode() for entry in pointer.inline]
    else:
        stored = pointer.stored
        plain["ledger"] = [stored.ledger_id, stored.metadata_version, stored.first, stored.last]
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_pointer(value: bytes) -> CopyPointer:
    """Raises errors.UnsupportedFormat."""

    def build(plain: dict[str, Any]) -> CopyPointer:
        if "ledger" in plain:
            ledger, version, first, last = map(int, plain["ledger"])
            if not 0 <= first <= last:
                raise ValueError(f"entries {first} to {last}")
            return CopyPointer(stored=StoredEntries(ledger, version, first, last))
        return CopyPointer(
            tuple(base64.b64decode(entry, validate=True) for entry in plain["inline"])
        )

    return load(value, "copy of acknowledgements", build)


def encode_copy(acked: AckedOffsets, bytes_max: int = ENTRY_BYTES_MAX) -> list[bytes]:
    """The entries of a copy, in order, of about `bytes_max` each before they are compressed."""
    states = {}
    for partition, offsets in acked.items():
        packed = offsets.copy()
        packed.run_optimize()
        states[AckKey(str(partition), "", 0)] = AckState(0, packed, 0)
    records = state_records(states)
    return encode(WriteKind.SNAPSHOT, 0, records, bytes_max=bytes_max, compressed=True)


def decode_copy(entries: Sequence[bytes | memoryview]) -> dict[int, BitMap64]:
    """The acknowledged offsets by partition. Raises errors.UnsupportedFormat for entries that are
    not those of a copy."""
    fold = AckFold()
    try:
        decoded: list[AckEntry] = [decode(entry) for entry in entries]
        for entry in decoded:
            fold.add(entry)
        if not decoded or decoded[-1].part + 1 != decoded[-1].parts or fold.is_lost:
            raise BadAckEntry("its last entries are missing")
        return {int(key.name): state.rows for key, state in fold.states.items()}
    except (BadAckEntry, ValueError) as error:
        raise errors.UnsupportedFormat(f"a damaged copy of acknowledgements: {error}") from error


class AckCopies:
    """The copies of one topic. All methods raise errors.Unavailable if the store does not
    respond."""

    def __init__(self, intents: Intents, blobs: Blobs, topic_id: str) -> None:
        self._intents = intents
        self._blobs = blobs
        self._ledgers = blobs.ledgers
        self._store = blobs.ledgers.metadata
        self._topic_id = topic_id

    async def make(self, copy_id: str, acked: AckedOffsets, policies: TopicPolicies) -> None:
        """Makes the copy `copy_id`, a new random id; `policies` are the topic's. The copy is
        durable when this returns. Raises errors.LedgerError."""
        entry_bytes = self._ledgers.config.entry_bytes_max * 3 // 4
        entries = encode_copy(acked, min(ENTRY_BYTES_MAX, entry_bytes))
        with unavailable_while(f"copying acknowledgements of topic {self._topic_id}"):
            await AckNodes(self._ledgers, self._topic_id).seen()  # makes the folder
            if sum(map(len, entries)) <= INLINE_BYTES_MAX:
                await self._create(copy_id, CopyPointer(inline=tuple(entries)))
                return
            intent = await self._intents.open_system_intent("copy", self._topic_id)
            try:
                async with self._blobs.writer(intent, self._topic_id, policies) as writer:
                    stored = await writer.store(entries, [0] * len(entries))
                    tries = Tries()
                    while True:
                        checks = [Check(paths.intent(intent.id), intent.version)]
                        checks += await writer.checks()
                        if await self._create(copy_id, CopyPointer(stored=stored), checks):
                            return
                        await tries.retry_or_raise("the ledger of a copy changes again and again")
            finally:
                await self._intents.try_finish(intent)

    async def _create(
        self, copy_id: str, pointer: CopyPointer, checks: Sequence[Check] = ()
    ) -> bool:
        """Makes the node; False if one of `checks` failed."""
        path = paths.ack_copy(self._topic_id, copy_id)
        tries = Tries()
        while True:
            try:
                create = Create(path, encode_pointer(pointer))
                await multi_unless_held(self._store, [create, *checks])
                return True
            except MultiFailed as failed:
                if failed.index == 0:  # made by a try whose response was lost
                    if isinstance(failed.cause, NodeExists):
                        return True
                    raise errors.TopicNotFound(
                        f"there is no topic with id {self._topic_id}", topic_id=self._topic_id
                    ) from None
                return False
            except OutcomeUnknown:
                await tries.retry_or_raise("responses of the metadata store were lost")

    async def read(self, copy_id: str) -> dict[int, BitMap64]:
        """The acknowledged offsets by partition. Raises errors.CopyGone, errors.LedgerError."""
        with unavailable_while(f"reading copy {copy_id}"):
            node = await look_up(self._store, paths.ack_copy(self._topic_id, copy_id))
        if node is None:
            raise self._gone(copy_id)
        pointer = decode_pointer(node.value)
        if pointer.stored is None:
            return decode_copy(pointer.inline)
        stored = pointer.stored
        try:
            reader = await self._ledgers.open(
                stored.ledger_id, recover=False, min_version=stored.metadata_version
            )
            entries = reader.read(stored.first, stored.last, known_confirmed=stored.last)
            return decode_copy([entry.payload async for _, entry in entries])
        except errors.NoSuchLedger:
            raise self._gone(copy_id) from None

    async def renew(self, copy_id: str) -> None:
        """Keeps the copy for another KEPT_MS, if it exists."""
        path = paths.ack_copy(self._topic_id, copy_id)
        with (
            unavailable_while(f"renewing copy {copy_id}"),
            suppress(OutcomeUnknown, NoNode, BadVersion),
        ):
            node = await self._store.get(path)
            await self._store.set(path, node.value, node.version)

    async def delete(self, copy_id: str) -> None:
        """Deletes the copy, if it exists."""
        with unavailable_while(f"deleting copy {copy_id}"):
            node = await read(self._store, paths.ack_copy(self._topic_id, copy_id))
            if node is not None:
                await self._delete(copy_id, node, ANY_VERSION)

    async def expire(self, now_ms: int) -> list[str]:
        """Deletes the copies that were not renewed in KEPT_MS before `now_ms`, by the store's
        clock; returns their ids."""
        with unavailable_while(f"removing old copies of topic {self._topic_id}"):
            names = await names_in(self._store, paths.acks(self._topic_id))
            nodes = await nodes_of_copies(self._store, self._topic_id, names)
            old = {id_: node for id_, node in nodes.items() if now_ms - node.modified_ms >= KEPT_MS}
            for copy_id, node in old.items():
                await self._delete(copy_id, node, node.version)
        return list(old)

    async def _delete(self, copy_id: str, node: Versioned, version: int) -> None:
        try:
            await self._store.delete(paths.ack_copy(self._topic_id, copy_id), version)
        except (NoNode, BadVersion, OutcomeUnknown):
            return
        with suppress(errors.UnsupportedFormat):
            stored = decode_pointer(node.value).stored
            if stored is not None:
                await discard_ledger(self._ledgers, stored.ledger_id)

    def _gone(self, copy_id: str) -> errors.CopyGone:
        return errors.CopyGone(
            f"copy {copy_id} of acknowledgements in topic {self._topic_id} is gone",
            topic_id=self._topic_id,
            copy=copy_id,
        )


async def nodes_of_copies(
    store: MetadataStore, topic_id: str, names: Sequence[str]
) -> dict[str, Versioned]:
    """The nodes of the topic's copies, by copy id; `names` are all names in the topic's folder of
    acknowledgements."""
    ids = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    nodes = await call_each(
        lambda id_: read(store, paths.ack_copy(topic_id, id_)), ids, COPIES_AT_ONCE
    )
    return {id_: node for id_, node in zip(ids, nodes, strict=True) if node is not None}


async def ledgers_of_copies(
    store: MetadataStore, topic_id: str, names: Sequence[str]
) -> frozenset[int]:
    """The ledgers that the topic's copies name; `names` as in nodes_of_copies. Raises
    errors.UnsupportedFormat."""
    nodes = await nodes_of_copies(store, topic_id, names)
    stored = (decode_pointer(node.value).stored for node in nodes.values())
    return frozenset(at.ledger_id for at in stored if at is not None)
