"""What Pulsar's clients ask by HTTP, where their service URL begins with http://: where topics are.

    GET /lookup/v2/topic/persistent/<tenant>/<namespace>/<topic>              {"brokerUrl": ...}
    GET /admin/v2/persistent/<tenant>/<namespace>/<topic>/partitions          {"partitions": n}
    GET /admin/v2/namespaces/<tenant>/<namespace>/topics                      [name, ...]

Always true: a connection has one request and one answer, which is JSON; a request's head has
HEAD_BYTES_MAX at most and comes within HEAD_S; what is asked is answered as by the binary protocol,
errors with the status by which a client tells them apart. Three questions need no web framework.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.wire.commands import Refusal, ServerError

HEAD_BYTES_MAX = 16 << 10
HEAD_S = 10.0
_STATUS = {
    ServerError.TOPIC_NOT_FOUND: (404, "Not Found"),
    ServerError.NOT_ALLOWED: (412, "Precondition Failed"),
    ServerError.SERVICE_NOT_READY: (503, "Service Unavailable"),
}
_log = logging.getLogger(__name__)


class HttpLookup:
    """`refusal_of` says how an error is refused."""

    def __init__(self, broker: Broker, refusal_of: Callable[[Exception], Refusal]) -> None:
        self._broker = broker
        self._refusal_of = refusal_of

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until its answer is sent."""
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            status, body = await self._answer(head.partition(b"\r\n")[0].decode("latin-1"))
            writer.write(_response(*status, body))
            await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that went, or sent no request: nothing was promised
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, line: str) -> tuple[tuple[int, str], Any]:
        method, _, rest = line.partition(" ")
        asked = urlsplit(rest.partition(" ")[0])
        try:
            if method != "GET":
                raise Refusal(ServerError.NOT_ALLOWED, f"{method}: the admin API is not built")
            parts = [unquote(one) for one in asked.path.strip("/").split("/")]
            return (200, "OK"), await self._asked(parts, parse_qs(asked.query))
        except Exception as error:
            refused = self._refusal_of(error)
            if refused.code is ServerError.UNKNOWN:
                _log.exception("a request by HTTP has failed")
            status = _STATUS.get(refused.code, (500, "Internal Server Error"))
            return status, {"reason": refused.message}

    async def _asked(self, parts: list[str], query: dict[str, list[str]]) -> Any:
        match parts:
            case ["lookup", "v2", "topic", domain, tenant, namespace, topic]:
                name = names.parse(f"{domain}://{tenant}/{namespace}/{topic}")
                url, _ = await self._broker.lookup(name, authoritative=False)
                return {"brokerUrl": url, "nativeUrl": url, "brokerUrlTls": "", "httpUrl": ""}
            case ["admin", "v2", "persistent", tenant, namespace, topic, "partitions"]:
                name = names.parse(f"persistent://{tenant}/{namespace}/{topic}")
                create = query.get("checkAllowAutoCreation") == ["true"]
                return {"partitions": await self._broker.partitions_of(name, create=create)}
            case ["admin", "v2", "namespaces", tenant, namespace, "topics"]:
                if query.get("mode") == ["NON_PERSISTENT"]:
                    return []
                return await self._broker.names_in(f"{tenant}/{namespace}")
        raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is nothing at /{'/'.join(parts)}")


def _response(status: int, reason: str, body: Any) -> bytes:
    encoded = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(encoded)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + encoded
