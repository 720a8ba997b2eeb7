"""Verbs that show a stored message or batch, or the id of one.

Always true: a broker that does not have the partition redirects the request to the owner. The body
of a message's response has the producer's bytes, decompressed; a batch has the metadata of each
message too. The n-th is counted in batches: clients count so, since each response is a batch.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call, number_of
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored
from spark_ledger.http import HttpResponse
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_batch import Batch, chunk_in, chunks_of, is_last_chunk

NTH_MAX = 10_000
SHOWN_BYTES_MAX = 16 << 20


# -- messages --------------------------------------------------------------------------------------


async def message(call: Call) -> HttpResponse:
    info = await call.existing_topic()
    ledger, entry = call.number("ledger"), call.number("entry")
    if ledger != names.ledger_number(info.id):
        raise _missing(call)
    _, owned = await call.owned(info, "Get message by id")
    stored = await _batch_at(owned.log, entry)
    if stored is None or stored.offset != entry:
        raise _missing(call)
    return await _shown(owned.log, stored)


async def peek(call: Call) -> HttpResponse:
    """The n-th batch, from 1 on, of those with a message that is not acknowledged in the
    subscription."""
    info, number = await call.existing_topic(), call.number("position")
    _check_nth(number)
    name = call.request.parts["subscription"]
    positions: dict[int, int] = {}
    with suppress(errors.SubscriptionNotFound):  # then all that the partition has
        positions = await call.client.subscriptions.positions(info.id, name)
    topic, owned = await call.owned(info, "Peek messages")
    used = {subscription.name: subscription for subscription in topic.subscriptions.used_here()}
    dispatcher = used[name].dispatcher_of(owned.number) if name in used else None
    if dispatcher is None:
        return await _nth(call, owned.log, positions.get(owned.number, 0), number, lambda _: True)
    acks = dispatcher.acks

    def is_left(batch: Stored) -> bool:
        return any(hi > lo for lo, hi in acks.missing(max(batch.offset, acks.mark), batch.end))

    return await _nth(call, owned.log, acks.mark, number, is_left)


def _check_nth(number: int) -> None:
    """Raises HttpRefusal: all batches before the n-th are read."""
    if not 1 <= number <= NTH_MAX:
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"only batches 1 to {NTH_MAX} can be shown, not batch {number}",
        )


async def examine(call: Call) -> HttpResponse:
    """The n-th batch of the partition, from its first or, backward, from its last batch on; if the
    partition has fewer, the last that was met."""
    info, query = await call.existing_topic(), call.request.query
    number = max(1, number_of(query.get("messagePosition", "1"), "messagePosition"))
    _check_nth(number)
    is_first = call.choice("initialPosition", ("latest", "earliest")) == "earliest"
    _, owned = await call.owned(info, "Examine messages")
    log, shown = owned.log, None
    async with aclosing(_forward(log, log.start) if is_first else _backward(log)) as batches:
        async for batch in batches:
            shown, number = batch, number - 1
            if number == 0:
                break
    if shown is None:
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"Could not examine messages due to the total message is zero: {info.name}",
        )
    return await _shown(log, shown)


async def _nth(
    call: Call, log: Partition, start: int, number: int, counts: Callable[[Stored], bool]
) -> HttpResponse:
    async with aclosing(_forward(log, start)) as batches:
        async for batch in batches:
            number -= counts(batch)
            if number == 0:
                return await _shown(log, batch)
    raise _missing(call)


async def _forward(log: Partition, offset: int) -> AsyncGenerator[Stored, None]:
    """The batches with a row, from the one that has the offset on."""
    while (offset := max(offset, log.start)) < log.end:
        batches = [batch for batch in await log.read(offset) if batch.end > offset]
        for batch in batches:
            if batch.has_rows:
                yield batch
        if not batches:
            return
        offset = batches[-1].end


async def _backward(log: Partition) -> AsyncGenerator[Stored, None]:
    """The batches with a row, from the last one back, at most NTH_MAX."""
    last = await log.last()
    for _ in range(NTH_MAX):
        if last is None:
            return
        yield last
        last = await log.last(before=last.offset)


async def _batch_at(log: Partition, offset: int) -> Stored | None:
    """The batch that has the offset."""
    if log.start <= offset < log.end:
        for stored in await log.read(offset):
            if stored.offset <= offset < stored.end and stored.has_rows:
                return stored
    return None


async def _shown(log: Partition, stored: Stored) -> HttpResponse:
    return await asyncio.to_thread(_response, f"{log.ledger}:{stored.offset}", stored)


def _response(message_id: str, stored: Stored) -> HttpResponse:
    data = chunk_in(stored.data) if is_last_chunk(stored.data) else chunks_of(stored.data)[0]
    batch = pulsar_batch.parse(data)
    if pulsar_batch.unpacked_bytes(batch) > SHOWN_BYTES_MAX:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"a batch of more than {SHOWN_BYTES_MAX} bytes is not shown by HTTP: consume it",
        )
    payload = bytes(data[batch.payload_at :]) if batch.is_chunk or batch.is_encrypted else None
    if payload is None:
        payload = bytes(pulsar_batch.payload_of(batch))
    headers = {f"X-Pulsar-{name}": text for name, text in _facts(batch).items()}
    return HttpResponse(payload, HTTPStatus.OK, {"X-Pulsar-Message-ID": message_id} | headers)


def _facts(batch: Batch) -> dict[str, str]:
    """What headers show of the batch's metadata."""
    metadata = batch.metadata
    facts = {
        "PROPERTY": json.dumps({pair.key: pair.value for pair in metadata.properties}),
        "publish-time": _time(metadata.publish_time),
        "producer-name": _in_header(metadata.producer_name),
        "sequence-id": str(metadata.sequence_id),
        "Is-Encrypted": str(batch.is_encrypted).lower(),
        "txn-uncommitted": "false",
    }
    if batch.batched:
        facts["num-batch-message"] = str(batch.messages)
        facts["batch-size"] = str(pulsar_batch.unpacked_bytes(batch))
    if metadata.event_time:
        facts["event-time"] = _time(metadata.event_time)
    if metadata.HasField("partition_key"):
        facts["partition-key"] = _in_header(metadata.partition_key)
        facts["partition-key-b64-encoded"] = str(metadata.partition_key_b64_encoded).lower()
    return facts


