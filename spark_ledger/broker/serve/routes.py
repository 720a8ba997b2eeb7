"""The broker's routes by HTTP: lookups, for clients whose service URL begins with http://.

    GET /lookup/v2/topic/persistent/<tenant>/<namespace>/<topic>              {"brokerUrl": ...}
    GET /admin/v2/persistent/<tenant>/<namespace>/<topic>/partitions          {"partitions": n}
    GET /admin/v2/namespaces/<tenant>/<namespace>/topics                      [name, ...]

Always true: a refused request has the status by which Pulsar's clients know the error, and the
reason in words.
"""

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.serve.commands import check_listener, refusal_of
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.http import HttpRequest, HttpResponse, Route

_STATUS = {
    ServerError.TOPIC_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.NOT_ALLOWED: HTTPStatus.PRECONDITION_FAILED,
    ServerError.SERVICE_NOT_READY: HTTPStatus.SERVICE_UNAVAILABLE,
}
_log = logging.getLogger(__name__)

Verb = Callable[[Broker, HttpRequest], Awaitable[Any]]
"""It returns the JSON of the response. It raises Refusal, errors of the topic layer."""


def routes(broker: Callable[[], Broker]) -> list[Route]:
    """`broker` is called once a request comes."""

    def route(method: str, path: str, verb: Verb) -> Route:
        async def handle(request: HttpRequest) -> HttpResponse:
            try:
                return HttpResponse(await verb(broker(), request))
            except Exception as error:
                return _refused(error)

        return Route(method, path, handle)

    return [route(*entry) for entry in VERBS]


def _refused(error: Exception) -> HttpResponse:
    refusal = refusal_of(error)
    if refusal.code is ServerError.UNKNOWN:
        _log.exception("a request by HTTP has failed")
    status = _STATUS.get(refusal.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    return HttpResponse({"reason": refusal.message}, status)


async def _lookup(broker: Broker, request: HttpRequest) -> Any:
    check_listener(request.query.get("listenerName", ""))
    name = names.parse("{domain}://{tenant}/{namespace}/{topic}".format(**request.parts))
    url, _ = await broker.lookup(name, authoritative=False)
    return {"brokerUrl": url, "nativeUrl": url, "brokerUrlTls": "", "httpUrl": ""}


async def _partitions(broker: Broker, request: HttpRequest) -> Any:
    name = names.parse("persistent://{tenant}/{namespace}/{topic}".format(**request.parts))
    create = request.query.get("checkAllowAutoCreation") == "true"
    return {"partitions": await broker.catalog.partitions_of(name, create=create)}


async def _topics_of_namespace(broker: Broker, request: HttpRequest) -> Any:
    if request.query.get("mode") == "NON_PERSISTENT":
        return []
    return await broker.catalog.names_in("{tenant}/{namespace}".format(**request.parts))


async def _nothing_there(broker: Broker, request: HttpRequest) -> Any:
    if request.method != "GET":
        raise Refusal(ServerError.NOT_ALLOWED, f"{request.method}: the admin API is not built")
    raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is nothing at {request.path}")


VERBS: tuple[tuple[str, str, Verb], ...] = (
    ("GET", "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}", _lookup),
    ("GET", "/admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions", _partitions),
    ("GET", "/admin/v2/namespaces/{tenant}/{namespace}/topics", _topics_of_namespace),
    ("*", "/{rest:.*}", _nothing_there),
)
