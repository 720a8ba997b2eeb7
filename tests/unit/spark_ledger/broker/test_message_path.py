"""docs/architecture.md walks a message: each file that runs between a SEND and its receipt, for a
delivery, and for an acknowledgement until it is durable is named there."""

import asyncio

from spark_ledger.broker import names
from spark_ledger.broker.serve.connection import Connection
from spark_ledger.broker.wire.commands import AckType, command
from spark_ledger.broker.wire.frames import encode
from tests.kit.paths import Ran, functions_that_run, named
from tests.kit.pulsar_batches import lone, message
from tests.unit.spark_ledger.broker.background import Brokers
from tests.unit.spark_ledger.broker.connections import Socket
from tests.unit.spark_ledger.topic.stage import play

TOPIC = "persistent://public/default/t-partition-0"
FILES_MAX, FUNCTIONS_MAX = 36, 205
"""Of a SEND: from its bytes, over the adds of its entry, to the bytes of its receipt."""


async def ran_for_a_message(stage):
    """What ran for a SEND, and for its delivery and its acknowledgement."""
    broker = await Brokers(stage).new("a")
    broker.message_bytes_max = 4 << 10  # entries of the simulation are small
    connection, socket = Connection(broker, lambda _: None), Socket()
    connection.connection_made(socket)

    async def asked(answer, name, data=None, **fields):
        connection.data_received(encode(command(name, **fields), data or b""))
        return await socket.answer(answer)

    def send(sequence_id):
        data = lone(message(b"x"), sequence_id=sequence_id)
        fields = {"producer_id": 1, "sequence_id": sequence_id, "num_messages": 1}
        return asked("send_receipt", "send", data, **fields)

    await asked("connected", "connect", client_version="raw", protocol_version=19)
    await broker.lookup(names.parse(TOPIC), authoritative=True)
    await asked("producer_success", "producer", topic=TOPIC, producer_id=1, request_id=1)
    fields = {"subscription": "s", "subType": 0, "initialPosition": 1, "durable": True}
    await asked("success", "subscribe", topic=TOPIC, consumer_id=1, request_id=2, **fields)
    await send(0)
    await asyncio.sleep(5)
    with functions_that_run(threads=False) as sending:
        await send(1)
    await asyncio.sleep(5)
    with functions_that_run(threads=False) as receiving:
        flow = command("flow", consumer_id=1, messagePermits=10)
        connection.data_received(encode(flow))
        received = [await socket.answer("message") for _ in range(2)]
        ack = command("ack", consumer_id=1, ack_type=AckType.CUMULATIVE)
        ack.ack.message_id.add().CopyFrom(received[1].message_id)
        connection.data_received(encode(ack))
        await asyncio.sleep(3)
    (subscription,) = await broker.client.subscriptions.list(stage.topic.id, exact=True)
    assert subscription.positions[0] == 2
    connection.connection_lost(None)
    await broker.seal()
    return sending, receiving


def test_the_page_walks_a_message():
    sending, receiving = play(ran_for_a_message)
    page = named("The path of a message")
    others = named("The path of an append") | named("What every path uses")
    others |= named("Beside the path of a message")  # the broker's background, say
    ran = sending.files | receiving.files
    assert sorted(ran - page - others) == [], "these ran, and the page does not name them"
    assert sorted(page - ran) == [], "the page names these, and they did not run"


def test_a_message_runs_through_few_files_and_functions():
    sending, _ = play(ran_for_a_message)
    client_side = Ran({code: path for code, path in sending.items() if path.startswith("spark")})
    print(f"\na SEND: {len(client_side.files)} files, {len(client_side)} functions")
    assert len(client_side.files) <= FILES_MAX
    assert len(client_side) <= FUNCTIONS_MAX
