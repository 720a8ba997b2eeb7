"""What an acknowledgement with a receipt takes, beside a send with its receipt, on a plain socket.

    python benchmarks/ack_receipts.py [messages]

Three bookies and a broker on this machine. Messages are acknowledged one by one, every second one
first, so that gaps stay. "in flight": so many acknowledgements wait for their receipts.
"""

import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

from benchmarks.broker_socket import Link, batch_of, produce
from spark_ledger.broker.wire.commands import MessageId, command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker

LONE = 300
IN_FLIGHT = 100
_RECEIPT = 38  # ACK_RESPONSE
_SUBSCRIPTION = {"subscription": "s", "subType": 0, "consumer_id": 0, "durable": True}


def acks_of(ids: list[MessageId], first_request: int) -> list[bytes]:
    return [
        encode(command("ack", consumer_id=0, ack_type=0, message_id=[id_], request_id=request))
        for request, id_ in enumerate(ids, first_request)
    ]


def consumed(url: str, topic: str, count: int) -> tuple[Link, list[MessageId]]:
    """A consumer that was sent so many messages, and their ids."""
    link, ids = Link(url), []
    link.found(topic)
    asked = command("subscribe", topic=topic, request_id=4, initialPosition=1, **_SUBSCRIPTION)
    link.ask(asked, "success")
    link.flow(count)
    for frame in link.messages():
        ids.append(frame.command.message.message_id)
        if len(ids) == count:
            return link, ids
    raise AssertionError("messages do not end")


def timed(link: Link, frames: list[bytes], receipt: int) -> float:
    """The median of ms until the receipt of one at a time."""
    times_ms = []
    for frame in frames:
        began_s = time.perf_counter()
        link.send(frame)
        while not link.counted(receipt):
            pass
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times_ms)


def measured(url: str, messages: int) -> None:
    topic, batch = f"persistent://public/default/acks-{uuid.uuid4()}", batch_of(0, 200)
    produce(url, topic, batch, messages + 2 * LONE, 0, 1000)
    link, ids = consumed(url, topic, messages + 2 * LONE)
    ordered = ids[1::2] + ids[::2]
    ack_ms = timed(link, acks_of(ordered[:LONE], 10), _RECEIPT)
    acks, waiting, began_s = (
        acks_of(ordered[LONE : LONE + messages], 10_000),
        0,
        time.perf_counter(),
    )
    for at in range(0, messages, IN_FLIGHT // 2):
        link.send(b"".join(acks[at : at + IN_FLIGHT // 2]))
        waiting += len(acks[at : at + IN_FLIGHT // 2])
        while waiting > IN_FLIGHT // 2:
            waiting -= link.counted(_RECEIPT)
    while waiting:
        waiting -= link.counted(_RECEIPT)
    rate = messages / (time.perf_counter() - began_s)
    link.close()
    sender = Link(url)
    sender.produce_on(topic)
    sends = [
        encode(command("send", producer_id=0, sequence_id=number, num_messages=1), batch)
        for number in range(LONE)
    ]
    send_ms = timed(sender, sends, 7)
    sender.close()
    print(f"p50 of a receipt: acknowledgement {ack_ms:.2f} ms, send {send_ms:.2f} ms,", end=" ")
    print(f"{ack_ms / send_ms:.2f} times; {rate:,.0f} receipts/s with {IN_FLIGHT} in flight")


def main() -> None:
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    with (
        LocalCluster(bookies=3, autorecovery=False) as cluster,
        tempfile.TemporaryDirectory() as at,
    ):
        broker = LocalBroker(Path(at) / "broker.log", cluster.service_url)
        broker.start()
        try:
            for _ in range(3):
                measured(broker.url, messages)
        finally:
            broker.stop()


if __name__ == "__main__":
    main()