def _time(ms: int) -> str:
    """The time in ISO 8601; a time that has no date as its milliseconds."""
    try:
        return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"
    except (ValueError, OverflowError, OSError):
        return str(ms)


def _in_header(text: str | bytes) -> str:
    """The text as a header may have it: what is not printable ASCII is escaped, as in JSON."""
    plain = text.decode(errors="replace") if isinstance(text, bytes) else text
    return plain if plain.isascii() and plain.isprintable() else json.dumps(plain)[1:-1]


def _missing(call: Call) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.NOT_FOUND, f"there is no message at {call.request.path}")


# -- message ids -----------------------------------------------------------------------------------


def shown_id(ledger: int, entry: int, partition: int, messages: int = 0) -> dict[str, Any]:
    """A message id in Pulsar's JSON; of the last one of a batch of `messages`."""
    id_ = {"ledgerId": ledger, "entryId": entry, "partitionIndex": partition}
    return id_ | {"batchIndex": messages - 1, "batchSize": messages}


async def id_since(call: Call) -> Any:
    """The id of the batch with the first message that was stored at this time or later; without
    such a message the id that the next batch will have."""
    info, ms = await call.existing_topic(), call.number("ms")
    _, owned = await call.owned(info, "Get message ID by timestamp")
    offset = await owned.log.since(ms)
    stored = await _batch_at(owned.log, offset)
    entry = offset if stored is None else stored.offset
    return shown_id(owned.log.ledger, entry, owned.log.number_in_ids)


async def last_id(call: Call) -> Any:
    info = await call.existing_topic()
    _, owned = await call.owned(info, "Get last message id")
    log, last = owned.log, await owned.log.last()
    if last is None:
        return shown_id(log.ledger, -1, log.number_in_ids)
    return shown_id(
        log.ledger, last.offset, log.number_in_ids, last.messages if last.batched else 0
    )
