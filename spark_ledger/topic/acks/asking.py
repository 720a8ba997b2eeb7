"""A request to the owners of a topic's partitions: what have a subscription's consumers
acknowledged?

    GET /ledger/v1/acknowledged/<topic id>?subscription=NAME  ->
    {"partitions":{"0":{"epoch":7,"entries":["U0xB..."]}}}

Always true: an owner answers for the partitions whose acknowledgements it has taken over, with what
it has in memory, durable or not; `epoch` is its epoch of the partition, and the entries are those
of one snapshot (entries.py). An owner that lost the partition may still answer: the caller compares
the epoch with the epoch in the partition's node. A broker that does not answer in time, or whose
answer is malformed, is left out.
"""

import base64
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from spark_ledger import errors, http
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.acks.entries import (
    AckFold,
    AckKey,
    AckState,
    BadAckEntry,
    WriteKind,
    decode,
    encode,
    state_records,
)

ACKNOWLEDGED_PATH = "/ledger/v1/acknowledged"
_log = logging.getLogger(__name__)


class OwnedAcks(NamedTuple):
    """The states of a subscription in a partition, at the partition's owner of this epoch."""

    partition: int
    epoch: int
    states: Mapping[AckKey, AckState]


def encode_answer(owned: Iterable[OwnedAcks]) -> dict[str, Any]:
    """The JSON of an owner's answer."""
    partitions = {}
    for partition, epoch, states in owned:
        entries = encode(WriteKind.SNAPSHOT, epoch, state_records(states))
        texts = [base64.b64encode(entry).decode() for entry in entries]
        partitions[str(partition)] = {"epoch": epoch, "entries": texts}
    return {"partitions": partitions}


def decode_answer(plain: Any) -> list[OwnedAcks]:
    """Raises BadAckEntry, errors.UnsupportedFormat."""
    try:
        return [
            OwnedAcks(int(partition), int(owned["epoch"]), _states(owned["entries"]))
            for partition, owned in plain["partitions"].items()
        ]
    except errors.MALFORMED as error:
        raise BadAckEntry(f"an answer about acknowledgements: {error!r}") from error


def _states(texts: Iterable[str]) -> dict[AckKey, AckState]:
    fold = AckFold()
    for text in texts:
        fold.add(decode(base64.b64decode(text, validate=True)))
    return fold.states


async def ask_owners(
    store: MetadataStore, topic_id: str, name: str, brokers: Collection[str]
) -> list[OwnedAcks]:
    """What these brokers answer about the subscription `name`. Raises StoreError."""
    nodes = await store.get_many([paths.broker(broker) for broker in brokers])
    urls = [url for node in nodes if node is not None and (url := _admin_url(node.value))]

    async def ask(url: str) -> list[OwnedAcks]:
        try:
            path = f"{ACKNOWLEDGED_PATH}/{topic_id}?subscription={quote(name, safe='')}"
            return decode_answer(await http.ask(url + path))
        except (http.HttpFailure, BadAckEntry, errors.UnsupportedFormat) as error:
            _log.warning("the broker at %s does not send its acknowledgements: %s", url, error)
            return []

    return [owned for answer in await call_each(ask, urls) for owned in answer]


def _admin_url(value: bytes) -> str:
    """The URL in a broker's node; "" without it."""
    try:
        return str(json.loads(value).get("admin_url", ""))
    except errors.MALFORMED:
        return ""
