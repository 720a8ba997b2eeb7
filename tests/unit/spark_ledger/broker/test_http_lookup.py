"""Where topics are, asked by HTTP, without a cluster."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest

from spark_ledger import errors
from spark_ledger.broker.admin import schemas
from spark_ledger.broker.serve.routes import routes
from spark_ledger.broker.settings import DEFAULTS
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.http import BODY_BYTES_MAX, HEADERS_MAX, LINE_BYTES_MAX, protocol_of
from spark_ledger.topic.schema import client_schemas


class Store:
    """Has every node."""

    async def sync(self, path):
        pass

    async def get(self, path, watch=None):
        return b""

    async def children(self, path, watch=None):
        return []

    async def get_many(self, paths):
        return []


class NoTopics:
    async def find(self, name, *, fresh=True):
        return None

    async def names_in(self, namespace):
        return []


class Broker:
    """Knows one topic with five partitions; notes what it is asked."""

    def __init__(self):
        self.asked, self.catalog, self.client, self.store, self.rng = [], self, self, Store(), None
        self.non_persistent = self.topics = NoTopics()

    def _check(self, name):
        if name.topic.name == "gone":
            raise Refusal(ServerError.TOPIC_NOT_FOUND, "there is no topic 'gone'")
        if name.topic.name == "away":
            raise errors.Unavailable("the metadata store did not answer")
        if name.topic.name == "defect":
            raise KeyError("x")

    async def lookup(self, name, *, authoritative):
        self._check(name)
        self.asked.append((name.topic.full, name.partition))
        return "pulsar://b:6650", False

    async def partitions_of(self, name, *, create):
        self._check(name)
        self.asked.append((name.topic.full, create))
        return 5

    async def names_in(self, namespace):
        return [f"persistent://{namespace}/t-partition-0"]


@asynccontextmanager
async def listening(broker):
    """The port of a listener with the broker's routes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        await protocol_of(routes(lambda: broker, DEFAULTS)), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


def ask(*requests):
    """The status and the JSON of each answer, and the broker."""

    async def main():
        broker = Broker()
        found = []
        async with listening(broker) as port:
            for request in requests:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                found.append((int(head.split()[1]), json.loads(body)) if head else None)
                writer.close()
        return found, broker

    return asyncio.run(main())


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def test_a_topic_is_looked_up_its_partitions_counted_and_those_of_a_namespace_listed():
    answers, broker = ask(
        get("/lookup/v2/topic/persistent/public/default/a%2Eb-partition-3"),
        get("/admin/v2/persistent/public/default/t/partitions?checkAllowAutoCreation=true"),
        get("/admin/v2/persistent/public/default/t/partitions"),
        get("/admin/v2/namespaces/public/default/topics?mode=PERSISTENT"),
        get("/admin/v2/namespaces/public/default/topics?mode=NON_PERSISTENT"),
    )
    assert [status for status, _ in answers] == [200] * 5
    bodies = [body for _, body in answers]
    assert bodies[0]["brokerUrl"] == "pulsar://b:6650"
    assert bodies[1:] == [
        {"partitions": 5, "deleted": False},
        {"partitions": 5, "deleted": False},
        ["persistent://public/default/t-partition-0"],
        [],
    ]
    assert broker.asked == [
        ("persistent://public/default/a.b", 3),
        ("persistent://public/default/t", True),
        ("persistent://public/default/t", False),
    ]


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (get("/lookup/v2/topic/persistent/public/default/gone"), 404, "no topic 'gone'"),
        (get("/lookup/v2/topic/persistent/public/default/away"), 503, "did not answer"),
        (get("/lookup/v2/topic/persistent/public/default/defect"), 500, "a defect of the broker"),
        (get("/lookup/v2/topic/memory/public/default/t"), 412, "is no name of a topic"),
        (
            get("/lookup/v2/topic/persistent/public/default/t?listenerName=out"),
            503,
            "have out listener",
        ),
        (
            get("/lookup/v2/topic/persistent/public/default/t").replace(
                b"\r\n\r\n", b"\r\nX-Pulsar-ListenerName: in\r\n\r\n"
            ),
            503,
            "have in listener",
        ),
        (get("//[x/lookup"), 404, "nothing at"),
        (get("/admin/v2/worker/cluster"), 501, "GET /admin/v2/worker/cluster is not implemented"),
        (get("/admin/v2/x").replace(b"GET", b"PUT"), 501, "PUT /admin/v2/x is not implemented"),
        (get("/a/b/c").replace(b"GET", b"PUT"), 404, "nothing at /a/b/c"),
    ],
)
def test_an_error_has_the_status_by_which_clients_tell_it(request_, status, reason):
    ((found, body),), _ = ask(request_)
    assert found == status
    assert reason in body["reason"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /" + b"x" * LINE_BYTES_MAX + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * LINE_BYTES_MAX + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * (HEADERS_MAX + 1) + b"\r\n", 400),
        (
            b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n" + b"x" * 99_999,
            413,
        ),
        (b"no request at all\r\n\r\n", 400),
    ],
)
def test_a_request_that_is_too_large_or_none_is_refused_in_json(request_, status):
    assert len(request_) < BODY_BYTES_MAX or status == 413
    ((answered, body),), _ = ask(request_)
    assert answered == status
    assert body["reason"]


@pytest.mark.parametrize(
    ("verb", "status"), [("schema", 400), ("compatibility", 404), ("version", 400)]
)
def test_a_body_with_the_largest_schema_is_read(verb, status):
    schema = "é" * (client_schemas.DATA_BYTES_MAX // 2)
    body = json.dumps({"type": "JSON", "schema": schema, "properties": 7}).encode()
    assert BODY_BYTES_MAX < len(body) < schemas.BODY_BYTES_MAX
    answers, _ = ask(posted(verb, body), posted(verb, b" " * (schemas.BODY_BYTES_MAX + 1)))
    assert [answered for answered, _ in answers] == [status, 413]
    assert all(body["reason"] for _, body in answers)


def posted(verb, body):
    head = f"POST /admin/v2/schemas/a/b/c/{verb} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_head_that_does_not_end_is_cut_off_in_time(monkeypatch):
    monkeypatch.setattr("spark_ledger.http.HEAD_S", 0.1)
    answers, _ = ask(b"GET / HTTP/1.1\r\nX: x\r\n", b"")
    assert answers == [None, None]


def test_a_body_that_does_not_come_is_cut_off_in_time(monkeypatch):
    monkeypatch.setattr("spark_ledger.http.RESPONSE_S", 0.1)
    answers, _ = ask(b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx")
    assert answers == [None]


def test_a_client_that_reads_nothing_holds_its_connection_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr("spark_ledger.http.RESPONSE_S", 0.1)

    async def main():
        broker, is_cut = Broker(), asyncio.Event()
        connection_class = type((await protocol_of(routes(lambda: broker, DEFAULTS)))())
        connection_lost = connection_class.connection_lost

        def lost(connection, error):
            is_cut.set()
            connection_lost(connection, error)

        monkeypatch.setattr(connection_class, "connection_lost", lost)

        async def names_in(_):
            return ["persistent://a/b/" + "x" * 1000] * 20_000

        broker.names_in = names_in
        async with listening(broker) as port, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(b"GET /admin/v2/namespaces/a/b/topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await is_cut.wait()
            received = b""
            with suppress(ConnectionError):
                received = await reader.read()
            assert len(received) < 20_000_000  # the rest was dropped with the connection

    asyncio.run(main())
