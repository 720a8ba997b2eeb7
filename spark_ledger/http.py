"""The HTTP application: requests answered with JSON; which there are is its handler's matter.

Always true: a connection has one request and one response; a request's head has HEAD_BYTES_MAX at
most and comes within HEAD_S, and a response is taken within RESPONSE_S. What is asked today needs
no web framework: three GETs without a body.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

HEAD_BYTES_MAX = 16 << 10
HEAD_S, RESPONSE_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """`path` in its parts, and the query's values by name, both decoded."""

    method: str
    path: tuple[str, ...]
    query: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    body: Any
    """As JSON."""
    status: HTTPStatus = HTTPStatus.OK


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""It raises nothing: an error is a response."""


def application(handle: Handler) -> Callable[[], asyncio.StreamReaderProtocol]:
    """Makes the protocol of each connection to a listener."""

    def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
        return answer_http(handle, reader, writer)

    return lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=HEAD_BYTES_MAX), respond)


async def answer_http(
    handle: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection, until its response is sent."""
    try:
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.write(_encoded(await _response(handle, head)))
        async with asyncio.timeout(RESPONSE_S):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # a client that went, or sent no request: nothing was promised
    finally:
        writer.transport.abort()  # else a client that reads nothing would hold it


async def _response(handle: Handler, head: bytes) -> HttpResponse:
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    try:
        target = urlsplit(rest.partition(" ")[0])
        query = parse_qs(target.query)
    except ValueError as error:
        return HttpResponse({"reason": f"a malformed request: {error}"}, HTTPStatus.BAD_REQUEST)
    path = tuple(unquote(part) for part in target.path.strip("/").split("/"))
    return await handle(HttpRequest(method, path, query))


def _encoded(response: HttpResponse) -> bytes:
    body, status = json.dumps(response.body).encode(), response.status
    head = (
        f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
