"""Where topics are, asked by HTTP, without a cluster."""

import asyncio
import json
from functools import partial

import pytest

from spark_ledger import errors
from spark_ledger.broker.serve.routes import respond
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.http import HEAD_BYTES_MAX, answer_http


class Broker:
    """Knows one topic with five partitions; notes what it is asked."""

    def __init__(self):
        self.asked, self.catalog = [], self

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


def ask(*requests):
    """The status and the JSON of each answer, and the broker."""

    async def main():
        broker = Broker()
        server = await asyncio.start_server(
            partial(answer_http, partial(respond, broker)), "127.0.0.1", 0, limit=HEAD_BYTES_MAX
        )
        found = []
        async with server:
            for request in requests:
                port = server.sockets[0].getsockname()[1]
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                found.append((int(head.split()[1]), json.loads(body)) if head else None)
                writer.close()
        return found, broker

    return asyncio.run(main())


def get(path):
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


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
        {"partitions": 5},
        {"partitions": 5},
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
        (get("/lookup/v2/topic/non-persistent/public/default/t"), 412, "persistent here"),
        (get("//[x/lookup"), 400, "malformed"),
        (get("/admin/v2/clusters"), 404, "nothing at /admin/v2/clusters"),
        (b"PUT /admin/v2/persistent/a/b/c HTTP/1.1\r\n\r\n", 412, "the admin API is not built"),
    ],
)
def test_an_error_has_the_status_by_which_clients_tell_it(request_, status, reason):
    ((found, body),), _ = ask(request_)
    assert found == status
    assert reason in body["reason"]


def test_a_head_without_end_is_cut_off():
    answers, _ = ask(b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * HEAD_BYTES_MAX)
    assert answers == [None]


def test_a_client_that_reads_nothing_holds_its_connection_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr("spark_ledger.http.RESPONSE_S", 0.1)

    async def main():
        broker, ended = Broker(), asyncio.Event()

        async def names_in(_):
            return ["persistent://a/b/" + "x" * 1000] * 20_000

        async def answer(reader, writer):
            await answer_http(partial(respond, broker), reader, writer)
            ended.set()

        broker.names_in = names_in
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        async with server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(b"GET /admin/v2/namespaces/a/b/topics HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(20):
                await ended.wait()
            writer.transport.abort()

    asyncio.run(main())
