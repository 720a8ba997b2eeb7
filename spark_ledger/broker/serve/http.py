"""Where topics are, for clients whose service URL begins with http://.

Always true: a connection has one request and one answer, which is JSON; a request's head has
HEAD_BYTES_MAX at most and comes within HEAD_S. Three questions need no web framework.

    GET /lookup/v2/topic/persistent/<tenant>/<namespace>/<topic>              {"brokerUrl": ...}
    GET /admin/v2/persistent/<tenant>/<namespace>/<topic>/partitions          {"partitions": n}
    GET /admin/v2/namespaces/<tenant>/<namespace>/topics                      [name, ...]
"""

import asyncio
import json
import logging
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.wire.commands import Refusal, ServerError

HEAD_BYTES_MAX = 16 << 10
HEAD_S, ANSWER_S = 10.0, 60.0
_STATUS = {
    ServerError.TOPIC_NOT_FOUND: (404, "Not Found"),
    ServerError.NOT_ALLOWED: (412, "Precondition Failed"),
    ServerError.SERVICE_NOT_READY: (503, "Service Unavailable"),
}
_log = logging.getLogger(__name__)


async def answer_http(
    broker: Broker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection, until its answer is sent."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        try:
            asked = urlsplit(rest.partition(" ")[0])
            status, reason, body = 200, "OK", await _asked(broker, method, asked)
        except Exception as error:
            refused = refusal_of(error)
            if refused.code is ServerError.UNKNOWN:
                _log.exception("a request by HTTP has failed")
            status, reason = _STATUS.get(refused.code, (500, "Internal Server Error"))
            body = {"reason": refused.message}
        encoded = json.dumps(body).encode()
        writer.write(
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(encoded)}\r\nConnection: close\r\n\r\n".encode()
            + encoded
        )
        async with asyncio.timeout(ANSWER_S):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # a client that went, or sent no request: nothing was promised
    finally:
        writer.transport.abort()  # else a client that reads nothing would hold it


async def _asked(broker: Broker, method: str, asked: SplitResult) -> Any:
    """What is answered. Raises Refusal, errors of the topic layer."""
    if method != "GET":
        raise Refusal(ServerError.NOT_ALLOWED, f"{method}: the admin API is not built")
    parts = [unquote(part) for part in asked.path.strip("/").split("/")]
    query = parse_qs(asked.query)
    match parts:
        case ["lookup", "v2", "topic", domain, tenant, namespace, topic]:
            name = names.parse(f"{domain}://{tenant}/{namespace}/{topic}")
            url, _ = await broker.lookup(name, authoritative=False)
            return {"brokerUrl": url, "nativeUrl": url, "brokerUrlTls": "", "httpUrl": ""}
        case ["admin", "v2", "persistent", tenant, namespace, topic, "partitions"]:
            name = names.parse(f"persistent://{tenant}/{namespace}/{topic}")
            create = query.get("checkAllowAutoCreation") == ["true"]
            return {"partitions": await broker.catalog.partitions_of(name, create=create)}
        case ["admin", "v2", "namespaces", tenant, namespace, "topics"]:
            if query.get("mode") == ["NON_PERSISTENT"]:
                return []
            return await broker.catalog.names_in(f"{tenant}/{namespace}")
    raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is nothing at /{'/'.join(parts)}")
