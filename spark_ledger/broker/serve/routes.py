"""Lookups by HTTP, for clients whose service URL begins with http://.

    GET /lookup/v2/topic/persistent/<tenant>/<namespace>/<topic>              {"brokerUrl": ...}
    GET /admin/v2/persistent/<tenant>/<namespace>/<topic>/partitions          {"partitions": n}
    GET /admin/v2/namespaces/<tenant>/<namespace>/topics                      [name, ...]

Always true: a refused request has the status by which Pulsar's clients know the error, and the
reason in words.
"""

import logging
from http import HTTPStatus
from typing import Any

from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.http import HttpRequest, HttpResponse

_STATUS = {
    ServerError.TOPIC_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.NOT_ALLOWED: HTTPStatus.PRECONDITION_FAILED,
    ServerError.SERVICE_NOT_READY: HTTPStatus.SERVICE_UNAVAILABLE,
}
_log = logging.getLogger(__name__)


async def respond(broker: Broker, request: HttpRequest) -> HttpResponse:
    try:
        return HttpResponse(await _carry_out(broker, request))
    except Exception as error:
        refusal = refusal_of(error)
        if refusal.code is ServerError.UNKNOWN:
            _log.exception("a request by HTTP has failed")
        status = _STATUS.get(refusal.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        return HttpResponse({"reason": refusal.message}, status)


async def _carry_out(broker: Broker, request: HttpRequest) -> Any:
    """Raises Refusal, errors of the topic layer."""
    if request.method != "GET":
        raise Refusal(ServerError.NOT_ALLOWED, f"{request.method}: the admin API is not built")
    match request.path:
        case ("lookup", "v2", "topic", domain, tenant, namespace, topic):
            name = names.parse(f"{domain}://{tenant}/{namespace}/{topic}")
            url, _ = await broker.lookup(name, authoritative=False)
            return {"brokerUrl": url, "nativeUrl": url, "brokerUrlTls": "", "httpUrl": ""}
        case ("admin", "v2", "persistent", tenant, namespace, topic, "partitions"):
            name = names.parse(f"persistent://{tenant}/{namespace}/{topic}")
            create = request.query.get("checkAllowAutoCreation") == ["true"]
            return {"partitions": await broker.catalog.partitions_of(name, create=create)}
        case ("admin", "v2", "namespaces", tenant, namespace, "topics"):
            if request.query.get("mode") == ["NON_PERSISTENT"]:
                return []
            return await broker.catalog.names_in(f"{tenant}/{namespace}")
    raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is nothing at /{'/'.join(request.path)}")
