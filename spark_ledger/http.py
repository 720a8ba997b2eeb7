"""HTTP: an application of routes, with limits and deadlines around aiohttp's parser; and requests
to other servers.

Always true:
- a connection has one request and one response. It is cut if the request's head does not arrive
  within HEAD_S, or if the client has not read the response within RESPONSE_S;
- a line of a head has LINE_BYTES_MAX at most, a head HEADERS_MAX fields, a body as many bytes as
  its route allows.
  No more of a request is kept in memory, and no body is decompressed;
- a response is JSON, bytes, or empty; an error's response is {"reason": ...}. JSON that the caller
  makes in pieces is sent piece by piece, as the client reads it.

The caller decides which routes there are, and which requests are refused.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

LINE_BYTES_MAX = 8 << 10
HEADERS_MAX = 32
BODY_BYTES_MAX = 64 << 10
HEAD_S, RESPONSE_S = 10.0, 60.0
ASK_S = 5.0
ANSWER_BYTES_MAX = 32 << 20  # of the response to `ask`
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """`parts`: by name, the parts of the path that match {name} in the route; `query`: the query's
    values by name; both are decoded. `headers`: by name in lower case. `peer`, `own`: the IP
    addresses of the two ends of the connection."""

    method: str
    path: str
    parts: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    peer: str = ""
    own: str = ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """`body` is sent unchanged if it is bytes, else as JSON; not at all with status NO_CONTENT.
    `media` is the type of a body of bytes. An iterator has the pieces of a text of JSON."""

    body: Any = None
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    media: str = "application/octet-stream"


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""It raises nothing: an error is a response."""


@dataclass(frozen=True, slots=True)
class Route:
    """A method ("*": any), and a path in which {name} matches one part, {name:.*} all the rest."""

    method: str
    path: str
    handle: Handler
    body_bytes_max: int = BODY_BYTES_MAX


async def protocol_of(routes: Iterable[Route]) -> Callable[[], asyncio.BaseProtocol]:
    """A function that makes the protocol of each connection to a listener (net.served_by). The
    first route that matches a request handles it."""
    app = web.Application(middlewares=[_end_in_time])
    for route in routes:
        app.router.add_route(route.method, route.path, _handler_of_aiohttp(route))
    runner = web.AppRunner(app, handle_signals=False, access_log=None)
    await runner.setup()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    return lambda: _Connection(
        server,
        loop=loop,
        access_log=None,  # type: ignore[arg-type]
        max_line_size=LINE_BYTES_MAX,
        max_field_size=LINE_BYTES_MAX,
        max_headers=HEADERS_MAX,
        auto_decompress=False,
        lingering_time=0,
    )


def _handler_of_aiohttp(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def respond(request: web.Request) -> web.StreamResponse:
        request = request.clone(client_max_size=route.body_bytes_max)
        peer, own = ((request.get_extra_info(end) or ("",))[0] for end in ("peername", "sockname"))
        response = await route.handle(
            HttpRequest(
                request.method,
                request.path,
                dict(request.match_info),
                dict(request.query),
                {name.lower(): value for name, value in request.headers.items()},
                await request.read(),
                peer,
                own,
            )
        )
        if isinstance(response.body, AsyncIterator):
            return await _stream(response.body, request)
        return _encoded(response)

    return respond


async def _stream(pieces: AsyncIterator[bytes], request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "application/json"
    response.force_close()
    await response.prepare(request)
    async for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


@web.middleware
async def _end_in_time(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Around the handling of every request whose head has arrived."""
    assert isinstance(request.protocol, _Connection)
    request.protocol.cut_after(RESPONSE_S)
    try:
        response = await handler(request)
    except web.HTTPException as error:  # aiohttp's own: no such route, a body that is too large
        response = _refusal(error.status, error.text or error.reason)
    response.force_close()
    return response


class _Connection(web.RequestHandler):
    """Adds the deadlines that aiohttp lacks: for a head that arrives slowly, and for a response
    that the client does not read."""

    __slots__ = ("_cut",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._cut: asyncio.TimerHandle | None = None
        self.cut_after(HEAD_S)

    def cut_after(self, seconds: float) -> None:
        """Cut the connection after `seconds`, in the place of an earlier deadline."""
        if self._cut is not None:
            self._cut.cancel()
        if self.transport is not None:
            self._cut = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        what = "a malformed request"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            what = "a defect"
            _log.error("a request by HTTP has failed", exc_info=exc)
        response = _refusal(status, f"{what}: {message or repr(exc)}")
        response.force_close()
        return response


def _refusal(status: int, reason: str) -> web.Response:
    return _encoded(HttpResponse({"reason": reason}, HTTPStatus(status)))


def _encoded(response: HttpResponse) -> web.Response:
    headers = dict(response.headers)
    if response.status is HTTPStatus.NO_CONTENT:
        return web.Response(status=response.status, headers=headers)
    kind, body = "application/json", response.body
    if isinstance(body, bytes):
        kind = response.media
    else:
        body = json.dumps(body).encode()
    return web.Response(status=response.status, headers=headers, body=body, content_type=kind)


# -- asking ----------------------------------------------------------------------------------------


class HttpFailure(Exception):
    """A server did not respond with success and JSON; `status` is None if no response came."""

    def __init__(self, what: str, status: int | None = None) -> None:
        super().__init__(what)
        self.status = status


async def ask(url: str, method: str = "GET", body: Any = None, within_s: float = ASK_S) -> Any:
    """The JSON of the response, None if it has no body. Raises HttpFailure."""
    limit = ClientTimeout(total=within_s)
    try:
        async with (
            ClientSession(timeout=limit, read_bufsize=ANSWER_BYTES_MAX) as session,
            session.request(method, url, json=body) as response,
        ):
            answer = await response.content.read(ANSWER_BYTES_MAX + 1)
            while (more := await response.content.read(ANSWER_BYTES_MAX)) and (
                len(answer) <= ANSWER_BYTES_MAX
            ):
                answer += more
            if len(answer) > ANSWER_BYTES_MAX:
                raise HttpFailure(f"{url} answers with more than {ANSWER_BYTES_MAX} bytes")
            plain = json.loads(answer) if answer else None
            if response.status >= HTTPStatus.BAD_REQUEST:
                reason = plain.get("reason") if isinstance(plain, dict) else None
                raise HttpFailure(f"{url} answers {response.status}: {reason}", response.status)
            return plain
    except (ClientError, OSError, TimeoutError, ValueError) as error:
        raise HttpFailure(f"{url} does not answer: {error!r}") from error
