"""A client of a broker on a plain socket, for what Pulsar's own clients do not send."""

import socket

from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode


class Socket:
    """One connection. `messages`: the ids of the MESSAGEs that came and were not taken yet, with
    their consumers."""

    def __init__(self, url):
        host, _, port = url.removeprefix("pulsar://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._frames, self._waiting, self._requests = PulsarFrameReader(), [], 0
        self.messages = []
        self.tell("connect", client_version="socket", protocol_version=19)

    def close(self):
        self._socket.close()

    def tell(self, name, data=b"", **fields):
        frame = encode(command(name, **fields), data) if data else encode(command(name, **fields))
        self._socket.sendall(frame)

    def ask(self, name, prepare=lambda part: None, **fields):
        """The name and the content of the response."""
        self._requests += 1
        asked = command(name, request_id=self._requests, **fields)
        prepare(getattr(asked, name))
        self._socket.sendall(encode(asked))
        while True:
            for field, part in self._next().ListFields():
                if getattr(part, "request_id", None) == self._requests:
                    return field.name, part

    def refused(self, name, prepare=lambda part: None, **fields):
        """The code and the words of the error."""
        answer, part = self.ask(name, prepare, **fields)
        assert answer in ("error", "ack_response") and part.message, (answer, part)
        return part.error, part.message

    def until_served(self):
        """Returns as soon as the broker has carried out all commands before."""
        self.tell("ping")
        while not self._next().HasField("pong"):
            pass

    def until(self, name):
        """The next command of this name that the broker sends by itself."""
        while not (received := self._next()).HasField(name):
            pass
        return getattr(received, name)

    def taken(self, count):
        """The next MESSAGEs."""
        while len(self.messages) < count:
            self._next()
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken

    def _next(self):
        while not self._waiting:
            data = self._socket.recv(1 << 20)
            assert data, "the broker ended the connection"
            self._waiting += self._frames.feed(data)
        received = self._waiting.pop(0).command
        if received.HasField("message"):
            self.messages.append(received.message)
        elif received.HasField("ping"):
            self.tell("pong")
        return received

    def subscribe(self, topic, kind, name="s", prepare=lambda part: None, **fields):
        fields = {"consumer_id": 1, "durable": True, "initialPosition": 1} | fields
        return self.ask(
            *("subscribe", prepare), topic=topic, subscription=name, subType=kind, **fields
        )

    def subscribed(self, topic, kind, name="s", prepare=lambda part: None, **fields):
        answer, part = self.subscribe(topic, kind, name, prepare, **fields)
        assert answer == "success", part

    def send(self, topic, *batches):
        """Messages of these sizes (0: outside of a batch); returns the number that the ids of the
        topic begin with."""
        self.ask("producer", topic=topic, producer_id=1)
        for sequence_id, data in enumerate(batches):
            self.tell("send", data, producer_id=1, sequence_id=sequence_id, num_messages=1)
        receipts = []
        while len(receipts) < len(batches):
            received = self._next()
            assert not received.HasField("send_error"), received
            if received.HasField("send_receipt"):
                receipts.append(received.send_receipt.message_id.ledgerId)
        return receipts[0]
