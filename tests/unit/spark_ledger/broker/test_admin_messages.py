"""Stored messages by their ids, by the admin API."""

import json
from types import SimpleNamespace
from unittest.mock import AsyncMock

from spark_ledger.broker import names
from spark_ledger.broker.admin import call, messages
from spark_ledger.broker.serve.routes import routes
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.http import HttpRequest
from tests.kit.pulsar_batches import batch_of, lone, message
from tests.unit.spark_ledger.broker.sessions import TOPIC, session_of
from tests.unit.spark_ledger.topic.stage import play

PATH = "/admin/v2/persistent/{tenant}/{namespace}/{topic}/ledger/{ledger}/entry/{entry}"
HEADERS = {"host": "127.0.0.1:8080"}


async def read(broker, ledger, entry):
    route = next(one for one in routes(lambda: broker, DEFAULTS) if one.path == PATH)
    parts = {"tenant": "public", "namespace": "default", "topic": "t-partition-0"}
    parts |= {"ledger": str(ledger), "entry": str(entry)}
    path = PATH.format(**parts)
    asked = HttpRequest("GET", path, parts, {}, HEADERS, b"", "127.0.0.1", "127.0.0.1")
    return await route.handle(asked)


async def in_this_thread(call, *args):
    """The simulated loop has no threads."""
    return call(*args)


def test_a_message_and_a_batch_are_read_by_their_ids(monkeypatch):
    monkeypatch.setattr(messages.asyncio, "to_thread", in_this_thread)

    async def main(stage):
        broker, session = await session_of(stage)
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        single = lone(message(b"one", properties={"p": "é"}), sequence_id=0)
        several = batch_of([message(b"two"), message(b"three")], sequence_id=1)
        for count, data in ((1, single), (2, several)):
            sent = {"producer_id": 1, "num_messages": count}
            receipt = await session.answer("send_receipt", "send", data, **sent)
        ledger = receipt.message_id.ledgerId

        found = await read(broker, ledger, 0)
        assert (found.status, found.body) == (200, b"one")
        assert found.headers["X-Pulsar-Message-ID"] == f"{ledger}:0"
        assert json.loads(found.headers["X-Pulsar-PROPERTY"]) == {"p": "é"}
        assert "X-Pulsar-num-batch-message" not in found.headers
        found = await read(broker, ledger, 1)
        assert found.headers["X-Pulsar-num-batch-message"] == "2"
        assert b"two" in found.body and found.body.endswith(b"three")

        for place in ((ledger, 3), (ledger, 2), (ledger + 2, 0)):
            assert (await read(broker, *place)).status == 404, place
        assert (await read(broker, ledger, "x")).status == 400
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_a_broker_without_the_partition_sends_the_request_on_to_its_owner(monkeypatch):
    async def main(stage):
        broker, session = await session_of(stage)

        async def elsewhere(name, *, authoritative):
            return "pulsar://b:1", False

        monkeypatch.setattr(broker, "lookup", elsewhere)
        ledger = names.ledger_number(stage.topic.id)
        assert (await read(broker, ledger, 0)).status == 503, "it has no address for HTTP"
        owner = SimpleNamespace(url="pulsar://b:1", admin_url="http://b:2")
        monkeypatch.setattr(call, "brokers_alive", AsyncMock(return_value={"b": owner}))
        found = await read(broker, ledger, 0)
        path = f"/admin/v2/persistent/public/default/t-partition-0/ledger/{ledger}/entry/0"
        assert (found.status, found.headers["Location"]) == (307, f"http://b:2{path}")
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)
