"""Verbs that show a stored message or batch: by a message id, or the n-th of a subscription.

Always true: a broker that does not have the partition redirects the request to the owner. The body
of the response has the producer's bytes, decompressed; a batch has the metadata of each message
too.
"""

import asyncio
import json
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import quote

from spark_ledger.broker import names
from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.broker.admin.call import Call
from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.broker.log.membership import brokers_alive
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.owner.owned_partition import OwnedPartition
from spark_ledger.http import HttpResponse
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_batch import chunk_in, chunks_of, is_last_chunk

DIGITS_MAX = 19
PEEK_MAX = 10_000
SHOWN_BYTES_MAX = 16 << 20


async def message(call: Call) -> HttpResponse:
    info = await call.existing_topic()
    ledger, entry = _number_of(call, "ledger"), _number_of(call, "entry")
    if ledger != names.ledger_number(info.id):
        raise _missing(call)
    url, is_here = await call.broker.lookup(call.name, authoritative=False)
    if not is_here:
        return await _redirect_to(call, url)
    _, owned = await call.broker.partition(call.name, create=False)
    return await _stored_at(call, owned, ledger, entry, is_first=True)


async def peek(call: Call) -> HttpResponse:
    """The batch that has the n-th message, from 1 on, of those not acknowledged in the
    subscription."""
    info, number = await call.existing_topic(), _number_of(call, "position")
    if not 1 <= number <= PEEK_MAX:
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"only messages 1 to {PEEK_MAX} can be shown, not message {number}",
        )
    name = call.request.parts["subscription"]
    positions = await call.client.subscriptions.positions(info.id, name)
    url, is_here = await call.broker.lookup(call.name, authoritative=False)
    if not is_here:
        return await _redirect_to(call, url)
    topic, owned = await call.broker.partition(call.name, create=False)
    offset = positions.get(owned.number, 0) + number - 1
    used = {subscription.name: subscription for subscription in topic.subscriptions.used_here()}
    dispatcher = used[name].dispatcher_of(owned.number) if name in used else None
    if dispatcher is not None:
        offset = _nth_unacknowledged(dispatcher.acks, owned.log.end, number)
    ledger = names.ledger_number(info.id)
    return await _stored_at(call, owned, ledger, offset, is_first=False)


def _nth_unacknowledged(acks: Acks, end: int, number: int) -> int:
    """The offset of the n-th message below `end` that is not acknowledged; `end` if there are fewer
    such messages."""
    for lo, hi in acks.missing(acks.mark, end):
        if number <= hi - lo:
            return lo + number - 1
        number -= hi - lo
    return end


async def _stored_at(
    call: Call, owned: OwnedPartition, ledger: int, offset: int, *, is_first: bool
) -> HttpResponse:
    """The batch that has the offset; with `is_first`, only if the batch begins there."""
    if not owned.log.start <= offset < owned.log.end:
        raise _missing(call)
    for stored in await owned.log.read(offset):
        if stored.offset <= offset < stored.end and stored.has_rows:
            if is_first and stored.offset != offset:
                break
            return await asyncio.to_thread(_response, f"{ledger}:{stored.offset}", stored)
    raise _missing(call)


async def _redirect_to(call: Call, url: str) -> HttpResponse:
    registered = await brokers_alive(call.client.store)
    for broker in registered.values():
        if broker.url == url and broker.admin_url:
            to = {"Location": broker.admin_url + quote(call.request.path)}
            return HttpResponse(status=HTTPStatus.TEMPORARY_REDIRECT, headers=to)
    raise HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE, f"the broker at {url} has the message: ask that broker"
    )


def _response(message_id: str, stored: Stored) -> HttpResponse:
    data = chunk_in(stored.data) if is_last_chunk(stored.data) else chunks_of(stored.data)[0]
    batch = pulsar_batch.parse(data)
    if pulsar_batch.unpacked_bytes(batch) > SHOWN_BYTES_MAX:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"a batch of more than {SHOWN_BYTES_MAX} bytes is not shown by HTTP: consume it",
        )
    metadata = batch.metadata
    published = datetime.fromtimestamp(metadata.publish_time / 1000, UTC)
    headers = {
        "X-Pulsar-Message-ID": message_id,
        "X-Pulsar-publish-time": published.isoformat(timespec="milliseconds"),
    }
    if batch.batched:
        headers["X-Pulsar-num-batch-message"] = str(batch.messages)
    properties = {pair.key: pair.value for pair in metadata.properties}
    if properties:
        headers["X-Pulsar-PROPERTY"] = json.dumps(properties)
    payload = bytes(data[batch.payload_at :]) if batch.is_chunk or batch.is_encrypted else None
    if payload is None:
        payload = bytes(pulsar_batch.payload_of(batch))
    return HttpResponse(payload, HTTPStatus.OK, headers)


def _number_of(call: Call, name: str) -> int:
    text = call.request.parts[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > DIGITS_MAX:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"'{text}', given as {name}, is not a number")
    return int(text)


def _missing(call: Call) -> HttpRefusal:
    return HttpRefusal(HTTPStatus.NOT_FOUND, f"there is no message at {call.request.path}")
